"""Steps per second of Paceline, of the bare physics, and of peers: what the benchmarks compare."""

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
"""Iterations after those that compile, capture and fill caches."""


@dataclass(frozen=True)
class Iterations:
    """Seconds of each iteration of a run, the first one included."""

    steps: int
    """Env steps in an iteration."""
    collection: list[float]
    update: list[float]

    def rates(self, chosen: slice) -> dict[str, float]:
        """Env steps per second over some of the iterations, of collecting alone and of training."""
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
    """The native learner. The device is idle at the end of each iteration; what is not collection counts as update."""
    tune_torch(device)
    return learning(Ppo(RobotEnv(task, num_envs, engine, device), ppo, seed=0), num_envs * ppo.horizon, iterations)


def learning(learner: Learner, steps: int, iterations: int) -> Iterations:
    """Of `steps` env steps each."""
    collection, update = [], []
    for _ in range(iterations):
        began = time.perf_counter()
        collection.append(learner.learn()["seconds/collect"])
        update.append(time.perf_counter() - began - collection[-1])
    return Iterations(steps, collection, update)


def physics(task: Task, num_envs: int, device: torch.device, steps: int, repeats: int) -> float:
    """Env steps/s of the physics alone: `steps` control steps as one graph and nothing else, the ceiling of it all."""
    sim = RobotEnv(task, num_envs, "auto", device).sim
    sim.ctrl.uniform_(-1.0, 1.0)

    def work() -> None:
        for _ in range(steps):
            sim.step(task.decimation)
            sim.sense()

    replay = capture(work, device, warp=device.type == "cuda")
    return num_envs * steps / seconds_per_call(replay, device, repeats)


def physics_of(learner: Ppo, env: RobotEnv, repeats: int) -> float:
    """Env steps/s of the physics of a rollout and nothing else: what the simulation was asked to do in one (controls,
    steps, resets, pushes), done again as one graph, from the state in which it began."""
    sim, asked = env.sim, []
    calls = {name: getattr(sim, name) for name in ("step", "reset", "push", "sense")}

    def recording(name: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            kept = [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]
            asked.append((name, kept, sim.ctrl.clone()))
            calls[name](*arguments)

        return call

    began = sim.state()
    for name in calls:
        setattr(sim, name, recording(name))
    with torch.no_grad():
        learner._collect()
    for name in calls:
        delattr(sim, name)

    def again() -> None:
        for name, arguments, ctrl in asked:
            if name == "step":
                sim.ctrl.copy_(ctrl)
            calls[name](*arguments)

    replay, seconds = capture(again, env.device, warp=env.device.type == "cuda"), 0.0
    for repeat in range(3 + repeats):
        sim.load_state(began)
        # The first calls capture and warm up.
        seconds += seconds_per_call(replay, env.device, 1, warm=0) * (repeat >= 3)
    return env.num_envs * learner.config.horizon * repeats / seconds


def seconds_per_call(call: Callable[[], object], device: torch.device, repeats: int, warm: int = 3) -> float:
    """Mean over `repeats` calls, after some that warm up."""

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
    """A task of mjlab's own, in its own environment, with the same sizes."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rate.json"
        sizes = {
            "task": task,
            "num-envs": num_envs,
            "horizon": ppo.horizon,
            "epochs": ppo.epochs,
            "minibatches": ppo.minibatches,
            "iterations": iterations,
            "warmup": 0,
            "device": device,
            "output": output,
        }
        words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
        words += ["--hidden", *map(str, ppo.hidden)]
        # The peer gets torch's own default for waiting threads, not ours.
        environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        command = [python, HERE / "peers" / "mjlab_rate.py", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"mjlab failed:\n{done.stderr[-3000:]}")
        found = json.loads(output.read_text())
        return Iterations(num_envs * ppo.horizon, found["collection_seconds"], found["learning_seconds"])


def write(name: str, **figures: Any) -> None:
    """The latest figures of a benchmark, with what they were measured on."""
    machine = {"cpu": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0))}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    heading = {"date": date.today().isoformat(), "machine": machine, "versions": versions()}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(heading | figures, indent=2) + "\n")


def show(value: object) -> str:
    """A rate or a ratio, for a table."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if value > 100 else f"{value:.2f}"
