"""Discrete actions with every learner: learned, equal on all ranks, resumed, exported; and files that ask for them."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from paceline.cli.train_arguments import parse
from paceline.distributed.group import Group
from paceline.distributed.rank import Rank, this_rank
from paceline.distributed.sharding import shard_ranges
from paceline.env.policy_description import METADATA_FILE
from paceline.env.robot_env import RobotEnv
from paceline.env.training_settings import TrainingSettings
from paceline.errors import UserError
from paceline.evaluate import evaluate
from paceline.export import export
from paceline.export_check import check_export
from paceline.learners.learner import LEARNERS, Learner
from paceline.learners.networks import PolicyRunner
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.train import train
from paceline.training.build import make_env, make_learner, playable
from tests.distributed.ranks import on_ranks
from tests.env.switches import Switch, Switches, accuracy
from tests.learners.test_contract import METRICS, common, digest, reduced, same

TRAINING = TrainingSettings(horizon=16, minibatches=4, hidden_layers=(32, 32), learning_rate=3e-3, entropy_weight=0.001)
NUM_ENVS, ITERATIONS = 32, 12
CARTPOLE = "gymnasium:CartPole-v1"


def make(name: str, group: Group, task: Switch, **changes: Any) -> Learner:
    envs = shard_ranges(NUM_ENVS, group.size)[group.rank.index]
    env = RobotEnv(task, len(envs), seed=3, first_env=envs.start)
    settings: Any = LEARNERS[name].settings.from_training(TRAINING)
    return LEARNERS[name].make(env, dataclasses.replace(settings, **changes), 3, group)


def run_rank(name: str) -> dict[str, Any]:
    """Train, save and resume on one rank; return what the test compares."""
    torch.set_num_threads(1)
    group = Group(this_rank(()))
    # skrl on JAX has one choice per action.
    task = Switch() if name == "skrl_jax" else Switches()
    learner = make(name, group, task)
    metrics = [learner.learn() for _ in range(ITERATIONS)]
    saved = learner.state()
    resumed = make(name, group, task)
    resumed.load_state(saved)
    after, again = learner.learn(), resumed.learn()
    position = torch.linspace(-1.0, 0.5, 31)
    found = {
        "common": common(saved),
        "metrics": reduced(metrics[-1]),
        "after": reduced(after),
        "again": reduced(again),
        "ends": [digest(learner.state()), digest(resumed.state())],
        "position": position,
        "actions": learner.policy()({"policy": torch.stack((position, torch.full((31,), 1.5)), dim=1)}),
    }
    group.close()
    return found


@pytest.mark.parametrize("name", LEARNERS)
def test_two_ranks_learn_the_same_choices_and_resume_bit_by_bit(name: str):
    main, other = on_ranks(2, run_rank, name)
    assert same(other["common"], main["common"])
    assert (other["after"], other["metrics"]) == (main["after"], main["metrics"])
    assert METRICS - {"policy/std"} <= main["metrics"].keys()
    assert "policy/std" not in main["metrics"], "a choice has no standard deviation"
    assert all(value == value for value in main["metrics"].values())
    for result in (main, other):
        assert result["again"] == result["after"]
        assert result["ends"][0] == result["ends"][1]
    assert main["actions"].dtype == torch.int64
    assert main["actions"].shape == (31, 1 if name == "skrl_jax" else 2)
    assert accuracy(main["actions"], main["position"]) > 0.9
    if name == "ppo":
        # As many envs on one rank learn the same, except for rounding.
        (alone,) = on_ranks(1, run_rank, name)
        networks = [key for key in main["common"] if key.startswith("networks")]
        assert len(networks) == 12
        for key in networks:
            torch.testing.assert_close(main["common"][key], alone["common"][key], rtol=1e-2, atol=1e-3)
        assert torch.equal(main["actions"], alone["actions"])


COMBINED = {
    "ppo": {"rnn_type": "gru", "rnn_hidden_size": 16},
    "rsl_rl": {"rnn_type": "gru", "rnn_hidden_dim": 16, "state_dependent_std": True, "clip_actions": 0.5},
    "skrl": {"rnn_type": "lstm", "rnn_hidden_size": 16, "separate": False},
    "rl_games": {"rnn_name": "lstm", "rnn_units": 16, "rnn_before_mlp": True, "action_limit": 0.5},
}


@pytest.mark.parametrize("name", COMBINED)
def test_recurrent_policies_learn_the_same_choices(name: str):
    """Settings of continuous actions have no effect."""
    learner, resumed = (make(name, Group(Rank()), Switches(), **COMBINED[name]) for _ in range(2))
    metrics = [learner.learn() for _ in range(ITERATIONS)]
    assert all(value == value for value in metrics[-1].values())
    resumed.load_state(learner.state())
    assert reduced(learner.learn()) == reduced(resumed.learn())
    assert digest(learner.state()) == digest(resumed.state())
    policy, obs = PolicyRunner(learner.policy(), NUM_ENVS), learner.env.reset()
    positions, actions = list[Tensor](), list[Tensor]()
    for _ in range(20):
        positions.append(obs["policy"][:, 0])
        actions.append(policy.act(obs))
        step = learner.env.step(actions[-1])
        policy.reset(step.terminated | step.truncated)
        obs = step.obs
    assert accuracy(torch.cat(actions), torch.cat(positions)) > 0.9


@pytest.mark.parametrize("task", [Switch(), Switches()])
def test_choices_of_skrl_may_share_the_layers_of_the_value_and_have_networks_of_parts(task: Switch):
    parts = '[{name: net, input: OBSERVATIONS, layers: [32], activations: elu}, {name: last, input: "net + net"}]'
    learner = make("skrl", Group(Rank()), task, separate=False, network=parts, mixed_precision=True)
    assert learner.learn()["loss/entropy"] == pytest.approx(sum(map(math.log, task.action_choices)), abs=0.05)
    actions = learner.policy()(learner.env.observe())
    assert (actions.dtype, actions.shape) == (torch.int64, (NUM_ENVS, len(task.action_choices)))


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run that learned CartPole-v1."""
    settings = {"horizon": 32, "minibatches": 4, "learning_rate": 1e-3, "clip_value": False, "desired_kl": 0.01}
    config = TrainConfig(CARTPOLE, {}, settings=settings, num_envs=16, max_iterations=60, logger=("none",))
    run = RunDir(tmp_path_factory.mktemp("cartpole") / "run")
    train(config, run, Console(quiet=True))
    return run


