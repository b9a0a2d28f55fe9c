"""Runs with known metrics, without training."""

import json
from pathlib import Path
from typing import Any

from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.training.evaluation import Estimate, Evaluation


def write_run(
    path: Path,
    returns: list[float],
    *,
    ranks: int = 1,
    envs: int = 64,
    seed: int = 0,
    seconds: float = 1.0,
    parts: tuple[float, float, float] = (0.6, 0.3, 0.1),
    collection: dict[str, float] | None = None,
    backend: str = "gloo",
    task: str = "cartpole",
    losses: dict[str, list[float]] | None = None,
    success: list[float] | None = None,
    env: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Write the files of a run with one return per iteration of `seconds`, 10 steps per env. `parts` are the seconds of
    collection, of the update without synchronization, and of synchronization; `collection` are parts of the first."""
    run = RunDir(path)
    path.mkdir(parents=True)
    run.write_config(
        TrainConfig(task=task, env=env or {}, total_envs=envs, seed=seed, max_iterations=len(returns), **config)
    )
    run.write_result(status="completed")
    steps = 10 * envs
    facts = {"world_size": ranks, "total_envs": envs, "steps_per_iteration": steps, "engine": "mujoco"}
    records = [{"first_iteration": 1, **facts, "device_name": "the CPU", "backend": "none" if ranks == 1 else backend}]
    for index, value in enumerate(returns):
        collect, update, sync = parts
        metrics = {
            "iteration": index + 1,
            "episode/return": value,
            "speed/steps_per_second": steps / seconds,
            "progress/env_steps": steps * (index + 1),
            "progress/train_seconds": seconds * (index + 1),
        }
        metrics |= {name: values[index] for name, values in (losses or {"loss/value": [1.0] * len(returns)}).items()}
        metrics |= {"measure/success": success[index]} if success else {}
        metrics |= {f"seconds/{name}": part for name, part in (collection or {}).items()}
        of_ranks = {"collect": collect, "update": update + sync, "sync": sync}
        of_ranks = {f"seconds/{name}": part for name, part in of_ranks.items()} | {"memory/used_mib": 512.0}
        for name, part in of_ranks.items():
            spread = {"/min": 0.9 * part, "/mean": part, "/max": 1.1 * part} if ranks > 1 else {"": part}
            metrics |= {name + kind: number for kind, number in spread.items()}
        records.append(metrics)
    run.metrics_file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_evaluation(path: Path, mean: float, half: float) -> Path:
    """Write an evaluation of the last iteration of a run, with an interval of `mean` - `half` to `mean` + `half`."""
    iteration = RunDir(path).config().max_iterations
    facts: dict[str, Any] = {"engine": "mujoco", "device_name": "the CPU", "seed": 1, "episodes": 64}
    estimates = {"return": Estimate(mean, mean - half, mean + half)}
    Evaluation(task="cartpole", iteration=iteration, nominal=estimates, **facts).write(path / "eval")
    return path
