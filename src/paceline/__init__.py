"""Paceline: robot policies by reinforcement learning in thousands of parallel MuJoCo worlds."""

__version__ = "0.1.0"
