"""Learn from a VecEnv."""
