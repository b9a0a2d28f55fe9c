"""Tasks in which a legged robot follows a velocity command."""
