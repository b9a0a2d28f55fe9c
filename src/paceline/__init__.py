"""Paceline trains robot policies by reinforcement learning in thousands of parallel MuJoCo environments."""

__version__ = "0.2.0"
