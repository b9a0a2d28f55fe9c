"""Learning algorithms, which train a policy in a `VecEnv`."""
