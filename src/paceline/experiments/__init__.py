"""Experiments: many runs, compared with each other."""
