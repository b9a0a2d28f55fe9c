"""Recurrent networks against those of torch, and the state of a policy in its episodes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from paceline.distributed.group import Group
from paceline.distributed.rank import Rank, this_rank
from paceline.distributed.sharding import shard_ranges
from paceline.env.robot_env import RobotEnv
from paceline.env.training_settings import TrainingSettings
from paceline.env.vec_env import Step, TensorSpec
from paceline.errors import UserError
from paceline.evaluate import evaluate
from paceline.export import export
from paceline.export_check import check_export
from paceline.learners.learner import LEARNERS, settings_of
from paceline.learners.networks import Policy, fold_normalizer
from paceline.learners.recurrent import RecurrentNetwork, Rnn
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.tasks.cartpole import Cartpole
from paceline.train import train
from paceline.training.evaluation import run_episodes
from tests.distributed.ranks import on_ranks

TORCH = {"lstm": nn.LSTM, "gru": nn.GRU}


def rnn_and_torch(kind: str, inputs: int = 5, hidden_size: int = 6, layers: int = 2) -> tuple[Rnn, nn.Module]:
    torch.manual_seed(0)
    expected = TORCH[kind](inputs, hidden_size, layers)
    found = Rnn(kind, inputs, hidden_size, layers)
    found.load_state_dict(expected.state_dict())
    return found, expected


def run_torch(module: nn.Module, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and state, [batch, part, layer, hidden], of a module of torch."""
    parts = tuple(part.transpose(0, 1).contiguous() for part in state.unbind(1))
    output, after = module(x, parts if len(parts) == 2 else parts[0])
    return output, torch.stack([part.transpose(0, 1) for part in (after if len(parts) == 2 else (after,))], dim=1)


@pytest.mark.parametrize("kind", TORCH)
def test_outputs_state_and_gradient_are_those_of_torch(kind: str):
    rnn, module = rnn_and_torch(kind)
    x, state = torch.randn(7, 3, 5), torch.randn(3, *rnn.state_shape)
    found, expected = rnn(x, state), run_torch(module, x, state)
    torch.testing.assert_close(found, expected)
    gradients = (
        torch.autograd.grad(outputs[0].square().sum() + outputs[1].sum(), list(network.parameters()))
        for outputs, network in ((found, rnn), (expected, module))
    )
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("kind", TORCH)
def test_a_start_inside_a_sequence_begins_with_a_zero_state(kind: str):
    rnn, module = rnn_and_torch(kind)
    x, state = torch.randn(7, 2, 5), torch.randn(2, *rnn.state_shape)
    starts = torch.zeros(7, 2, dtype=torch.bool)
    starts[4, 1] = True
    outputs, after = rnn(x, state, starts)
    whole, after_whole = run_torch(module, x, state)
    new, after_new = run_torch(module, x[4:], torch.zeros_like(state))
    torch.testing.assert_close(outputs[:, 0], whole[:, 0])
    torch.testing.assert_close(outputs[:4, 1], whole[:4, 1])
    torch.testing.assert_close(outputs[4:, 1], new[:, 1])
    torch.testing.assert_close(after, torch.stack((after_whole[0], after_new[1])))


def test_columns_of_zeros_at_the_end_change_nothing():
    rnn, _ = rnn_and_torch("gru")
    x, state = torch.randn(2, 3, 5), torch.zeros(3, *rnn.state_shape)
    torch.testing.assert_close(rnn(nn.functional.pad(x, (0, 3)), state), rnn(x, state))


def test_a_folded_normalizer_takes_raw_inputs():
    network = RecurrentNetwork(rnn_and_torch("lstm")[0], nn.Linear(6, 2))
    x, state, mean, std = torch.randn(3, 5), torch.zeros(3, *network.state_shape), torch.randn(5), torch.rand(5) + 0.5
    found, expected = fold_normalizer(network, mean, std).step(x, state), network.step((x - mean) / std, state)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Counter:
    """Env whose observation is always 1, and whose reward is the action. Env 0 has episodes of 3 steps, env 1 of 5."""

    num_envs, first_env, num_actions, max_episode_steps, device = 2, 0, 1, 5, torch.device("cpu")
    log_names: tuple[str, ...] = ("length", "return")
    step_seconds, capturable = 0.02, False

    def __init__(self) -> None:
        self.observation_spec = {"policy": TensorSpec((1,))}

    def reset(self) -> dict[str, Tensor]:
        self._log = torch.zeros(2, 2)
        return self.observe()

    def observe(self) -> dict[str, Tensor]:
        return {"policy": torch.ones(2, 1)}

    def step(self, actions: Tensor) -> Step:
        reward = actions[:, 0]
        self._log = self._log + torch.stack((torch.ones(2), reward), dim=1)
        log, done = self._log, self._log[:, 0] >= torch.tensor((3.0, 5.0))
        self._log = log.masked_fill(done.unsqueeze(1), 0.0)
        return Step(self.observe(), reward, done, torch.zeros_like(done), self.observe(), log)

    def prefetch_random(self, steps: int) -> None: ...

    def faults(self) -> Tensor:
        return torch.zeros(2)

    def state(self) -> dict[str, Tensor]:
        return {"episode_step": self._log[:, 0]}

    def load_state(self, state: dict[str, Tensor]) -> None: ...