def test_cartpole_is_learned(cartpole: RunDir):
    evaluation, _ = evaluate(str(cartpole.path), episodes=8)
    assert evaluation.nominal is not None
    # A random policy balances for about 22 of 500 steps.
    assert evaluation.nominal["length"].mean > 400.0


@pytest.mark.parametrize("format", ["torchscript", "onnx"])
def test_an_exported_policy_returns_the_most_likely_choice(format: str, cartpole: RunDir, tmp_path: Path):
    file = export(str(cartpole.path), format, tmp_path / f"policy.{'pt' if format == 'torchscript' else 'onnx'}")
    found = check_export(file, str(cartpole.path), steps=200)
    assert (found.actions, found.passed) == (0.0, True)
    if format == "torchscript":
        extra = {METADATA_FILE: ""}
        policy, obs = torch.jit.load(file, _extra_files=extra), torch.randn(9, 4)
        assert json.loads(extra[METADATA_FILE])["action_choices"] == [2]
        actions = policy(obs)
        assert (actions.dtype, actions.shape) == (torch.int64, (9, 1))
        assert set(actions.flatten().tolist()) == {0, 1}
        assert torch.equal(actions, playable(str(cartpole.path)).policy({"policy": obs}))


def test_a_policy_of_rsl_rl_is_refused_for_discrete_actions(tmp_path: Path):
    with pytest.raises(UserError, match="discrete actions, which policies of RSL-RL do not have"):
        playable(str(tmp_path / "model.pt"), CARTPOLE)


RL_GAMES = """
params:
  algo: {name: a2c_discrete}
  model: {name: discrete_a2c}
  network:
    name: actor_critic
    separate: True
    space:
      discrete:
    mlp: {units: [32, 32], activation: relu, initializer: {name: default}, regularizer: {name: 'None'}}
  config:
    {env_name: CartPole-v1, horizon_length: 16, minibatch_size: 64, mini_epochs: 4, lr_schedule: None,
     learning_rate: 3e-4, gamma: 0.99, tau: 0.95, e_clip: 0.2, clip_value: True, critic_coef: 2, entropy_coef: 0.01,
     grad_norm: 1.0, normalize_input: True, normalize_advantage: True}
"""
SKRL = """
models:
  policy:
    class: CategoricalMixin
    unnormalized_log_prob: True
    network: [{name: net, input: OBSERVATIONS, layers: [32, 32], activations: elu}]
    output: ACTIONS
  value:
    class: DeterministicMixin
    network: [{name: net, input: OBSERVATIONS, layers: [32, 32], activations: elu}]
    output: ONE
agent: {class: PPO, rollouts: 16, mini_batches: 4, entropy_loss_scale: 0.01}
"""
CONTINUOUS = {
    "rsl_rl": "num_steps_per_env: 16",
    "rl_games": RL_GAMES.replace("a2c_discrete", "a2c_continuous")
    .replace("discrete_a2c", "continuous_a2c_logstd")
    .replace("discrete:", "continuous: {fixed_sigma: False}"),
    "skrl": SKRL.replace("CategoricalMixin", "GaussianMixin"),
}


def learner_of(task: str, name: str, text: str, folder: Path) -> Learner:
    (folder / "file.yaml").write_text(text)
    argv = [task, "--learner", name, "--gpu-ids", "none", "--num-envs", "4", "--learner-config"]
    config = parse([*argv, str(folder / "file.yaml")]).config
    return make_learner(config, make_env(config, Rank(), range(4)), Group(Rank()))


@pytest.mark.parametrize(("name", "text"), [("rl_games", RL_GAMES), ("skrl", SKRL)])
def test_a_file_that_asks_for_discrete_actions_trains_such_a_task(name: str, text: str, tmp_path: Path):
    learner = learner_of(CARTPOLE, name, text, tmp_path)
    assert learner.learn()["loss/entropy"] == pytest.approx(0.69, abs=0.02)
    message = f"--{name.replace('_', '-')}.action-space discrete, .* the actions of the task are continuous"
    with pytest.raises(UserError, match=message):
        learner_of("cartpole", name, text, tmp_path)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_a_file_that_asks_for_continuous_actions_is_refused_for_discrete_ones(name: str, tmp_path: Path):
    learner_of("cartpole", name, CONTINUOUS[name], tmp_path)
    with pytest.raises(UserError, match=r"action-space continuous, .* the actions of the task are discrete"):
        learner_of(CARTPOLE, name, CONTINUOUS[name], tmp_path)


def test_skrl_on_jax_refuses_several_choices():
    with pytest.raises(UserError, match=r"skrl_jax does not support actions of several choices, \(3, 2\)"):
        make("skrl_jax", Group(Rank()), Switches())
