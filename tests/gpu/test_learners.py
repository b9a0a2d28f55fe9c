"""All learners on a GPU, as one rank and as two ranks on the same GPU."""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.distributed.group import Group
from paceline.distributed.rank import Rank
from paceline.env.robot_env import RobotEnv
from paceline.env.task import EnvState
from paceline.learners.learner import LEARNERS
from paceline.learners.rsl_rl.learner import RslRl
from paceline.learners.rsl_rl.settings import RslRlSettings
from paceline.run.config import TrainConfig
from paceline.run.metrics import EpisodeMeans
from paceline.tasks.cartpole import ENTRY, Cartpole
from paceline.training.build import make_env, make_learner

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
LEARNED_LENGTH = 0.95 * 300
LIBRARIES = [name for name in LEARNERS if name != "ppo"]


@pytest.mark.parametrize("name", LIBRARIES)
def test_cartpole_is_learned(name: str):
    settings = asdict(LEARNERS[name].settings.from_training(ENTRY.training))
    config = TrainConfig("cartpole", {}, name, settings, gpu_ids=(0,), num_envs=1024)
    group = Group(Rank(device=CUDA))
    env = make_env(config, group.rank, range(1024))
    learner = make_learner(config, env, group)
    means = EpisodeMeans()
    while means.means().get("length", 0.0) < LEARNED_LENGTH and learner.iteration < ENTRY.max_iterations:
        values = learner.learn()
        means.add({key: values[key] for key in ("episodes", *env.log_names)})
    assert means.means()["length"] >= LEARNED_LENGTH
    assert learner.first_non_finite() is None
    saved = learner.state()
    learner.learn()
    learner.load_state(saved)
    assert learner.iteration == saved["iteration"]
    obs = env.reset()["policy"]
    assert learner.policy()({"policy": obs.cpu()}).shape == (1024, 1)


@dataclass(frozen=True)
class Broken(Cartpole):
    """Cartpole without termination; the reward of one env is NaN in its third control step."""

    def terminated(self, state: EnvState) -> Tensor:
        return torch.zeros_like(state.episode_step, dtype=torch.bool)

    def reward(self, state: EnvState, terminated: Tensor) -> dict[str, Tensor]:
        terms = super().reward(state, terminated)
        broken = torch.arange(len(terminated), device=terminated.device) == 5
        return terms | {"alive": terms["alive"].masked_fill(broken & (state.episode_step == 3), torch.nan)}


@pytest.mark.parametrize("name", LEARNERS)
def test_the_first_non_finite_value_is_located_inside_a_graph(name: str):
    group, settings = Group(Rank(device=CUDA)), LEARNERS[name].settings.from_training(ENTRY.training)
    learner = LEARNERS[name].make(RobotEnv(Broken(), 64, "auto", CUDA, first_env=100), settings, 0, group)
    state = learner.state()
    # The first two iterations end before the third control step; the second one is captured.
    state["envs"]["episode_step"] -= 2 * settings.horizon
    learner.load_state(state)
    for _ in range(2):
        learner.learn()
        assert learner.first_non_finite() is None
    learner.learn()
    assert learner.first_non_finite() == "reward term 'alive' of env 105 became nan in step 3 of the rollout"


def test_rsl_rl_graphs_match_eager_calls():
    """Both sides sample the same numbers: torch's generator gives the same values inside and outside of a graph."""
    config = RslRlSettings(num_steps_per_env=8, hidden_dims=(32, 32))
    ends = []
    for graphs in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not graphs:
                patch.setattr("paceline.learners.rsl_rl.learner.capture", lambda work, device, warp=False: work)
            learner = RslRl(RobotEnv(Cartpole(), 64, "auto", CUDA), config, 0, Group(Rank(device=CUDA)))
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
