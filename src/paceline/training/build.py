"""Build the env and the learner of a run from its configuration or from a trained run."""

import dataclasses
import hashlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.distributed.group import Group
from paceline.distributed.rank import Rank
from paceline.env.robot_env import RobotEnv
from paceline.env.task import Task
from paceline.env.vec_env import VecEnv
from paceline.errors import UserError, unknown
from paceline.learners.learner import LEARNERS, Learner, settings_of
from paceline.learners.networks import Policy
from paceline.learners.rsl_rl.external_policy import load_external_policy
from paceline.learners.settings import Settings
from paceline.run import checkpoint
from paceline.run.checkpoint import reading, whole_number
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.run.versions import versions
from paceline.sim.simulation import choose_engine
from paceline.tasks import registry
from paceline.tasks.registry import Entry, TaskEntry
from paceline.validation import from_dict, shown


def build(
    config: TrainConfig,
    group: Group,
    envs: range,
    renderable: bool = False,
    for_evaluation: bool = False,
    wrap: Callable[[VecEnv], VecEnv] | None = None,
) -> tuple[VecEnv, Learner]:
    """Create the env and the learner of a run, with new weights, for the envs with the global indices `envs`. With
    `for_evaluation` a curriculum is at its end. The learner sees the env through `wrap`."""
    env = _env(config, group, envs, renderable, for_evaluation)
    env = wrap(env) if wrap else env
    return env, LEARNERS[config.learner].make(env, settings_of(config.learner, config.settings), config.seed, group)


def resolve(config: TrainConfig) -> tuple[TrainConfig, Settings]:
    """Raise UserError for a configuration that cannot work, before anything is created. Return the configuration with
    the defaults of all options and settings filled in, and the settings of its learner."""
    config.check()
    if config.learner not in LEARNERS:
        raise unknown("learner", config.learner, LEARNERS)
    entry, kind = registry.find(config.task), LEARNERS[config.learner]
    kind.check_installed()
    defaults = dataclasses.asdict(kind.settings.from_training(entry.training))
    settings = settings_of(config.learner, defaults | config.settings)
    settings.check()
    task = _task(config, entry)
    return dataclasses.replace(config, env=dataclasses.asdict(task), settings=dataclasses.asdict(settings)), settings


def _task(config: TrainConfig, entry: Entry) -> Any:
    return from_dict(entry.task, config.env, f"options of task {config.task}")


def _env(config: TrainConfig, group: Group, envs: range, renderable: bool, for_evaluation: bool) -> VecEnv:
    entry = registry.find(config.task)
    task = _task(config, entry)
    task = task.for_evaluation() if for_evaluation and isinstance(task, Task) else task
    device, threads = group.rank.device, group.rank.cores
    placed = {"num_envs": len(envs), "device": device, "seed": config.seed, "first_env": envs.start}
    engine_of(config, device)
    if isinstance(entry, TaskEntry):
        return RobotEnv(task, engine=config.engine, threads=threads, **placed)
    if not renderable:
        return entry.make(task, **placed)
    if entry.drawn:
        return entry.drawn(task, **placed)
    raise UserError(f"task {config.task!r} cannot be drawn: its EnvEntry has no `drawn`")


def engine_of(config: TrainConfig, device: torch.device) -> str:
    """Return the physics engine of a run."""
    entry = registry.find(config.task)
    if isinstance(entry, TaskEntry):
        return choose_engine(config.engine, device)
    if config.engine not in ("auto", entry.engine):
        raise UserError(f"--engine {config.engine}: {config.task} has an engine of its own; leave --engine out")
    return entry.engine


