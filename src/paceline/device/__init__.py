"""Facts about CPUs and GPUs."""