def test_the_state_of_a_policy_starts_at_zero_in_every_episode_of_an_evaluation():
    rnn = rnn_and_torch("gru", inputs=1, hidden_size=1, layers=1)[0]
    policy = Policy(RecurrentNetwork(rnn, nn.Identity()))
    returns = run_episodes(Counter(), policy, per_env=3)["return"].unflatten(0, (3, 2))
    with torch.no_grad():
        outputs, _ = rnn(torch.ones(5, 2, 1), policy.initial_state(2))
    expected = torch.stack((outputs[:3, 0].sum(), outputs[:, 1].sum()))
    torch.testing.assert_close(returns, expected.expand(3, 2))
    assert len(outputs[:, 0].unique()) == 5, "the state does not change"


LIBRARIES: dict[str, dict[str, Any]] = {
    "rsl_rl": {"num_steps_per_env": 8, "hidden_dims": (8,), "rnn_type": "lstm", "rnn_hidden_dim": 8},
    "skrl": {"rollouts": 8, "mini_batches": 2, "layers": (8,), "rnn_type": "gru", "rnn_hidden_size": 8},
    "rl_games": {
        "horizon_length": 8,
        "minibatch_size_per_env": 4,
        "units": (8,),
        "rnn_name": "gru",
        "rnn_units": 8,
        "seq_length": 8,
    },
}


def learn_as_rank() -> dict[str, Any]:
    """Return the state of each library after some iterations of two ranks, without the envs."""
    torch.set_num_threads(1)
    group, found = Group(this_rank(())), {}
    for name, changes in LIBRARIES.items():
        envs = shard_ranges(10, group.size)[group.rank.index]
        env = RobotEnv(Cartpole(episode_seconds=0.1), len(envs), first_env=envs.start)
        learner = LEARNERS[name].make(env, settings_of(name, changes), 0, group)
        for _ in range(3):
            learner.learn()
        found[name] = {part: value for part, value in learner.state().items() if part != "envs"}
    group.close()
    return found


def test_all_ranks_of_a_library_have_the_same_recurrent_networks():
    main, other = on_ranks(2, learn_as_rank)
    assert main.keys() == LIBRARIES.keys()
    torch.testing.assert_close(other, main, rtol=0, atol=0)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_run_with_several_minibatches_is_evaluated_and_exported_from_one_env(name: str, tmp_path: Path):
    config = TrainConfig(
        "cartpole", {}, name, LIBRARIES[name], num_envs=8, max_iterations=1, logger=("none",), gpu_ids=()
    )
    train(config, RunDir(tmp_path / "run"), Console(quiet=True))
    evaluation, _ = evaluate(str(tmp_path / "run"), episodes=2)
    assert evaluation.episodes == 2
    assert check_export(export(str(tmp_path / "run"), "onnx", None), str(tmp_path / "run"), steps=40).passed


def test_a_task_that_trains_a_recurrent_policy_does_so_with_every_learner_except_skrl_on_jax():
    training = TrainingSettings(rnn_type="gru", rnn_hidden_size=9, rnn_layers=2, horizon=8, hidden_layers=(8,))
    for name in LEARNERS:
        env = RobotEnv(Cartpole(), 16)
        settings = LEARNERS[name].settings.from_training(training)
        if name == "skrl_jax":
            with pytest.raises(UserError, match=r"--skrl.rnn-type needs skrl on torch: use --learner skrl"):
                LEARNERS[name].make(env, settings, 0, Group(Rank()))
        else:
            policy = LEARNERS[name].make(env, settings, 0, Group(Rank())).policy()
            assert (policy.state_names, policy.initial_state(3).shape) == (("h",), (3, 1, 2, 9))
