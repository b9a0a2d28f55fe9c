"""Robot tasks and optional task features on a GPU. Run with pytest -m gpu."""

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
    """Task with observation history, observation delay and randomized gravity."""

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


def test_captured_graphs_match_eager_calls_with_all_task_features():
    captured, eager = make(CUDA), make_eager()
    for iteration in range(4):
        metrics, expected = captured.learn(), eager.learn()
        for name in metrics:
            if not name.startswith("seconds/"):
                assert metrics[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), (iteration, name)
    state, expected_state = captured.env.state(), eager.env.state()
    for name in ("observation_history/delay", "observation_history/buffer", "sim/field/opt.gravity"):
        torch.testing.assert_close(state[name], expected_state[name], rtol=1e-3, atol=1e-4)


def test_both_engines_agree_with_all_task_features():
    on_gpu, on_cpu = make(CUDA).collect(), make("cpu").collect()
    torch.testing.assert_close(on_gpu.obs["policy"].cpu(), on_cpu.obs["policy"], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(on_gpu.reward.cpu(), on_cpu.reward, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ROBOTS)
def test_every_robot_is_captured_and_trains_without_faults(name: str):
    learner = Ppo(RobotEnv(registry.find(name).task(), 256, "auto", CUDA), SMALL, seed=0)
    for _ in range(5):
        learner.learn()
    metrics = learner.learn()
    assert getattr(learner.collect, "captured", False)
    assert learner.first_non_finite() is None
    assert metrics["failures"] == metrics["overflows"] == 0.0
