"""From a run's configuration, or from a trained run, to its env and learner."""

import dataclasses
import hashlib
import inspect
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline import checkpoint
from paceline.checkpoint import reading, whole_number
from paceline.checks import from_dict, shown
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
    learner: Learner,
    state: dict[str, Any],
    source: str,
    policy_only: bool = False,
    changed: tuple[str, ...] = (),
) -> None:
    """Load a checkpoint's state. Raise if it is of other networks or of another task; `changed` are the flags that may
    be the reason."""
    remedy = f"; {' '.join(changed)} cannot change in this run" if changed else ""
    with reading(source, remedy):
        whole_number("iteration", state["iteration"])
        (learner.load_policy if policy_only else learner.load_state)(state)
        for part, loaded in learner.state().items():
            if part != "worlds":
                _check_alike(state.get(part), loaded, part)
                _check_finite(state.get(part), part)
            elif not policy_only:
                _check_alike(state[part], loaded, part)


def _check_alike(found: Any, expected: Any, name: str) -> None:
    """Compare what a checkpoint holds with what a learner has: copying into a tensor would stretch or convert another
    one without a word. A part that is missing was optional, or its loading has failed."""
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
    """A run's env and learner, with the weights of one of its checkpoints."""

    env: VecEnv
    learner: Learner
    run: RunDir
    file: Path
    """The checkpoint."""


def trained(run: str, seed: int = 0, drawn: bool = False) -> Trained:
    """Return the policy of a run with one env, on the CPU; `run` is as for `RunDir.open`."""
    opened = RunDir.open(run)
    config = dataclasses.replace(opened.config(), engine="auto", gpu_ids=(), seed=seed)
    check(config)
    file = checkpoint.chosen(run, opened.checkpoints)
    saved = checkpoint.load(file)
    env, learner = build(config, Group(Rank()), range(1), drawn, watched=True)
    with reading(str(file)):
        fit(learner, saved["learner"], str(file), policy_only=True)
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
    config.check()
    env = _env(config, Group(Rank()), range(1), drawn, watched=True)
    inputs = env.reset()["policy"].shape[1]
    found = foreign_policy(file, activation or entry.rsl_rl.activation, inputs, env.actions)
    return Playable(env, found.network, task, found.iteration, file.parent, file)
