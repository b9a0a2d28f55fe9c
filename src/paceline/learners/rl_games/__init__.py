"""RL-Games' PPO."""
