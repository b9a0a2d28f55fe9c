"""Build the env and the learner of a run from its configuration, and load a checkpoint into them."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.distributed.group import Group
from paceline.distributed.rank import Rank
from paceline.env.vec_env import VecEnv, action_spec, as_robot_env
from paceline.errors import UserError, unknown
from paceline.learners.learner import LEARNERS, Learner, settings_of
from paceline.learners.networks import Policy
from paceline.learners.ppo.parameter_averaging import OUTER_STEP, Averaging
from paceline.learners.rsl_rl.external_policy import load_external_policy
from paceline.learners.settings import Settings
from paceline.run import checkpoint
from paceline.run.config import TrainConfig, plain
from paceline.run.directory import RunDir
from paceline.tasks import registry
from paceline.tasks.registry import EnvEntry
from paceline.validation import from_dict, shown

# Envs of other simulators need no MuJoCo, so its modules are imported inside the functions.


def resolve(config: TrainConfig) -> tuple[TrainConfig, Settings]:
    """Raise UserError for an invalid configuration, before anything is created. Return the configuration with
    the defaults of all options and settings filled in, and the settings of its learner."""
    config.check()
    if config.learner not in LEARNERS:
        raise unknown("learner", config.learner, LEARNERS)
    entry, kind = registry.find(config.task), LEARNERS[config.learner]
    kind.check_installed()
    defaults = plain(kind.settings.from_training(entry.training))
    settings = settings_of(config.learner, defaults | config.settings)
    settings.check()
    if config.sync != "every-minibatch" and config.learner != "ppo":
        raise UserError(
            f"--sync {config.sync} is not supported by learner {config.learner}: use --sync every-minibatch, or "
            "--learner ppo"
        )
    task = _task(config)
    return dataclasses.replace(config, env=plain(task), settings=plain(settings)), settings


def _task(config: TrainConfig) -> Any:
    return from_dict(registry.find(config.task).task, config.env, f"options of task {config.task}")


def make_learner(config: TrainConfig, env: VecEnv, group: Group) -> Learner:
    """Return the learner of a run with new weights."""
    settings = settings_of(config.learner, config.settings)
    if config.sync == "every-minibatch":
        return LEARNERS[config.learner].make(env, settings, config.seed, group)
    outer = Averaging(config.sync_every, *OUTER_STEP) if config.sync_every else Averaging()
    return LEARNERS[config.learner].make(env, settings, config.seed, group, averaging=outer)


def check_task(config: TrainConfig) -> None:
    """Raise UserError if the task or its model is invalid, before an engine is created."""
    from paceline.env.check_task import check_members, check_model

    task = _task(config)
    check_members(task)
    check_model(task, task.model())


def make_env(
    config: TrainConfig,
    rank: Rank,
    envs: range,
    renderable: bool = False,
    for_evaluation: bool = False,
    randomize: bool = True,
) -> VecEnv:
    """Return the env of one rank. With `for_evaluation`, the task has full difficulty and no curriculum. Without
    `randomize`, all envs have the model of the task."""
    entry, task = registry.find(config.task), _task(config)
    arguments = {"num_envs": len(envs), "device": rank.device, "seed": config.seed, "first_env": envs.start}
    engine_of(config, rank.device)
    if not isinstance(entry, EnvEntry):
        from paceline.env.robot_env import RobotEnv
        from paceline.env.task import Task

        task = task.for_evaluation() if for_evaluation and isinstance(task, Task) else task
        return RobotEnv(task, engine=config.engine, threads=rank.cores, randomize=randomize, **arguments)
    make = entry.make_renderable if renderable else entry.make
    if make is None:
        raise UserError(f"task {config.task!r} cannot be rendered: its EnvEntry has no `make_renderable`: give it one")
    return make(task, **arguments)


def engine_of(config: TrainConfig, device: torch.device) -> str:
    """Return the physics engine of a run."""
    entry = registry.find(config.task)
    if not isinstance(entry, EnvEntry):
        from paceline.sim.simulation import choose_engine

        return choose_engine(config.engine, device)
    if config.engine not in ("auto", entry.engine):
        raise UserError(f"--engine {config.engine}: {config.task} has its own engine; leave --engine out")
    return entry.engine


def is_randomized(env: VecEnv) -> bool:
    """Return whether the task of an env randomizes its model."""
    robot_env = as_robot_env(env)
    return robot_env is not None and bool(robot_env.task.randomized_fields())


def load_state(learner: Learner, state: dict[str, Any], policy_only: bool = False) -> None:
    """Load the state of a checkpoint into a learner. Errors of a state that belongs to other networks or another task
    have many types, see `checkpoint.reading`."""
    checkpoint.whole_number("iteration", state["iteration"])
    (learner.load_policy if policy_only else learner.load_state)(state)
    for part, loaded in learner.state().items():
        if part != "envs":
            _check_alike(state.get(part), loaded, part)
            _check_finite(state.get(part), part)
        elif not policy_only:
            _check_alike(state[part], loaded, part)


def _check_alike(found: Any, expected: Any, name: str) -> None:
    """Raise ValueError if a part of a checkpoint differs from the learner's in shape, dtype or type: copying into a
    tensor would broadcast or convert it silently. A missing part was optional, or its loading has failed."""
    if found is None:
        return
    if isinstance(expected, dict) and isinstance(found, dict):
        for key, part in expected.items():
            _check_alike(found.get(key), part, f"{name}.{key}")
    elif isinstance(expected, Tensor) and isinstance(found, Tensor):
        if found.shape != expected.shape:
            raise ValueError(f"{name} has shape {tuple(found.shape)}, not {tuple(expected.shape)}")
        if _kind(found) != _kind(expected):
            raise ValueError(f"{name} is {found.dtype}, not {expected.dtype}")
    elif type(found) is not type(expected):
        raise ValueError(f"{name} is {shown(found)}, not a {type(expected).__name__}")


def _kind(tensor: Tensor) -> tuple[bool, bool, bool]:
    """Return whether the elements are floats, complex numbers and bools, regardless of their size in bits."""
    return tensor.is_floating_point(), tensor.is_complex(), tensor.dtype == torch.bool


def _check_finite(found: Any, name: str) -> None:
    if isinstance(found, dict):
        for key, part in found.items():
            _check_finite(part, f"{name}.{key}")
    elif isinstance(found, Tensor) and not bool(found.isfinite().all()):
        raise ValueError(f"{name} has numbers that are not finite")


@dataclass(frozen=True)
class Playable:
    """A policy with envs, on the CPU."""

    config: TrainConfig
    """Configuration of the run, with the CPU as device."""
    env: VecEnv
    policy: Policy
    iteration: int
    folder: Path
    """Directory for files made from the policy."""
    file: Path
    """Checkpoint that holds the policy."""
    read: Callable[[Path], tuple[Policy, int]]
    """Reads another checkpoint of the same run. It returns the policy and its iteration. Policies that were read before
    are no longer valid."""


def playable(
    run: str,
    task: str | None = None,
    activation: str | None = None,
    seed: int | None = 0,
    renderable: bool = False,
    num_envs: int = 1,
) -> Playable:
    """Return the policy of a run, `run` as for `RunDir.open`. If `task` is given, `run` is instead a file that RSL-RL
    wrote outside of Paceline; `activation` is the activation function of that policy, by default that of the task.
    If `seed` is None, the env has the seed of the run."""
    if task:
        config, file = TrainConfig(task=task, env={}, seed=seed or 0), Path(run)
        config.check()
        env = make_env(config, Rank(), range(num_envs), renderable, for_evaluation=True)
        activation = activation or registry.find(task).training.activation
        inputs = env.observation_spec["policy"].shape[0]
        if action_spec(env).choices:
            raise UserError(f"--task {task} has discrete actions, which policies of RSL-RL do not have: choose another")

        def read(file: Path) -> tuple[Policy, int]:
            found = load_external_policy(file, activation, inputs, env.num_actions)
            return found.policy, found.iteration

        return Playable(config, env, *read(file), file.parent, file, read)
    if activation:
        raise UserError(f"--activation {activation} is for policies trained outside of Paceline: give --task too")
    if run.endswith(".pt") and Path(run).is_file():
        raise UserError(f"{run} does not contain the name of its task: give its --task")
    opened = RunDir.open(run)
    file = checkpoint.chosen(run, opened.checkpoints)
    return playable_file(opened, file, seed, renderable, num_envs)


def playable_file(
    run: RunDir, file: Path, seed: int | None = None, renderable: bool = False, num_envs: int = 1
) -> Playable:
    """Return the policy of a checkpoint of a run."""
    config = run.config()
    seed = config.seed if seed is None else seed
    config, _ = resolve(dataclasses.replace(config, engine="auto", gpu_ids=(), seed=seed))
    # A damaged file is refused before the envs are made.
    checkpoint.load(file, with_envs=False)
    env = make_env(config, Rank(), range(num_envs), renderable, for_evaluation=True)
    learner = make_learner(config, env, Group(Rank()))

    def read(file: Path) -> tuple[Policy, int]:
        saved = checkpoint.load(file, with_envs=False)
        with checkpoint.reading(file):
            load_state(learner, saved["learner"], policy_only=True)
        return learner.policy(), learner.iteration

    return Playable(config, env, *read(file), run.path, file, read)
