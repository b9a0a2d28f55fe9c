"""Paceline trains robot policies by reinforcement learning in thousands of parallel MuJoCo environments."""

__version__ = "0.1.0"
