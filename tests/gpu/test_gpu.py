"""What only a GPU can show. Never in CI: run with pytest -m gpu."""

import dataclasses
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from rich.console import Console

from paceline.env.robot_env import RobotEnv
from paceline.learners.ppo import Ppo
from paceline.learners.ppo.settings import PpoSettings
from paceline.run import checkpoint
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.tasks.cartpole import Cartpole
from paceline.tensors import random as draw
from paceline.train import train

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
SMALL = PpoSettings(horizon=8, epochs=2, minibatches=2, hidden=(32, 32))


def make(device: torch.device = CUDA, num_envs: int = 64) -> Ppo:
    return Ppo(RobotEnv(Cartpole(), num_envs, "auto", device, seed=1), SMALL, seed=1)


def make_eager() -> Ppo:
    """Make a learner without CUDA graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.learners.ppo.ppo.capture", lambda work, device, warp=False: work)
        return make()


def test_graphs_compute_what_eager_calls_compute():
    captured, eager = make(), make_eager()
    for iteration in range(4):
        ours, theirs = captured.learn(), eager.learn()
        for name in ours:
            if not name.startswith("seconds/"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), (iteration, name)
    assert getattr(captured.collect, "captured", False)


@pytest.mark.parametrize("count", [1, 5, 32])
def test_random_numbers_are_the_same_on_every_device(count: int):
    seed, world, step = 2**40 + 7, torch.arange(3, 99), torch.tensor([[0], [5], [2**31 + 1]])
    on_cpu = draw.bits(seed, world, step, draw.Stream.ACTION, count)
    on_gpu = draw.bits(seed, world.to(CUDA), step.to(CUDA), draw.Stream.ACTION, count)
    assert torch.equal(on_cpu, on_gpu.cpu())


def test_both_engines_learn_alike():
    gpu, cpu = make(), make(torch.device("cpu"))
    ours, theirs = gpu.collect(), cpu.collect()
    torch.testing.assert_close(ours.action.cpu(), theirs.action, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ours.obs["policy"].cpu(), theirs.obs["policy"], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours.reward.cpu(), theirs.reward, rtol=1e-3, atol=1e-3)


def test_nothing_in_an_iteration_waits_for_the_host():
    learner, eager = make(), make_eager()
    for _ in range(3):
        learner.learn()
        eager.learn()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        learner.rollout = learner.collect()
        summary = learner.update()
        # Eager calls as well, where each operation is checked separately.
        eager.rollout = eager.collect()
        eager.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(summary).all()


def test_a_resumed_run_goes_on_where_it_was(tmp_path: Path):
    config = TrainConfig(
        "cartpole", {}, settings=asdict(SMALL), gpu_ids=(0,), num_envs=64, max_iterations=6, checkpoint_every=3
    )
    run, quiet = RunDir(tmp_path / "run"), Console(quiet=True)
    train(dataclasses.replace(config, max_iterations=3), run, quiet)
    train(config, run, quiet, checkpoint.newest(run.checkpoints))
    whole = RunDir(tmp_path / "whole")
    train(config, whole, quiet)
    ours, theirs = (checkpoint.load(checkpoint.newest(r.checkpoints))["learner"] for r in (run, whole))
    for name, weights in ours["networks"].items():
        torch.testing.assert_close(weights, theirs["networks"][name], rtol=1e-2, atol=1e-3)
    assert ours["envs"]["steps"] == theirs["envs"]["steps"]


def test_the_command_line_trains_cartpole(tmp_path: Path):
    words = ["train", "cartpole", "--num-envs", "4096", "--engine", "warp", "--run-dir", "run"]
    subprocess.run([sys.executable, "-m", "paceline", *words], cwd=tmp_path, check=True, timeout=500)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["device"] == "cuda:0"
    assert result["mean_length"] > 0.95 * result["max_length"]
