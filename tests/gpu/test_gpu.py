"""Native PPO and MuJoCo Warp on a GPU. Run with pytest -m gpu."""

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
from paceline.tensors import random
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


def test_captured_graphs_match_eager_calls():
    captured, eager = make(), make_eager()
    for iteration in range(4):
        metrics, expected = captured.learn(), eager.learn()
        for name in metrics:
            if not name.startswith("seconds/"):
                assert metrics[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), (iteration, name)
    assert getattr(captured.collect, "captured", False)


@pytest.mark.parametrize("count", [1, 5, 32])
def test_random_numbers_are_the_same_on_every_device(count: int):
    seed, env, step = 2**40 + 7, torch.arange(3, 99), torch.tensor([[0], [5], [2**31 + 1]])
    on_cpu = random.bits(seed, env, step, random.Stream.ACTION, count)
    on_gpu = random.bits(seed, env.to(CUDA), step.to(CUDA), random.Stream.ACTION, count)
    assert torch.equal(on_cpu, on_gpu.cpu())


def test_both_engines_collect_the_same_rollout():
    gpu, cpu = make(), make(torch.device("cpu"))
    on_gpu, on_cpu = gpu.collect(), cpu.collect()
    torch.testing.assert_close(on_gpu.action.cpu(), on_cpu.action, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(on_gpu.obs["policy"].cpu(), on_cpu.obs["policy"], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(on_gpu.reward.cpu(), on_cpu.reward, rtol=1e-3, atol=1e-3)


def test_an_iteration_has_no_host_synchronization():
    learner, eager = make(), make_eager()
    for _ in range(3):
        learner.learn()
        eager.learn()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        learner.rollout = learner.collect()
        summary = learner.update()
        # Eager calls check each operation separately.
        eager.rollout = eager.collect()
        eager.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(summary).all()


def test_a_resumed_run_matches_an_uninterrupted_one(tmp_path: Path):
    config = TrainConfig(
        "cartpole", {}, settings=asdict(SMALL), gpu_ids=(0,), num_envs=64, max_iterations=6, checkpoint_every=3
    )
    run, quiet = RunDir(tmp_path / "run"), Console(quiet=True)
    train(dataclasses.replace(config, max_iterations=3), run, quiet)
    train(config, run, quiet, checkpoint.newest(run.checkpoints))
    whole = RunDir(tmp_path / "whole")
    train(config, whole, quiet)
    resumed, expected = (checkpoint.load(checkpoint.newest(r.checkpoints))["learner"] for r in (run, whole))
    for name, weights in resumed["networks"].items():
        torch.testing.assert_close(weights, expected["networks"][name], rtol=1e-2, atol=1e-3)
    assert resumed["envs"]["steps"] == expected["envs"]["steps"]


def test_the_command_line_trains_cartpole(tmp_path: Path):
    argv = ["train", "cartpole", "--num-envs", "4096", "--engine", "warp", "--run-dir", "run"]
    subprocess.run([sys.executable, "-m", "paceline", *argv], cwd=tmp_path, check=True, timeout=500)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["device"] == "cuda:0"
    assert result["mean_length"] > 0.95 * result["max_length"]
