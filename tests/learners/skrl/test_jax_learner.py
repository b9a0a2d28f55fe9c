"""What is particular to skrl on JAX: the bridge to torch, nothing compiled twice, ranks that skrl does not know of, and
its launcher. What it owes as a learner is in test_contract.py."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.distributed.group import Group
from paceline.distributed.rank import Rank, adopt_jax_launcher, this_rank
from paceline.distributed.sharding import shard_ranges
from paceline.env.robot_env import RobotEnv
from paceline.env.task import EnvState
from paceline.env.vec_env import Step
from paceline.errors import UserError
from paceline.learners.skrl.jax_arrays import flat, jax_device, to_jax, to_torch, unflat
from paceline.learners.skrl.jax_learner import SkrlJax
from paceline.learners.skrl.settings import SkrlSettings
from paceline.run import checkpoint
from paceline.tasks.cartpole import Cartpole
from tests.distributed.ranks import free_port, on_ranks

SMALL = SkrlSettings(rollouts=4, learning_epochs=2, mini_batches=2, layers=(8,))
# Six steps, so that some episodes are cut in every second iteration.
SHORT = Cartpole(episode_seconds=0.1)
WORLDS, SEED = 8, 3


@pytest.fixture(scope="module", autouse=True)
def compiled_before(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What one test, or a process that it starts, has compiled, the others need not: that is most of their time."""
    words = {"jax_compilation_cache_dir": str(tmp_path_factory.mktemp("jax"))}
    words |= {"jax_persistent_cache_min_compile_time_secs": "0", "jax_persistent_cache_min_entry_size_bytes": "-1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in words.items():
            patch.setenv(name.upper(), value)
            jax.config.update(name, value if name.endswith("dir") else int(value))
        yield
    jax.config.update("jax_compilation_cache_dir", None)


class Taped(RobotEnv):
    """Keeps what it hands out."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.tape: list[Step] = []

    def step(self, actions: Tensor) -> Step:
        self.tape.append(super().step(actions))
        return self.tape[-1]


class Seeing(Cartpole):
    """Its critic sees more than its policy."""

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        obs = super().observe(state)["policy"]
        return {"policy": obs[:, 1:], "critic": torch.cat((obs, obs.square()), dim=1)}


def make(config: SkrlSettings = SMALL, task: Cartpole = SHORT, group: Group | None = None) -> SkrlJax:
    group = group or Group(Rank())
    worlds = shard_ranges(WORLDS + group.size - 1, group.size)[group.rank.index]
    env = Taped(task, len(worlds), seed=SEED, first_env=worlds.start)
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


def tape(learner: SkrlJax) -> list[Step]:
    assert isinstance(learner.env, Taped)
    return learner.env.tape


def test_a_tensor_and_its_array_are_the_same_memory():
    tensor, device = torch.randn(5, 3), jax_device(torch.device("cpu"))
    array = to_jax(tensor, device)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr() == to_torch(array).data_ptr()
    flags = torch.tensor([True, False, True])
    assert to_jax(flags, device).dtype == np.int8
    part = tensor[:, 1:]
    np.testing.assert_array_equal(np.asarray(to_jax(part, device)), part.numpy())


def test_a_tree_of_another_shape_is_refused():
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


def test_a_checkpoint_goes_on_bit_by_bit(tmp_path: Path):
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
    # Adam's own count, of the latest step: stock saves that of the first.
    assert found["optimizer policy 1/count"] == 6 * SMALL.learning_epochs * SMALL.mini_batches


def test_the_torch_policy_is_the_jax_policy_with_its_scaler():
    learner = make()
    for _ in range(2):
        learner.learn()
    # Far out the scaler clips.
    obs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)) * 20.0
    agent = learner._agent
    rows = agent._observation_preprocessor(to_jax(obs, learner._device))
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
    # At a rate so small that the critic stays what it was.
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
    steps, agent = tape(learner), learner._agent
    truncated = torch.stack([step.truncated for step in steps])
    terminated = torch.stack([step.terminated for step in steps])
    assert truncated.any()
    final = torch.stack([step.final_obs["policy"] for step in steps])
    beyond, _ = agent.value.act({"observations": to_jax(final, learner._device), "states": None}, role="value")
    expected = 0.5 * torch.stack([step.reward for step in steps])
    if bootstrap:
        expected += frozen.discount_factor * to_torch(beyond).squeeze(-1) * truncated
    stored = {name: to_torch(agent.memory.tensors[name]).squeeze(-1) for name in ("rewards", "terminated")}
    torch.testing.assert_close(stored["rewards"], expected)
    assert torch.equal(stored["terminated"].bool(), terminated if bootstrap else terminated | truncated)


def test_the_critic_sees_its_own_observations():
    learner = make(task=Seeing(episode_seconds=0.1))
    learner.learn()
    state = learner.state()
    assert state["networks"]["policy"]["params/Dense_0/kernel"].shape[0] == 3
    assert state["networks"]["value"]["params/Dense_0/kernel"].shape[0] == 8
    seen = torch.stack([step.obs["critic"] for step in tape(learner)[:-1]])
    stored = to_torch(learner._agent.memory.tensors["states"])
    assert torch.equal(stored[1:], seen)
    assert state["normalizers"]["state"]["running_mean"].shape == (8,)


def test_a_fixed_learning_rate_stays_and_the_divergence_is_still_told():
    learner = make(dataclasses.replace(SMALL, learning_rate_scheduler="none", learning_rate=0.05))
    values = learner.learn()
    assert values["policy/learning_rate"] == pytest.approx(0.05)
    assert values["policy/kl"] > 0.0


def learn_as_rank() -> dict[str, Any]:
    """On ranks of unequal size, in a process where a launcher's variables are set."""
    import skrl

    torch.set_num_threads(1)
    group = Group(this_rank(()))
    learner = make(group=group)
    agent = learner._agent
    learner.learn()
    found = {
        "alone": (jax.process_count(), skrl.config.jax.world_size, skrl.config.torch.world_size),
        "rank": os.environ["RANK"],
        "advantages": to_torch(agent.memory.tensors["advantages"]).flatten().clone(),
        "obs": to_torch(agent.memory.tensors["observations"]).flatten(0, 1).clone(),
        "count": agent.scalers["observation"].current_count.item(),
        "mean": to_torch(agent.scalers["observation"].running_mean).clone(),
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
    found |= {"values": values[-1], "worlds": learner.env.num_envs}
    found["common"] = leaves({key: part for key, part in learner.state().items() if key != "envs"})
    group.close()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    found = on_ranks(2, learn_as_rank)
    assert [rank["worlds"] for rank in found] == [5, 4]
    return found


def test_all_ranks_hold_the_same_and_skrl_thinks_it_is_alone(ranks: list[dict[str, Any]]):
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
    # Stock starts from one row of zeros.
    expected = obs.sum(0) / (len(obs) + 1)
    for rank in ranks:
        assert rank["count"] == len(obs) + 1
        torch.testing.assert_close(rank["mean"], expected)


def test_a_step_takes_the_mean_gradient_over_all_samples(ranks: list[dict[str, Any]]):
    worlds = [rank["worlds"] for rank in ranks]
    expected = 1e-3 * (worlds[0] * 1.0 + worlds[1] * 2.0) / sum(worlds)
    for rank in ranks:
        for name in ("policy gradient", "value gradient"):
            torch.testing.assert_close(rank[name], torch.full_like(rank[name], expected), rtol=1e-3, atol=1e-6)


def test_a_minibatch_takes_one_sum_over_ranks(ranks: list[dict[str, Any]]):
    minibatches, epochs = SMALL.mini_batches, SMALL.learning_epochs
    # Beside it: statistics of values, returns and advantages, of all observations once, and each epoch's divergence.
    assert ranks[0]["collectives"] == minibatches * epochs + 3 + minibatches + epochs


def test_skrls_own_launcher_starts_the_ranks(tmp_path: Path):
    program = Path(sys.executable).parent / "paceline"
    words = ["--learner", "skrl", "--ml_framework", "jax", "--distributed", "--gpu-ids", "none", "--run-dir", "run"]
    words += ["--num-envs", "6", "--max-iterations", "2", "--skrl.rollouts", "4", "--skrl.layers", "8"]
    launcher = [sys.executable, "-m", "skrl.utils.distributed.jax", "--nnodes=1", "--nproc_per_node=2"]
    place = f"--coordinator_address=127.0.0.1:{free_port()}"
    command = [*launcher, place, str(program), "train", "cartpole", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    # The launcher returns 0 whatever happens.
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["world_size"], result["total_envs"]) == ("completed", 2, 12), done.stderr
    assert result["iterations"] == 2
    assert done.stdout.count("completed after 2 iterations") == 1
    assert done.stderr == ""


def test_torchs_variables_win_over_those_of_skrls_launcher(monkeypatch: pytest.MonkeyPatch):
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
