"""Decide where a run is stored and which checkpoint it starts from."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.distributed.launch_record import LaunchRecord
from paceline.distributed.sharding import shard_ranges
from paceline.errors import UserError, counted
from paceline.learners.settings import Settings, flag
from paceline.run import checkpoint
from paceline.run.config import MOST_ENVS, TrainConfig, changes, plain
from paceline.run.directory import RunDir
from paceline.run.mirror import Mirror, download_run
from paceline.run.versions import versions


@dataclass(frozen=True)
class Plan:
    """Decisions of the main rank for all ranks: the directory of the run and the state that it starts from."""

    run: RunDir
    launch: LaunchRecord
    checkpoint: Path | None = None
    """Checkpoint to start from; None starts with new weights."""
    total_envs: int | None = None
    """Number of envs over all ranks. Before `load_start`, only if an earlier start of the run has set it."""
    restarts: int = 0
    is_new: bool = True
    """True if the directory has not held this run before."""
    completed: bool = False
    """True if the run has completed already."""

    # Set by `load_start`.
    saved: dict[str, Any] | None = None
    """Content of the checkpoint, without the states of the envs."""
    iteration: int = 0
    """Number of iterations done."""
    envs: tuple[range, ...] = ()
    """Global indices of the envs of each rank."""
    new_learning_rate: bool = False
    """True if the learning rate of the configuration replaces that of the checkpoint."""
    changed_options: tuple[str, ...] = ()
    """Task options that differ from those the run was trained with, as flags."""

    def result(self, config: TrainConfig, status: str, cause: str | None) -> dict[str, Any]:
        """Return the part of result.json that is known before the first iteration."""
        known = {"status": status, "cause": cause, "task": config.task, "learner": config.learner}
        return known | {"restarts": self.restarts} | dataclasses.asdict(self.launch) | {"versions": versions()}


def make_plan(config: TrainConfig, run: RunDir, named: Path | None, launch: LaunchRecord) -> Plan:
    """Decide where the run is stored and where it starts.

    Continue the run that this launch began, or that the scheduler requeued; otherwise start from the checkpoint that
    the user `named`; otherwise continue the run in a directory that the user named; otherwise start a new run.
    """
    for place in run.alternatives():
        result = place.result()
        if launch.began(result) or (launch.was_requeued_from(result) and not _stored_differences(place, config)):
            return _continue(place, launch, result)
    if named:
        return Plan(run, launch, named, is_new=False)
    if run.given and run.config_file.is_file():
        if differing := _stored_differences(run, config):
            raise UserError(
                f"{run.path} holds a run with other settings ({differing[0]}): choose another --run-dir, or continue "
                f"that run with --resume {run.path}"
            )
        return _continue(run, launch, run.result())
    run.check_new()
    return Plan(run, launch)


def _continue(run: RunDir, launch: LaunchRecord, result: dict[str, Any]) -> Plan:
    if result.get("status") == "completed":
        return Plan(run, launch, completed=True)
    files, total, restarts = checkpoint.listing(run.checkpoints), result.get("total_envs"), result.get("restarts")
    total = total if isinstance(total, int) and total > 0 else None
    restarts = restarts + 1 if isinstance(restarts, int) else 1
    return Plan(run, launch, files[-1] if files else None, total, restarts, is_new=False)


def plan_with_mirror(config: TrainConfig, plan: Plan, mirror: Mirror) -> Plan:
    """Claim the URL of the mirror for the run. If the run is new and the URL holds a run with the same settings,
    continue that run, because the storage of its last start may be lost."""
    if plan.is_new and (stored := mirror.stored_config()):
        if differing := changes(stored.by_name(), config.by_name()):
            raise UserError(
                f"--mirror {mirror.url} holds a run with other settings ({differing[0]}): choose another folder, or "
                f"continue that run with --resume {mirror.url}"
            )
        run = download_run(mirror.url, plan.run.path)
        plan = _continue(run, plan.launch, run.result())
    mirror.claim(plan.run)
    return plan


def _stored_differences(run: RunDir, config: TrainConfig) -> list[str]:
    return changes(run.config().by_name(), config.by_name()) if run.config_file.is_file() else []


def load_start(plan: Plan, config: TrainConfig, settings: Settings, ranks: int) -> Plan:
    """Return `plan` with the content of its checkpoint, if it has one, and the envs of each rank. Raise UserError if
    the run cannot continue with `config`."""
    if plan.completed:
        return plan
    if plan.checkpoint:
        plan = _load_checkpoint(plan, plan.checkpoint, config, settings, ranks)
    total_envs = plan.total_envs or config.total(ranks)
    if total_envs < ranks:
        raise UserError(f"{counted(total_envs, 'env')} for {ranks} ranks: each rank needs at least one")
    envs = shard_ranges(total_envs, ranks)
    settings.check_samples(min(map(len, envs)))
    return dataclasses.replace(plan, total_envs=total_envs, envs=tuple(envs))


def _load_checkpoint(plan: Plan, file: Path, config: TrainConfig, settings: Settings, ranks: int) -> Plan:
    saved, stored = checkpoint.load(file, with_envs=False), plan.run.config()
    with checkpoint.reading(file):
        envs, iteration, trained_with = saved["num_envs"], saved["learner"]["iteration"], dict(saved["settings"])
        # A setting that is newer than the run has its default.
        trained_with = plain(type(settings)()) | trained_with
        checkpoint.whole_number("num_envs", envs)
        checkpoint.whole_number("iteration", iteration)
        if not 0 < envs <= MOST_ENVS:
            raise ValueError(f"num_envs is {envs}, not a number from 1 to {MOST_ENVS}")
    changed = (config.num_envs, config.total_envs) != (stored.num_envs, stored.total_envs)
    if changed and config.total(ranks) != envs:
        remedy = f"--num-envs {envs // ranks}" if envs % ranks == 0 else f"--total-envs {envs}"
        raise UserError(f"the checkpoint has {counted(envs, 'env')}, this run {config.total(ranks)}: use {remedy}")
    for name in settings.fixed:
        then, now = _as_argument(trained_with[name]), _as_argument(getattr(settings, name))
        if then != now:
            raise UserError(
                f"{flag(settings, name)} {now} with --resume: it is {then} in this run and "
                "cannot change after the start; leave it out, or start a new run"
            )
    if iteration >= config.max_iterations:
        raise UserError(
            f"the run has completed {counted(iteration, 'iteration')}: set --max-iterations, now "
            f"{config.max_iterations}, to a larger total"
        )
    then, now = stored.by_name(), config.by_name()
    return dataclasses.replace(
        plan,
        saved=saved,
        iteration=iteration,
        total_envs=envs,
        new_learning_rate=settings.learning_rate != trained_with["learning_rate"],
        changed_options=tuple(f"--{name}" for name in now if name.startswith("env.") and now[name] != then.get(name)),
    )


def _as_argument(value: Any) -> str:
    """Return a value as it is written on the command line. Checkpoints have lists in place of tuples."""
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
