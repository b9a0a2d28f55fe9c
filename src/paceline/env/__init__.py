"""A task in many worlds: actions in, observations out."""
