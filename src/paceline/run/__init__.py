"""One run: configuration, directory, checkpoints, metrics."""
