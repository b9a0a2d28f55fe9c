"""Envs of MuJoCo Playground, as the task `playground:NAME`."""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from paceline.env.playground_env import PlaygroundEnv, PlaygroundProgram
from paceline.env.training_settings import TrainingSettings
from paceline.errors import UserError, unknown
from paceline.tasks.other_library import import_library, making, parse_options
from paceline.tasks.registry import EnvEntry

_IMPLEMENTATION = "impl"


@dataclass(frozen=True)
class Playground:
    """Options of the env of MuJoCo Playground."""

    options: tuple[str, ...] = ()
    """KEY=VALUE entries of the env's configuration in MuJoCo Playground, with values in YAML.
    episode_length=N sets the time limit in steps."""

    def __post_init__(self) -> None:
        self.overrides()

    def overrides(self) -> dict[str, Any]:
        """Return `options` as overrides of the configuration."""
        found = parse_options(self.options, "episode_length=500")
        if _IMPLEMENTATION in found:
            raise UserError(f"--env.options {_IMPLEMENTATION}: leave it out, only the implementation jax is supported")
        return found


def entry(name: str) -> EnvEntry:
    """Return the entry of an env of MuJoCo Playground."""
    known = _registry(name).ALL_ENVS
    if name not in known:
        raise unknown("env of MuJoCo Playground", name, known)
    return EnvEntry(
        Playground,
        summary=f"the env {name} of MuJoCo Playground",
        engine="playground",
        make=partial(_make, name),
        training=TrainingSettings(horizon=32, minibatches=8, hidden_layers=(128, 128), entropy_weight=0.005),
        cpu_envs=128,
        gpu_envs=2048,
    )


def _make(name: str, options: Playground, **placed: Any) -> PlaygroundEnv:
    # Models of robots are downloaded from GitHub when they are first used.
    with making("MuJoCo Playground", name, options.options):
        return PlaygroundEnv(_program(name, options), **placed)


@cache
def _program(name: str, options: Playground) -> PlaygroundProgram:
    """Return the env. It is kept, because JAX compiles it for up to a minute."""
    registry, overrides = _registry(name), options.overrides()
    steps = int(overrides.get("episode_length", registry.get_default_config(name).get("episode_length", 1000)))
    # The other implementation, "warp", does not store its state by env.
    env = registry.load(name, config_overrides=overrides | {_IMPLEMENTATION: "jax"})
    return PlaygroundProgram(env, steps)


def _registry(name: str) -> Any:
    return import_library(f"playground:{name}", "mujoco_playground", "pip install 'paceline[playground]'").registry
