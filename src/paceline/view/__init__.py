"""Videos of a trained policy."""
