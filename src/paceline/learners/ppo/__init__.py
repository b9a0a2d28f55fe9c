"""The fast path: proximal policy optimisation without a host in the loop."""

from paceline.learners.ppo.ppo import Ppo

__all__ = ["Ppo"]
