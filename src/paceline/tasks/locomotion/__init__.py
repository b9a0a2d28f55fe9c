"""Tasks in which a robot runs forward."""
