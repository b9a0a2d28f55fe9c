"""Tasks of mjlab, as the task `mjlab:NAME`, in an environment in which mjlab is installed."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch

from paceline.env.rsl_rl_env import RslRlEnv
from paceline.env.training_settings import TrainingSettings
from paceline.errors import UserError, unknown
from paceline.tasks.other_library import import_library, import_registering, making, parse_options
from paceline.tasks.registry import EnvEntry

# mjlab and its MuJoCo are installed in an environment of their own, so they are imported inside the functions.

_EXAMPLE = "episode_length_s=10"


@dataclass(frozen=True)
class Mjlab:
    """Options of the mjlab task."""

    options: tuple[str, ...] = ()
    """KEY=VALUE settings of mjlab's env configuration, with values in YAML. A KEY is a path with dots, as after --env.
    of mjlab's train command, for example episode_length_s=10 or rewards.upright.weight=2."""

    def __post_init__(self) -> None:
        parse_options(self.options, _EXAMPLE)


def entry(name: str) -> EnvEntry:
    """Return the entry of the mjlab task `name`, which is NAME or module:NAME."""
    agent = _tasks(name).load_rl_cfg(_task_name(name))
    return EnvEntry(
        Mjlab,
        summary=f"the mjlab task {_task_name(name)}",
        engine="mjlab",
        make=partial(_make, name),
        training=_training(agent),
        max_iterations=agent.max_iterations,
        cpu_envs=64,
        gpu_envs=4096,
    )


def _task_name(name: str) -> str:
    return name.rpartition(":")[2]


def _tasks(name: str) -> Any:
    """Return mjlab's registry of tasks, after it was filled. Raise UserError if it does not have the task."""
    # These fill the registry; mjlab itself imports the packages that register under its entry points.
    remedy = "install Paceline in an environment of mjlab, see docs/mjlab_users.md"
    import_library(f"mjlab:{name}", "mjlab.tasks", remedy)
    if module := name.rpartition(":")[0]:
        import_registering(f"mjlab:{name}", module)
    registry = import_module("mjlab.tasks.registry")
    if _task_name(name) not in registry.list_tasks():
        raise unknown("mjlab task", _task_name(name), registry.list_tasks())
    return registry


def _training(agent: Any) -> TrainingSettings:
    """Return the settings of mjlab's RSL-RL configuration of a task."""
    actor, algorithm = agent.actor, agent.algorithm
    noise = actor.distribution_cfg or {}
    minibatches = algorithm.num_mini_batches
    while agent.num_steps_per_env % minibatches:
        minibatches -= 1
    return TrainingSettings(
        horizon=agent.num_steps_per_env,
        epochs=algorithm.num_learning_epochs,
        minibatches=minibatches,
        hidden_layers=tuple(actor.hidden_dims),
        activation=actor.activation,
        learning_rate=algorithm.learning_rate,
        desired_kl=algorithm.desired_kl if algorithm.schedule == "adaptive" else 0.0,
        discount=algorithm.gamma,
        gae_lambda=algorithm.lam,
        clip=algorithm.clip_param,
        clip_value=algorithm.use_clipped_value_loss,
        value_loss_weight=algorithm.value_loss_coef,
        entropy_weight=algorithm.entropy_coef,
        max_gradient_norm=algorithm.max_grad_norm,
        initial_std=noise.get("init_std", 1.0),
        normalize_observations=actor.obs_normalization,
        overrides={"rsl_rl": {"critic_hidden_dims": tuple(agent.critic.hidden_dims)}},
    )


def _make(name: str, options: Mjlab, num_envs: int, device: torch.device, seed: int, first_env: int) -> RslRlEnv:
    registry = _tasks(name)
    envs, rl, backends = map(import_module, ("mjlab.envs", "mjlab.rl", "mjlab.utils.torch"))
    task = _task_name(name)
    config, agent = registry.load_env_cfg(task), registry.load_rl_cfg(task)
    for option in options.options:
        set_option(config, option)
    config.scene.num_envs = num_envs
    # Ranks must not repeat the random numbers of each other.
    config.seed = int(np.random.SeedSequence((seed, first_env)).generate_state(1)[0] >> 2)
    backends.configure_torch_backends()
    groups = {"policy": agent.obs_groups["actor"], "critic": agent.obs_groups.get("critic", ())}
    with making("mjlab", task, options.options):
        env = envs.ManagerBasedRlEnv(config, device=str(device))
        return RslRlEnv(rl.RslRlVecEnvWrapper(env, agent.clip_actions), device, first_env, groups)


def set_option(config: Any, option: str) -> None:
    """Set one value of a configuration of nested dataclasses and dicts from PATH=VALUE."""
    ((path, value),) = parse_options((option,), _EXAMPLE).items()
    *parents, last = path.split(".")
    for key in parents:
        config = _member(config, key, option)
    present = _member(config, last, option)
    if isinstance(present, tuple) and isinstance(value, list):
        value = tuple(value)
    if isinstance(present, float) and type(value) is int:
        value = float(value)
    if present is not None and type(value) is not type(present):
        raise UserError(f"--env.options {option}: {last} is {present!r}: give a {type(present).__name__}")
    if isinstance(config, dict):
        config[last] = value
    else:
        setattr(config, last, value)


def _member(config: Any, key: str, option: str) -> Any:
    known = list(config) if isinstance(config, Mapping) else [f.name for f in _fields(config)]
    if key not in known:
        raise UserError(f"--env.options {option}: {unknown('key', key, known)}")
    return config[key] if isinstance(config, Mapping) else getattr(config, key)


def _fields(config: Any) -> tuple[Any, ...]:
    return fields(config) if is_dataclass(config) else ()
