"""Evaluate the policy of a run over many episodes, with and without randomization."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from paceline.device.gpus import choose_gpus, gpu_count
from paceline.distributed.rank import Rank
from paceline.errors import UserError
from paceline.run.directory import RunDir
from paceline.tasks import registry
from paceline.tasks.registry import EnvEntry
from paceline.training.build import engine_of, is_randomized, make_env, playable
from paceline.training.evaluation import SEED_OFFSET, Estimate, Evaluation, estimate, run_episodes
from paceline.training.ranks import describe_device


def evaluate(
    run: str,
    episodes: int,
    engine: str = "auto",
    seed: int | None = None,
    task: str | None = None,
    activation: str | None = None,
    progress: Callable[[str, int, int], object] = lambda _what, _done, _total: None,
) -> tuple[Evaluation, Path]:
    """Evaluate a policy without exploration noise. Return the result and the file that holds it.

    `run`, `task` and `activation` are as for `playable`. The number of episodes is rounded up to a multiple of the
    number of envs. `progress` gets the steps that are done and their largest number.
    """
    found = playable(run, task, activation, seed=None)
    entry = registry.find(found.config.task)
    # Envs of other simulators do not need MuJoCo Warp.
    has_own_engine = isinstance(entry, EnvEntry) and engine != "mujoco"
    gpus = gpu_count() if has_own_engine else len(choose_gpus((), engine, all_by_default=False))
    device = torch.device("cuda:0" if gpus else "cpu")
    seed = found.config.seed + SEED_OFFSET if seed is None else seed
    config, rank = replace(found.config, engine=engine, seed=seed), Rank(device=device)
    num_envs = min(episodes, entry.gpu_envs if device.type == "cuda" else entry.cpu_envs)
    per_env = -(-episodes // num_envs)
    estimates = dict[bool, dict[str, Estimate]]()
    for randomize in (False, True) if is_randomized(found.env) else (False,):
        env = make_env(config, rank, range(num_envs), for_evaluation=True, randomize=randomize)
        what = "randomized" if randomize else "nominal"
        values = run_episodes(env, found.policy, per_env, lambda done, total, what=what: progress(what, done, total))
        if bad := [name for name, of_name in values.items() if not bool(of_name.isfinite().all())]:
            raise UserError(f"{bad[0]} of {found.file} is not finite: choose another checkpoint")
        estimates[randomize] = {name: estimate(of_name) for name, of_name in values.items()}
    evaluation = Evaluation(
        task=config.task,
        checkpoint=str(found.file),
        iteration=found.iteration,
        engine=engine_of(config, device),
        device_name=describe_device(device),
        seed=seed,
        episodes=per_env * num_envs,
        nominal=estimates[False],
        randomized=estimates.get(True),
    )
    return evaluation, evaluation.write(RunDir(found.folder).evaluations)
