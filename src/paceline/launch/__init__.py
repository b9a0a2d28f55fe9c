"""Start the ranks of a run with existing launchers."""
