"""Robots on a GPU, and what their tasks may have: captured, without faults, as on a CPU. Run with pytest -m gpu."""

from dataclasses import dataclass

import pytest
import torch

from paceline.env.randomization import Randomization
from paceline.env.robot_env import RobotEnv
from paceline.learners.ppo import Ppo
from paceline.learners.ppo.settings import PpoSettings
from paceline.tasks import registry
from tests.env.lively import Lively

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
SMALL = PpoSettings(horizon=8, epochs=2, minibatches=2, hidden=(32, 32))
ROBOTS = [name for name in registry.names() if name != "cartpole"]


@dataclass(frozen=True)
class Livelier(Lively):
    """Its policy sees late, and its worlds differ in their gravity."""

    fields: tuple[Randomization, ...] = (
        *Lively().fields,
        Randomization("opt.gravity", 0.5, 1.5, every_seconds=0.1),
    )
    observation_history: int = 3
    observation_delay: tuple[int, int] = (0, 2)


def make(device: torch.device | str) -> Ppo:
    return Ppo(RobotEnv(Livelier(), 64, "auto", device, seed=1), SMALL, seed=1)


def make_eager() -> Ppo:
    """Make a learner without CUDA graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.learners.ppo.ppo.capture", lambda work, device, warp=False: work)
        return make(CUDA)


def test_graphs_of_a_lively_task_compute_what_eager_calls_compute():
    captured, eager = make(CUDA), make_eager()
    for iteration in range(4):
        ours, theirs = captured.learn(), eager.learn()
        for name in ours:
            if not name.startswith("seconds/"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), (iteration, name)
    ours, theirs = captured.env.state(), eager.env.state()
    for name in ("observation_history/delay", "observation_history/buffer", "sim/field/opt.gravity"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4)


def test_a_lively_task_is_the_same_on_both_engines():
    ours, theirs = make(CUDA).collect(), make("cpu").collect()
    torch.testing.assert_close(ours.obs["policy"].cpu(), theirs.obs["policy"], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours.reward.cpu(), theirs.reward, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ROBOTS)
def test_every_robot_is_captured_and_learns_without_faults(name: str):
    learner = Ppo(RobotEnv(registry.find(name).task(), 256, "auto", CUDA), SMALL, seed=0)
    for _ in range(5):
        learner.learn()
    told = learner.learn()
    assert getattr(learner.collect, "captured", False)
    assert learner.first_non_finite() is None
    assert told["failures"] == told["overflows"] == 0.0
