"""Signals and standard streams of one process."""
