"""The update compared with that of RSL-RL, and advantages over several ranks."""

import pytest
import torch
from rsl_rl.algorithms import PPO
from rsl_rl.models import MLPModel
from torch import Tensor

from paceline.distributed.group import Group
from paceline.distributed.rank import Rank, this_rank
from paceline.distributed.sharding import shard_ranges
from paceline.env.robot_env import RobotEnv
from paceline.learners.rsl_rl.learner import RslRl
from paceline.learners.rsl_rl.settings import RslRlSettings
from paceline.tasks.cartpole import Cartpole
from tests.distributed.ranks import on_ranks

SMALL = RslRlSettings(num_steps_per_env=8, hidden_dims=(16, 16), num_learning_epochs=2)


def original(learner: RslRl, config: RslRlSettings) -> PPO:
    """Return RSL-RL's algorithm with the same networks and the same rollout."""
    algorithm, obs = learner.algorithm, learner.algorithm.storage.observations[0]
    groups = {"actor": ["policy"], "critic": ["policy"]}
    network = (config.hidden_dims, config.activation, config.obs_normalization)
    noise = {"class_name": "GaussianDistribution", "init_std": config.init_std, "std_type": config.std_type}
    actor = MLPModel(obs, groups, "actor", learner.env.num_actions, *network, noise)
    critic = MLPModel(obs, groups, "critic", 1, *network)
    actor.load_state_dict(algorithm.actor.state_dict())
    critic.load_state_dict(algorithm.critic.state_dict())
    names = (
        "num_learning_epochs num_mini_batches clip_param gamma lam value_loss_coef entropy_coef learning_rate "
        "max_grad_norm use_clipped_value_loss schedule desired_kl normalize_advantage_per_mini_batch"
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
    ],
    ids=["defaults", "log std, no normalizer", "fixed rate, unclipped value", "advantages by minibatch"],
)
def test_the_update_equals_that_of_rsl_rl(config: RslRlSettings):
    learner = RslRl(RobotEnv(Cartpole(episode_seconds=0.2), 32, seed=1), config, 0, Group(Rank()))
    learner.learn()
    learner.collect()
    kept = learner.algorithm.storage.advantages.clone()
    peer = original(learner, config)
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
