"""The update compared with that of RSL-RL, and advantages over several ranks."""

import dataclasses
from typing import Any, cast

import pytest
import torch
from rsl_rl.algorithms import PPO
from rsl_rl.models import MLPModel, RNNModel
from rsl_rl.storage import RolloutStorage
from tensordict import TensorDict
from torch import Tensor

from paceline.distributed.group import Group
from paceline.distributed.rank import Rank, this_rank
from paceline.distributed.sharding import shard_ranges
from paceline.env.host_syncs import DetectSyncs
from paceline.env.robot_env import RobotEnv
from paceline.env.task import Task
from paceline.errors import UserError
from paceline.learners.rsl_rl.learner import RslRl
from paceline.learners.rsl_rl.settings import RslRlSettings
from paceline.tasks.cartpole import Cartpole
from paceline.tasks.cartpole_camera import CartpoleCamera
from tests.cameras.small import SMALL_CAMERA
from tests.distributed.ranks import on_ranks

SMALL = RslRlSettings(num_steps_per_env=8, hidden_dims=(16, 16), num_learning_epochs=2)


def original(learner: RslRl, config: RslRlSettings) -> PPO:
    """Return RSL-RL's algorithm with the same networks and the same rollout."""
    algorithm, obs = learner.algorithm, learner.algorithm.storage.observations[0]
    groups = {"actor": ["policy"], "critic": ["policy"]}
    network = (config.activation, config.obs_normalization)
    kind = "HeteroscedasticGaussianDistribution" if config.state_dependent_std else "GaussianDistribution"
    noise = {"class_name": kind, "init_std": config.init_std, "std_type": config.std_type}
    rnn: Any = () if config.rnn_type == "none" else (config.rnn_type, config.rnn_hidden_dim, config.rnn_num_layers)
    make_model = RNNModel if rnn else MLPModel
    actor = make_model(obs, groups, "actor", learner.env.num_actions, config.hidden_dims, *network, noise, *rnn)
    critic = make_model(obs, groups, "critic", 1, config.critic_hidden_dims or config.hidden_dims, *network, None, *rnn)
    actor.load_state_dict(algorithm.actor.state_dict())
    critic.load_state_dict(algorithm.critic.state_dict())
    names = (
        "num_learning_epochs num_mini_batches clip_param gamma lam value_loss_coef entropy_coef learning_rate "
        "max_grad_norm use_clipped_value_loss schedule desired_kl normalize_advantage_per_mini_batch "
        "use_mixed_precision"
    )
    peer = PPO(actor, critic, algorithm.storage, **{name: getattr(config, name) for name in names.split()})
    if not config.normalize_advantage_per_mini_batch:
        advantages = algorithm.storage.advantages
        algorithm.storage.advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    return peer


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        RslRlSettings(num_steps_per_env=8, hidden_dims=(16,), std_type="log", obs_normalization=False),
        RslRlSettings(num_steps_per_env=8, hidden_dims=(16,), schedule="fixed", use_clipped_value_loss=False),
        RslRlSettings(num_steps_per_env=8, hidden_dims=(16,), normalize_advantage_per_mini_batch=True, desired_kl=1e-4),
        RslRlSettings(num_steps_per_env=8, hidden_dims=(16,), critic_hidden_dims=(24, 8), state_dependent_std=True),
        RslRlSettings(num_steps_per_env=8, hidden_dims=(16,), rnn_type="lstm", rnn_hidden_dim=8, rnn_num_layers=2),
        RslRlSettings(
            num_steps_per_env=8,
            hidden_dims=(16,),
            rnn_type="gru",
            rnn_hidden_dim=8,
            critic_hidden_dims=(24, 8),
            state_dependent_std=True,
            schedule="fixed",
        ),
    ],
    ids=[
        *("defaults", "log std, no normalizer", "fixed rate, unclipped value", "advantages by minibatch"),
        *("std, critic", "lstm", "gru, std, critic"),
    ],
)
def test_the_update_equals_that_of_rsl_rl(config: RslRlSettings):
    learner = RslRl(RobotEnv(Cartpole(episode_seconds=0.2), 32, seed=1), config, 0, Group(Rank()))
    learner.learn()
    states = {name: part for name, part in learner.state()["envs"].items() if name.startswith("learner/")}
    learner.collect()
    kept = learner.algorithm.storage.advantages.clone()
    peer = original(learner, config)
    if states:
        assert peer.storage.dones.sum() > 0
        peer.storage.saved_hidden_state_a = states_of_steps(peer.actor, peer.storage, states["learner/actor_state"])
        peer.storage.saved_hidden_state_c = states_of_steps(peer.critic, peer.storage, states["learner/critic_state"])
    peer.learning_rate = float(learner.algorithm.adam.learning_rate)
    adam = learner.algorithm.adam.state()
    for name in ("exp_avg", "exp_avg_sq"):
        for parameter, part in split(adam[name], peer):
            peer.optimizer.state[parameter] |= {name: part.clone(), "step": adam["step"].clone()}
    torch.manual_seed(7)
    losses = peer.update()
    learner.algorithm.storage.advantages = kept
    torch.manual_seed(7)
    with torch.no_grad():
        surrogate, value, entropy, _ = learner.algorithm.update_policy().tolist()
    assert [surrogate, value, entropy] == pytest.approx(
        [losses["surrogate"], losses["value"], losses["entropy"]], rel=1e-4, abs=1e-6
    )
    assert float(learner.algorithm.adam.learning_rate) == pytest.approx(peer.learning_rate, rel=1e-5)
    for found, expected in ((learner.algorithm.actor, peer.actor), (learner.algorithm.critic, peer.critic)):
        for name, tensor in expected.state_dict().items():
            torch.testing.assert_close(found.state_dict()[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@torch.no_grad()
def states_of_steps(model: Any, storage: RolloutStorage, start: Tensor) -> list[Tensor]:
    """Return the states of RSL-RL's model before each step of a rollout, [step, layer, env, hidden] for each part."""
    parts = tuple(part.transpose(0, 1).contiguous() for part in start.unbind(1))
    model.reset(hidden_state=parts if len(parts) == 2 else parts[0])
    steps = []
    for obs, done in zip(storage.observations, storage.dones, strict=True):
        state = model.get_hidden_state()
        steps.append([part.clone() for part in (state if isinstance(state, tuple) else (state,))])
        model(obs)
        model.reset(done.squeeze(-1))
    return [torch.stack(part) for part in zip(*steps, strict=True)]


def split(flat: Tensor, peer: PPO) -> list[tuple[Tensor, Tensor]]:
    """Return the part of a flat vector for each parameter of the peer."""
    parameters = [*peer.actor.parameters(), *peer.critic.parameters()]
    parts = flat.split([parameter.numel() for parameter in parameters])
    return [(parameter, part.view_as(parameter)) for parameter, part in zip(parameters, parts, strict=True)]


def advantages_of_ranks() -> dict[str, Tensor | int]:
    torch.set_num_threads(1)
    group = Group(this_rank(()))
    own = shard_ranges(24, group.size)[group.rank.index]
    learner = RslRl(RobotEnv(Cartpole(), len(own), first_env=own.start), SMALL, 0, group)
    before = group.collectives
    learner.learn()
    found = {"advantages": learner.algorithm.storage.advantages, "collectives": group.collectives - before}
    group.close()
    return found


def test_advantages_are_standardized_over_all_ranks_and_a_minibatch_takes_one_collective():
    ranks = on_ranks(2, advantages_of_ranks)
    parts = [rank["advantages"] for rank in ranks]
    together = torch.cat([part.flatten() for part in parts])
    assert together.mean().abs() < 1e-5
    assert together.std() == pytest.approx(1.0, abs=1e-5)
    assert max(part.mean().abs() for part in parts) > 1e-3
    # Minibatches; and advantages, two normalizers and the report.
    assert [rank["collectives"] for rank in ranks] == [2 * 4 + 4] * 2


RECURRENT = RslRlSettings(
    num_steps_per_env=8, hidden_dims=(16,), num_learning_epochs=2, rnn_type="lstm", rnn_hidden_dim=8
)


def recurrent(num_envs: int = 6, task: Task | None = None, **changes: Any) -> RslRl:
    config = dataclasses.replace(RECURRENT, **changes)
    return RslRl(RobotEnv(task or Cartpole(episode_seconds=0.2), num_envs, seed=1), config, 0, Group(Rank()))


def test_a_recurrent_learner_resumes_bit_by_bit_and_exports_its_state():
    learner, resumed = recurrent(), recurrent()
    for _ in range(2):
        learner.learn()
    resumed.load_state(learner.state())
    expected, found = learner.learn(), resumed.learn()
    torch.testing.assert_close(resumed.state(), learner.state(), rtol=0, atol=0)
    assert found["loss/value"] == expected["loss/value"]

    policy, obs = learner.policy(), learner.env.observe()
    with torch.no_grad():
        actions, state = policy.step(obs, learner.state()["envs"]["learner/actor_state"])
        mean = learner.algorithm.actor(TensorDict(cast("Any", obs), [6]))
    torch.testing.assert_close(actions, mean, rtol=1e-4, atol=1e-5)
    assert state.shape == (6, 2, 1, 8)


def test_the_rollout_and_the_update_of_a_recurrent_learner_have_no_host_sync():
    learner = recurrent()
    learner.learn()
    with DetectSyncs(pytest.fail):
        learner.collect()
        learner.update()


def test_recurrent_networks_refuse_images_and_more_minibatches_than_envs():
    with pytest.raises(UserError, match=r"--rsl-rl.num-mini-batches 7 is more than 6 envs of a rank: .* use at most 6"):
        dataclasses.replace(RECURRENT, num_mini_batches=7).check_samples(6)
    with pytest.raises(UserError, match=r"--rsl-rl.rnn-type lstm is not supported for a task with cameras: use"):
        recurrent(task=CartpoleCamera(camera=SMALL_CAMERA))
