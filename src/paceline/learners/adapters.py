"""Learners by name; each is imported when asked for, because of what it needs."""

from importlib import import_module

from paceline.distributed.group import Group
from paceline.env.vec_env import VecEnv
from paceline.learners.learner import Learner
from paceline.settings import Settings

_CLASSES = {
    "ppo": "paceline.learners.ppo:Ppo",
    "rsl_rl": "paceline.learners.rsl_rl:RslRl",
    "rl_games": "paceline.learners.rl_games:RlGames",
    "skrl": "paceline.learners.skrl_torch:SkrlTorch",
    "skrl_jax": "paceline.learners.skrl_jax:SkrlJax",
}


def make(name: str, env: VecEnv, settings: Settings, seed: int, group: Group) -> Learner:
    """With fresh weights."""
    module, attribute = _CLASSES[name].split(":")
    return getattr(import_module(module), attribute)(env, settings, seed, group)
