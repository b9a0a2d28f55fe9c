"""Loggers of the training metrics, one module each."""
