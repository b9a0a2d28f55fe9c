"""RSL-RL's PPO."""
