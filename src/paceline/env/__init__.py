"""A task in many envs: actions in, observations out."""
