"""skrl on JAX: conversion to torch, compilation, ranks and the launcher of skrl. The contract of learners is tested in
test_contract.py."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.distributed.group import Group
from paceline.distributed.launcher import adopt_jax_launcher
from paceline.distributed.rank import Rank, this_rank
from paceline.distributed.sharding import shard_ranges
from paceline.env.robot_env import RobotEnv
from paceline.env.task import EnvState
from paceline.env.vec_env import Step
from paceline.errors import UserError
from paceline.learners.skrl.jax_learner import SkrlJax, flat, jax_device, to_jax, unflat
from paceline.learners.skrl.settings import SkrlSettings
from paceline.run import checkpoint
from paceline.tasks.cartpole import Cartpole
from tests.distributed.ranks import on_ranks

SMALL = SkrlSettings(rollouts=4, learning_epochs=2, mini_batches=2, layers=(8,))
# Six steps, so that some episodes are truncated in every second iteration.
SHORT = Cartpole(episode_seconds=0.1)
NUM_ENVS, SEED = 8, 3


@pytest.fixture(scope="module", autouse=True)
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Share compiled functions between the tests and the processes that they start, to save time."""
    options = {"jax_compilation_cache_dir": str(tmp_path_factory.mktemp("jax"))}
    options |= {"jax_persistent_cache_min_compile_time_secs": "0", "jax_persistent_cache_min_entry_size_bytes": "-1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in options.items():
            patch.setenv(name.upper(), value)
            jax.config.update(name, value if name.endswith("dir") else int(value))
        yield
    jax.config.update("jax_compilation_cache_dir", None)


class Recording(RobotEnv):
    """Env that records its steps."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.recorded: list[Step] = []

    def step(self, actions: Tensor) -> Step:
        self.recorded.append(super().step(actions))
        return self.recorded[-1]


class Asymmetric(Cartpole):
    """Cartpole whose critic has more observations than the policy."""

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        obs = super().observe(state)["policy"]
        return {"policy": obs[:, 1:], "critic": torch.cat((obs, obs.square()), dim=1)}

    def observation_parts(self, model: mujoco.MjModel) -> dict[str, Any]:
        return {}


def make(config: SkrlSettings = SMALL, task: Cartpole = SHORT, group: Group | None = None) -> SkrlJax:
    group = group or Group(Rank())
    envs = shard_ranges(NUM_ENVS + group.size - 1, group.size)[group.rank.index]
    env = Recording(task, len(envs), seed=SEED, first_env=envs.start)
    return SkrlJax(env, config, SEED, group)


def leaves(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in state.items():
        found |= leaves(value, f"{prefix}{key} ") if isinstance(value, dict) else {prefix + key: value}
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name], name


def steps_of(learner: SkrlJax) -> list[Step]:
    assert isinstance(learner.env, Recording)
    return learner.env.recorded


def test_a_tensor_and_its_array_are_the_same_memory():
    tensor, device = torch.randn(5, 3), jax_device(torch.device("cpu"))
    array = to_jax(tensor, device)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr() == torch.from_dlpack(array).data_ptr()
    flags = torch.tensor([True, False, True])
    assert to_jax(flags, device).dtype == np.int8
    part = tensor[:, 1:]
    np.testing.assert_array_equal(np.asarray(to_jax(part, device)), part.numpy())


def test_a_tree_of_another_shape_is_rejected():
    tree = {"a": jax.numpy.zeros((2, 3)), "b": {"c": jax.numpy.ones(4)}}
    kept = flat(tree)
    assert set(kept) == {"a", "b/c"}
    with pytest.raises(RuntimeError, match=r"a has shape \(2, 3\) and should have \(3, 2\)"):
        unflat({"a": jax.numpy.zeros((3, 2)), "b": {"c": jax.numpy.ones(4)}}, kept)
    with pytest.raises(KeyError):
        unflat({"d": jax.numpy.zeros(1)}, kept)


def test_nothing_is_compiled_after_the_third_iteration():
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(str(about.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        learner = make()
        for _ in range(3):
            learner.learn()
        assert len(compiled) > 10
        compiled.clear()
        for _ in range(3):
            learner.learn()
        assert compiled == []
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path):
    whole = make()
    for _ in range(6):
        whole.learn()
    begun = make()
    for _ in range(3):
        begun.learn()
    file = checkpoint.save(tmp_path, 3, begun.state(), keep=1, best=False)
    resumed = make()
    resumed.load_state(checkpoint.load(file))
    assert_same(leaves(resumed.state()), leaves(begun.state()))
    for _ in range(3):
        resumed.learn()
    found = leaves(resumed.state())
    assert_same(found, leaves(whole.state()))
    # The count of the latest step of Adam; skrl itself saves that of the first.
    assert found["optimizer policy 1/count"] == 6 * SMALL.learning_epochs * SMALL.mini_batches


def test_the_torch_policy_is_the_jax_policy_with_its_scaler():
    learner = make()
    for _ in range(2):
        learner.learn()
    # Large enough for the scaler to clip.
    obs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)) * 20.0
    agent = learner.agent
    rows = agent.scalers["observation_preprocessor"](learner.from_torch(obs))
    _, outputs = agent.policy.act({"observations": rows, "states": None}, role="policy")
    groups = {"policy": obs}
    actions = learner.policy()(groups)
    np.testing.assert_allclose(actions.numpy(), outputs["mean_actions"], rtol=1e-5, atol=1e-6)
    fresh = make()
    assert not torch.allclose(fresh.policy()(groups), actions)
    fresh.load_policy(learner.state())
    assert torch.equal(fresh.policy()(groups), actions)


@pytest.mark.parametrize("bootstrap", [True, False])
def test_a_time_limit_is_bootstrapped_from_the_final_observation(bootstrap: bool):
    # A learning rate so small that the critic does not change.
    frozen = dataclasses.replace(
        SMALL,
        rollouts=7,
        learning_rate=1e-30,
        learning_rate_scheduler="none",
        observation_normalization=False,
        value_normalization=False,
        rewards_shaper_scale=0.5,
        time_limit_bootstrap=bootstrap,
    )
    learner = make(frozen)
    learner.learn()
    steps, agent = steps_of(learner), learner.agent
    truncated = torch.stack([step.truncated for step in steps])
    terminated = torch.stack([step.terminated for step in steps])
    assert truncated.any()
    final = torch.stack([step.final_obs["policy"] for step in steps])
    final_value, _ = agent.value.act({"observations": learner.from_torch(final), "states": None}, role="value")
    expected = 0.5 * torch.stack([step.reward for step in steps])
    if bootstrap:
        expected += frozen.discount_factor * torch.from_dlpack(final_value).squeeze(-1) * truncated
    stored = {name: torch.from_dlpack(agent.memory.tensors[name]).squeeze(-1) for name in ("rewards", "terminated")}
    torch.testing.assert_close(stored["rewards"], expected)
    assert torch.equal(stored["terminated"].bool(), terminated if bootstrap else terminated | truncated)


def test_the_critic_uses_its_own_observations():
    learner = make(task=Asymmetric(episode_seconds=0.1))
    learner.learn()
    state = learner.state()
    assert state["networks"]["policy"]["params/Dense_0/kernel"].shape[0] == 3
    assert state["networks"]["value"]["params/Dense_0/kernel"].shape[0] == 8
    seen = torch.stack([step.obs["critic"] for step in steps_of(learner)[:-1]])
    stored = torch.from_dlpack(learner.agent.memory.tensors["states"])
    assert torch.equal(stored[1:], seen)
    assert state["normalizers"]["state_preprocessor"]["running_mean"].shape == (8,)


def test_a_constant_learning_rate_stays_and_the_divergence_is_reported():
    learner = make(dataclasses.replace(SMALL, learning_rate_scheduler="none", learning_rate=0.05))
    values = learner.learn()
    assert values["policy/learning_rate"] == pytest.approx(0.05)
    assert values["policy/kl"] > 0.0


def learn_as_rank() -> dict[str, Any]:
    """Train on ranks with different numbers of envs, with the variables of a launcher set."""
    import skrl

    torch.set_num_threads(1)
    group = Group(this_rank(()))
    learner = make(group=group)
    agent = learner.agent
    learner.learn()
    found = {
        "alone": (jax.process_count(), skrl.config.jax.world_size, skrl.config.torch.world_size),
        "rank": os.environ["RANK"],
        "advantages": torch.from_dlpack(agent.memory.tensors["advantages"]).flatten().clone(),
        "obs": torch.from_dlpack(agent.memory.tensors["observations"]).flatten(0, 1).clone(),
        "count": agent.scalers["observation_preprocessor"].current_count.item(),
        "mean": torch.from_dlpack(agent.scalers["observation_preprocessor"].running_mean).clone(),
    }
    before = dict(agent.adam.states)
    own = 1e-3 * (group.rank.index + 1.0)
    for network in agent.networks.values():
        gradient = jax.tree.map(lambda leaf: jax.numpy.full_like(leaf, own), network.state_dict.params)
        agent.adam.step(grad=gradient, model=network, lr=0.0)
    for name, moments in before.items():
        fresh = jax.tree.map(lambda was, now: now - 0.9 * was, moments[1].mu, agent.adam.states[name][1].mu)
        found[f"{name} gradient"] = torch.cat([leaf.flatten() for leaf in flat(fresh).values()]) / 0.1
    agent.adam.states.update(before)
    found["collectives"] = -group.collectives
    agent.update(timestep=0, timesteps=0)
    found["collectives"] += group.collectives
    values = [learner.learn() for _ in range(3)]
    found |= {"values": values[-1], "num_envs": learner.env.num_envs}
    found["common"] = leaves({key: part for key, part in learner.state().items() if key != "envs"})
    group.close()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    found = on_ranks(2, learn_as_rank)
    assert [rank["num_envs"] for rank in found] == [5, 4]
    return found


def test_all_ranks_have_the_same_state_and_skrl_sees_one_process(ranks: list[dict[str, Any]]):
    assert_same(ranks[0]["common"], ranks[1]["common"])
    assert [rank["alone"] for rank in ranks] == [(1, 1, 1)] * 2
    assert [rank["rank"] for rank in ranks] == ["0", "1"]
    timings = ("seconds/collect", "seconds/update")
    assert_same(*({k: v for k, v in rank["values"].items() if k not in timings} for rank in ranks))


def test_advantages_and_statistics_are_those_of_all_ranks(ranks: list[dict[str, Any]]):
    own = [rank["advantages"] for rank in ranks]
    assert abs(own[0].mean()) > 1e-3
    joint = torch.cat(own)
    torch.testing.assert_close(joint.mean(), torch.tensor(0.0), atol=1e-5, rtol=0.0)
    torch.testing.assert_close(joint.std(correction=0), torch.tensor(1.0), atol=1e-4, rtol=0.0)
    obs = torch.cat([rank["obs"] for rank in ranks])
    # skrl starts from one row of zeros.
    expected = obs.sum(0) / (len(obs) + 1)
    for rank in ranks:
        assert rank["count"] == len(obs) + 1
        torch.testing.assert_close(rank["mean"], expected)


def test_a_step_uses_the_mean_gradient_over_all_samples(ranks: list[dict[str, Any]]):
    num_envs = [rank["num_envs"] for rank in ranks]
    expected = 1e-3 * (num_envs[0] * 1.0 + num_envs[1] * 2.0) / sum(num_envs)
    for rank in ranks:
        for name in ("policy gradient", "value gradient"):
            torch.testing.assert_close(rank[name], torch.full_like(rank[name], expected), rtol=1e-3, atol=1e-6)


def test_a_minibatch_takes_one_sum_over_ranks(ranks: list[dict[str, Any]]):
    minibatches, epochs = SMALL.mini_batches, SMALL.learning_epochs
    # Others: statistics of values, returns, advantages and all observations, and the divergence of each epoch.
    assert ranks[0]["collectives"] == minibatches * epochs + 3 + minibatches + epochs


def test_variables_of_torch_take_precedence_over_those_of_skrls_launcher(monkeypatch: pytest.MonkeyPatch):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in (*names, "JAX_WORLD_SIZE", "JAX_LOCAL_RANK", "JAX_COORDINATOR_ADDR", "JAX_COORDINATOR_PORT"):
        monkeypatch.setenv(name, "7")
        monkeypatch.delenv(name)
    monkeypatch.setenv("JAX_RANK", "1")
    with pytest.raises(UserError, match="JAX_RANK is set, but not JAX_WORLD_SIZE JAX_LOCAL_RANK"):
        adopt_jax_launcher()
    jax_names = ("JAX_RANK", "JAX_WORLD_SIZE", "JAX_LOCAL_RANK", "JAX_COORDINATOR_ADDR", "JAX_COORDINATOR_PORT")
    for name, value in zip(jax_names, ("3", "4", "1", "node", "5000"), strict=True):
        monkeypatch.setenv(name, value)
    adopt_jax_launcher()
    assert [os.environ[name] for name in names] == ["3", "4", "1", "node", "5000"]
    monkeypatch.setenv("JAX_RANK", "0")
    adopt_jax_launcher()
    assert os.environ["RANK"] == "3"
