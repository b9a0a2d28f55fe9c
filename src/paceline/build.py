"""From a run's configuration, or from a trained run, to its env and learner."""

import dataclasses
import hashlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline import checkpoint
from paceline.checks import from_dict
from paceline.config import TrainConfig
from paceline.distributed.group import Group
from paceline.distributed.rank import Rank
from paceline.env.robot_env import RobotEnv, check_timing
from paceline.env.task import HasCurriculum
from paceline.env.vec_env import VecEnv
from paceline.errors import UserError
from paceline.learners import adapters
from paceline.learners.learner import Learner
from paceline.learners.rsl_rl_files import foreign_policy
from paceline.run_dir import RunDir
from paceline.sim.simulation import choose_engine
from paceline.tasks import registry
from paceline.tasks.registry import Entry, TaskEntry
from paceline.versions import versions


def build(
    config: TrainConfig, group: Group, worlds: range, drawn: bool = False, watched: bool = False
) -> tuple[VecEnv, Learner]:
    """The env and the learner of a run, with fresh weights, for some of its worlds. To be `watched`, a curriculum is at
    its end; an env that can be `drawn`, if so asked."""
    env = _env(config, group, worlds, drawn, watched)
    return env, adapters.make(config.learner, env, config.settings, config.seed, group)


def check(config: TrainConfig) -> None:
    """Refuse a configuration that cannot work, before anything is made."""
    config.check()
    entry = registry.find(config.task)
    task = _task(config, entry)
    if isinstance(entry, TaskEntry):
        check_timing(task)


def _task(config: TrainConfig, entry: Entry) -> Any:
    return from_dict(entry.task, config.env, f"options of task {config.task}")


def _env(config: TrainConfig, group: Group, worlds: range, drawn: bool, watched: bool) -> VecEnv:
    entry = registry.find(config.task)
    task = _task(config, entry)
    task = _at_its_end(task) if watched else task
    device, threads = group.rank.device, group.rank.cores
    placed = {"num_envs": len(worlds), "device": device, "seed": config.seed, "first_world": worlds.start}
    engine_of(config, device)
    if isinstance(entry, TaskEntry):
        return RobotEnv(task, engine=config.engine, threads=threads, **placed)
    if not drawn:
        return entry.make(task, **placed)
    if entry.drawn:
        return entry.drawn(task, **placed)
    raise UserError(f"task {config.task!r} cannot be drawn: its EnvEntry has no `drawn`")


def _at_its_end(task: Any) -> Any:
    return task.at_its_end() if isinstance(task, HasCurriculum) else task


def engine_of(config: TrainConfig, device: torch.device) -> str:
    """What moves the worlds of a run."""
    entry = registry.find(config.task)
    if isinstance(entry, TaskEntry):
        return choose_engine(config.engine, device)
    if config.engine not in ("auto", entry.engine):
        raise UserError(f"--engine {config.engine}: {config.task} has an engine of its own; leave --engine out")
    return entry.engine


def fingerprint(config: TrainConfig) -> dict[str, str]:
    """What all ranks of a run must have in common, by name: versions, settings and code."""
    found = {f"version of {package}": number for package, number in versions().items()}
    found |= {f"setting {name}": str(value) for name, value in config.by_name().items()}
    package = Path(__file__).parent
    found["code of paceline"] = _digest(sorted(package.rglob("*.py")))
    robot = config.env.get("robot")
    # An option of another package's task may have this name and be something else.
    if isinstance(robot, str) and os.path.isfile(robot):
        # Without what it includes.
        found["file of --env.robot"] = _digest([Path(robot)])
    found[f"code of task {config.task}"] = _digest([Path(inspect.getfile(registry.find(config.task).task))])
    return found


def _digest(files: list[Path]) -> str:
    """Short, and the same for the same files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def fit(
    load: Callable[[dict[str, Any]], None], state: dict[str, Any], source: str, changed: tuple[str, ...] = ()
) -> None:
    """Load a checkpoint's state. Raise if it is of other networks or of another task; `changed` are the flags that may
    be the reason."""
    try:
        load(state)
    except (KeyError, RuntimeError) as error:
        why = " ".join(str(error).split())[:200]
        remedy = f"; {' '.join(changed)} cannot change in this run" if changed else ""
        raise UserError(f"checkpoint {source} does not fit this run's task and settings: {why}{remedy}") from None


class Trained(NamedTuple):
    """A run's env and learner, with the weights of one of its checkpoints."""

    env: VecEnv
    learner: Learner
    run: RunDir
    file: Path
    """The checkpoint."""


def trained(run: str, seed: int = 0, drawn: bool = False) -> Trained:
    """A run's policy in one env, on the CPU whatever it was trained on; `run` as for `RunDir.open`."""
    opened = RunDir.open(run)
    config = dataclasses.replace(opened.config(), engine="auto", gpu_ids=(), seed=seed)
    check(config)
    file = checkpoint.chosen(run, opened.checkpoints)
    saved = checkpoint.load(file)["learner"]
    env, learner = build(config, Group(Rank()), range(1), drawn, watched=True)
    fit(learner.load_policy, saved, str(file))
    return Trained(env, learner, opened, file)


@dataclass(frozen=True)
class Elsewhere:
    """What a file of RSL-RL's own does not say of its policy."""

    task: str | None = None
    activation: str | None = None
    """By RSL-RL's name for it; by default the task's own for RSL-RL."""


OURS = Elsewhere()
"""A run of ours says all of it."""


@dataclass(frozen=True)
class Playable:
    """A policy in one world, on the CPU whatever it was trained on."""

    env: VecEnv
    policy: nn.Module
    task: str
    iteration: int
    folder: Path
    """For what is made of it."""
    file: Path
    """The checkpoint that holds it."""


def playable(run: str, elsewhere: Elsewhere, seed: int = 0, drawn: bool = False) -> Playable:
    """The policy of a run of ours, `run` as for `RunDir.open`; or of a file of RSL-RL's, if a task is named."""
    if elsewhere.task:
        return _foreign(Path(run), elsewhere.task, elsewhere.activation, seed, drawn)
    if elsewhere.activation:
        raise UserError(f"--activation {elsewhere.activation} is for policies trained elsewhere: give --task too")
    if run.endswith(".pt") and Path(run).is_file():
        raise UserError(f"{run} does not say what it was trained for: give its --task")
    env, learner, opened, file = trained(run, seed, drawn)
    return Playable(env, learner.policy(), opened.config().task, learner.iteration, opened.path, file)


def _foreign(file: Path, task: str, activation: str | None, seed: int, drawn: bool) -> Playable:
    entry = registry.find(task)
    config = TrainConfig(task=task, env={}, seed=seed)
    env = _env(config, Group(Rank()), range(1), drawn, watched=True)
    inputs = env.reset()["policy"].shape[1]
    found = foreign_policy(file, activation or entry.rsl_rl.activation, inputs, env.actions)
    return Playable(env, found.network, task, found.iteration, file.parent, file)
