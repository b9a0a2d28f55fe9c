"""Measure env steps per second of Paceline, of the bare physics and of peers."""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from paceline.device.cpu import tune_torch
from paceline.env.robot_env import RobotEnv
from paceline.env.task import Task
from paceline.learners.learner import Learner
from paceline.learners.ppo import Ppo
from paceline.learners.ppo.settings import PpoSettings
from paceline.run.versions import versions
from paceline.tensors.graph import capture

HERE = Path(__file__).parent
RESULTS = HERE / "results"
WARM = slice(4, None)
"""Measured iterations; the first ones compile, capture graphs and fill caches."""


@dataclass(frozen=True)
class Iterations:
    """Durations of all iterations of a run in seconds."""

    steps: int
    """Number of env steps per iteration."""
    collection: list[float]
    update: list[float]

    def rates(self, chosen: slice) -> dict[str, float]:
        """Return env steps per second of the rollouts alone (`collect`) and of whole iterations (`train`)."""
        collection, update = self.collection[chosen], self.update[chosen]
        steps = self.steps * len(collection)
        return {"collect": steps / sum(collection), "train": steps / (sum(collection) + sum(update))}


def paceline(
    task: Task,
    num_envs: int,
    ppo: PpoSettings,
    device: torch.device,
    iterations: int,
    engine: str = "auto",
) -> Iterations:
    """Measure native PPO. The device is idle at the end of each iteration; time outside rollouts counts as update."""
    tune_torch(device)
    return learning(Ppo(RobotEnv(task, num_envs, engine, device), ppo, seed=0), num_envs * ppo.horizon, iterations)


def learning(learner: Learner, steps: int, iterations: int) -> Iterations:
    """Run a learner with `steps` env steps per iteration and return the durations."""
    collection, update = [], []
    for _ in range(iterations):
        began = time.perf_counter()
        collection.append(learner.learn()["seconds/collect"])
        update.append(time.perf_counter() - began - collection[-1])
    return Iterations(steps, collection, update)


def physics(task: Task, num_envs: int, device: torch.device, steps: int, repeats: int) -> float:
    """Return env steps/s of the physics alone: `steps` control steps as one graph, the upper bound of any trainer."""
    sim = RobotEnv(task, num_envs, "auto", device).sim
    sim.ctrl.uniform_(-1.0, 1.0)

    def work() -> None:
        for _ in range(steps):
            sim.step(task.decimation)
            sim.sense()

    replay = capture(work, device, warp=device.type == "cuda")
    return num_envs * steps / seconds_per_call(replay, device, repeats)


def physics_of(learner: Ppo, env: RobotEnv, repeats: int) -> float:
    """Return env steps/s of the physics of a rollout: its simulation calls (controls, steps, resets, pushes) are
    recorded and replayed as one graph from the same initial state."""
    sim, recorded = env.sim, []
    calls = {name: getattr(sim, name) for name in ("step", "reset", "push", "sense")}

    def recording(name: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            kept = [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]
            recorded.append((name, kept, sim.ctrl.clone()))
            calls[name](*arguments)

        return call

    # The first call of `collect` runs without a graph, so that each simulation call is seen.
    recorder = Ppo(env, learner.config, learner.seed)
    recorder.load_state(learner.state())
    initial_state = sim.state()
    for name in calls:
        setattr(sim, name, recording(name))
    recorder.collect()
    for name in calls:
        delattr(sim, name)

    def again() -> None:
        for name, arguments, ctrl in recorded:
            if name == "step":
                sim.ctrl.copy_(ctrl)
            calls[name](*arguments)

    replay, seconds = capture(again, env.device, warp=env.device.type == "cuda"), 0.0
    for repeat in range(3 + repeats):
        sim.load_state(initial_state)
        # The first calls capture the graph and warm up.
        seconds += seconds_per_call(replay, env.device, 1, warm=0) * (repeat >= 3)
    return env.num_envs * learner.config.horizon * repeats / seconds


def seconds_per_call(call: Callable[[], object], device: torch.device, repeats: int, warm: int = 3) -> float:
    """Return the mean duration of `repeats` calls after `warm` warm-up calls."""

    def run(times: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    run(warm)
    return run(repeats) / repeats


def mjlab(
    python: Path | str,
    num_envs: int,
    ppo: PpoSettings,
    device: str,
    iterations: int,
    task: str = "Mjlab-Cartpole-Balance",
) -> Iterations:
    """Measure one of mjlab's tasks with the same sizes, in mjlab's own Python environment."""
    found = run_mjlab(
        python,
        task=task,
        num_envs=num_envs,
        horizon=ppo.horizon,
        epochs=ppo.epochs,
        minibatches=ppo.minibatches,
        hidden=ppo.hidden,
        iterations=iterations,
        warmup=0,
        device=device,
    )
    return Iterations(num_envs * ppo.horizon, found["collection_seconds"], found["learning_seconds"])


def run_mjlab(python: Path | str, **options: Any) -> dict[str, Any]:
    """Run bench/peers/mjlab_rate.py in mjlab's own Python environment and return its result. Sizes that are not given
    are those of mjlab's task."""
    with tempfile.TemporaryDirectory() as folder:
        output, argv = Path(folder) / "rate.json", []
        for name, value in (options | {"output": output}).items():
            argv += [f"--{name.replace('_', '-')}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
        # The peer runs with torch's default for waiting threads.
        environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        command = [python, HERE / "peers" / "mjlab_rate.py", *argv]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"mjlab failed:\n{done.stderr[-3000:]}")
        return json.loads(output.read_text())


def write(name: str, **figures: Any) -> None:
    """Write the latest figures of a benchmark with date, machine and versions."""
    machine = {"cpu": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0))}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    heading = {"date": date.today().isoformat(), "machine": machine, "versions": versions()}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(heading | figures, indent=2) + "\n")


def show(value: object) -> str:
    """Format a rate or a ratio for a table."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if value > 100 else f"{value:.2f}"
