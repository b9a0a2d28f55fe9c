"""Every learner on a GPU, alone and as two ranks that share it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.build import build
from paceline.config import TrainConfig
from paceline.distributed.group import Group
from paceline.distributed.rank import Rank
from paceline.env.robot_env import RobotEnv
from paceline.learners.rsl_rl import RslRl
from paceline.metrics import EpisodeMeans
from paceline.settings import LEARNERS
from paceline.settings.rsl_rl import RslRlConfig
from paceline.tasks.cartpole import ENTRY, Cartpole

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
LONG_ENOUGH = 0.95 * 300
LIBRARIES = [name for name in LEARNERS if name != "ppo"]


@pytest.mark.parametrize("name", LIBRARIES)
def test_cartpole_is_learnt(name: str):
    config = TrainConfig("cartpole", {}, name, ENTRY.settings(name), gpu_ids=(0,), num_envs=1024)
    env, learner = build(config, Group(Rank(device=CUDA)), range(1024))
    means = EpisodeMeans()
    while means.means().get("length", 0.0) < LONG_ENOUGH and learner.iteration < ENTRY.max_iterations:
        values = learner.learn()
        means.add({key: values[key] for key in ("episodes", *env.log_names)})
    assert means.means()["length"] >= LONG_ENOUGH
    assert learner.sound()
    saved = learner.state()
    learner.learn()
    learner.load_state(saved)
    assert learner.iteration == saved["iteration"]
    obs = env.reset()["policy"]
    assert learner.policy()(obs.cpu()).shape == (1024, 1)


def test_rsl_rls_graphs_do_what_plain_calls_do():
    """Of the same numbers: torch's generator is the same inside a graph as outside."""
    config = RslRlConfig(num_steps_per_env=8, hidden_dims=(32, 32))
    ends = []
    for graphs in (True, False):
        learner = RslRl(RobotEnv(Cartpole(), 64, "auto", CUDA), config, 0, Group(Rank(device=CUDA)))
        if not graphs:
            learner._collect = torch.no_grad()(learner._roll_out)
            learner._improve = torch.no_grad()(learner.algorithm.improve)
        values = [learner.learn() for _ in range(5)]
        weights = next(learner.algorithm.actor.mlp.parameters()).detach().clone()
        ends.append((weights, values[-1]["loss/value"]))
    (one, loss), (other, other_loss) = ends
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert loss == pytest.approx(other_loss, rel=1e-2)


@pytest.mark.parametrize("name", LIBRARIES)
def test_two_ranks_share_the_gpu(name: str, tmp_path: Path):
    command = [sys.executable, "-m", "paceline", "train", "cartpole", "--learner", name, "--gpu-ids", "0", "0"]
    command += ["--num-envs", "256", "--max-iterations", "3", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "sharing a GPU" in done.stdout
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["world_size"]) == ("completed", 2)