def fingerprint(config: TrainConfig) -> dict[str, str]:
    """Return what must be equal on all ranks of a run, by name: versions, settings and code."""
    found = {f"version of {package}": number for package, number in versions().items()}
    found |= {f"setting {name}": str(value) for name, value in config.by_name().items()}
    package = Path(__file__).parents[1]
    found["code of paceline"] = _digest(sorted(package.rglob("*.py")))
    robot = config.env.get("robot")
    # An option of another package's task may have this name and another meaning.
    if isinstance(robot, str) and os.path.isfile(robot):
        # Files that it includes are not covered.
        found["file of --env.robot"] = _digest([Path(robot)])
    found[f"code of task {config.task}"] = _digest([Path(inspect.getfile(registry.find(config.task).task))])
    return found


def _digest(files: list[Path]) -> str:
    """Return a short digest of files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def load_state(
    learner: Learner,
    state: dict[str, Any],
    source: str,
    policy_only: bool = False,
    changed: tuple[str, ...] = (),
) -> None:
    """Load the state of a checkpoint into a learner. Raise UserError if it belongs to other networks or another task;
    `changed` names the flags that may be the reason."""
    remedy = f"; {' '.join(changed)} cannot change in this run" if changed else ""
    with reading(source, remedy):
        whole_number("iteration", state["iteration"])
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


def _kind(tensor: Tensor) -> str:
    if tensor.is_floating_point():
        return "float"
    return "bool" if tensor.dtype == torch.bool else "int" if not tensor.is_complex() else "complex"


def _check_finite(found: Any, name: str) -> None:
    if isinstance(found, dict):
        for key, part in found.items():
            _check_finite(part, f"{name}.{key}")
    elif isinstance(found, Tensor) and not bool(found.isfinite().all()):
        raise ValueError(f"{name} has numbers that are not finite")


class Trained(NamedTuple):
    """Env and learner of a run, with the weights of one of its checkpoints."""

    env: VecEnv
    learner: Learner
    run: RunDir
    file: Path
    """Checkpoint file."""


def trained(run: str, seed: int = 0, renderable: bool = False) -> Trained:
    """Return the policy of a run with one env, on the CPU; `run` is as for `RunDir.open`."""
    opened = RunDir.open(run)
    config, _ = resolve(dataclasses.replace(opened.config(), engine="auto", gpu_ids=(), seed=seed))
    file = checkpoint.chosen(run, opened.checkpoints)
    saved = checkpoint.load(file)
    env, learner = build(config, Group(Rank()), range(1), renderable, for_evaluation=True)
    with reading(str(file)):
        load_state(learner, saved["learner"], str(file), policy_only=True)
    return Trained(env, learner, opened, file)


@dataclass(frozen=True)
class Playable:
    """A policy with one env, on the CPU."""

    env: VecEnv
    policy: Policy
    task: str
    iteration: int
    folder: Path
    """Directory for files made from the policy."""
    file: Path
    """Checkpoint that holds the policy."""


def playable(
    run: str, task: str | None = None, activation: str | None = None, seed: int = 0, renderable: bool = False
) -> Playable:
    """Return the policy of a run, `run` as for `RunDir.open`. If `task` is given, `run` is instead a file that RSL-RL
    wrote outside of Paceline; `activation` is the activation function of that policy, by default the task's."""
    if task:
        return _external_policy(Path(run), task, activation, seed, renderable)
    if activation:
        raise UserError(f"--activation {activation} is for policies trained outside of Paceline: give --task too")
    if run.endswith(".pt") and Path(run).is_file():
        raise UserError(f"{run} does not contain the name of its task: give its --task")
    env, learner, opened, file = trained(run, seed, renderable)
    return Playable(env, learner.policy(), opened.config().task, learner.iteration, opened.path, file)


def _external_policy(file: Path, task: str, activation: str | None, seed: int, renderable: bool) -> Playable:
    entry = registry.find(task)
    config = TrainConfig(task=task, env={}, seed=seed)
    config.check()
    env = _env(config, Group(Rank()), range(1), renderable, for_evaluation=True)
    inputs = env.observation_spec["policy"].shape[0]
    found = load_external_policy(file, activation or entry.training.activation, inputs, env.num_actions)
    return Playable(env, found.policy, task, found.iteration, file.parent, file)
