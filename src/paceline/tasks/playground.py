"""Envs of MuJoCo Playground, as the task `playground:NAME`."""

from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

from paceline.env.playground_env import PlaygroundEnv, PlaygroundProgram
from paceline.env.training_settings import TrainingSettings
from paceline.errors import UserError, one_line, unknown
from paceline.tasks.registry import EnvEntry
from paceline.validation import parse_yaml

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
        found = {}
        for option in self.options:
            key, equals, value = option.partition("=")
            if not equals or not key or key == _IMPLEMENTATION:
                raise UserError(f"--env.options {option}: give KEY=VALUE, for example episode_length=500")
            try:
                found[key] = parse_yaml(value)
            except ValueError as error:
                raise UserError(f"--env.options {option}: not a value: {error}") from None
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
    try:
        return PlaygroundEnv(_program(name, options), **placed)
    except Exception as error:
        # Models of robots are downloaded from GitHub when they are first used.
        given = f" with {' '.join(options.options)}" if options.options else ""
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"MuJoCo Playground cannot make {name}{given}: {text}") from error


@cache
def _program(name: str, options: Playground) -> PlaygroundProgram:
    """Return the env. It is kept, because JAX compiles it for up to a minute."""
    registry, overrides = _registry(name), options.overrides()
    steps = int(overrides.get("episode_length", registry.get_default_config(name).get("episode_length", 1000)))
    # The other implementation, "warp", does not store its state by env.
    env = registry.load(name, config_overrides=overrides | {_IMPLEMENTATION: "jax"})
    return PlaygroundProgram(env, steps)


def _registry(name: str) -> Any:
    try:
        return import_module("mujoco_playground").registry
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "mujoco_playground":
            need = "pip install 'paceline[playground]'"
            raise UserError(f"playground:{name} needs MuJoCo Playground: {need}") from None
        raise UserError(f"playground:{name}: MuJoCo Playground cannot be imported: {one_line(error)}") from error
    except Exception as error:
        text = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"playground:{name}: MuJoCo Playground cannot be imported: {text}") from error
