"""Native PPO, which runs without host syncs."""

from paceline.learners.ppo.ppo import Ppo

__all__ = ["Ppo"]
