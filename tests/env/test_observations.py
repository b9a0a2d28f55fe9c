"""What the policy sees late, and side by side; by the clock that each observation carries."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from paceline.distributed.sharding import concatenate, shard
from paceline.env.robot_env import RobotEnv
from paceline.env.task import Senses, Worlds
from paceline.env.vec_env import Step
from paceline.errors import UserError
from paceline.export import export
from paceline.learners.ppo.settings import PpoSettings
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.tensors import random as draw
from paceline.train import train
from tests.env.lively import Lively
from tests.env.refuse_syncs import run_refusing_syncs

SEED = 4
WORLDS = 32
LATE, SLIGHTLY_LATE = Senses(history=3, delay=(0, 2)), Senses(history=2, delay=(0, 1))


@dataclass(frozen=True)
class Clock(Lively):
    """The policy sees which episode it is and how many steps it is old; the critic sees that of the present."""

    senses: Senses = LATE

    def observe(self, worlds: Worlds) -> dict[str, Tensor]:
        now = torch.cat((worlds.memory["level"][:, :1], worlds.memory["steps"]), dim=1)
        return {"policy": now, "critic": now, "place": worlds.qpos}


def run(env: RobotEnv, steps: int) -> list[Step]:
    return [env.step(torch.zeros(env.num_envs, 1)) for _ in range(steps)]


def ages(policy: Tensor, history: int = 3) -> Tensor:
    """The steps that were seen, [world, history]."""
    return policy.view(len(policy), history, 2)[..., 1]


def expected(step: int, delay: Tensor, history: int = 3) -> Tensor:
    """Of an episode at its `step`, newest last."""
    back = torch.arange(history - 1, -1, -1)
    return (step - delay[:, None] - back).clamp(min=0).float()


def delays(env: RobotEnv) -> Tensor:
    return env.state()["senses/delay"]


@pytest.mark.parametrize("history", [1, 3])
@pytest.mark.parametrize("delay", [(0, 0), (0, 2), (2, 2), (1, 3)])
def test_each_observation_is_as_old_as_its_world_is_late(history: int, delay: tuple[int, int]):
    env = RobotEnv(Clock(senses=Senses(history, delay)), WORLDS, seed=SEED)
    obs = env.reset()
    late = delays(env) if (history, delay) != (1, (0, 0)) else torch.zeros(WORLDS)
    assert torch.equal(ages(obs["policy"], history), expected(0, late, history))
    for i, step in enumerate(run(env, 9), start=1):
        assert torch.equal(ages(step.obs["policy"], history), expected(i, late, history))
        assert torch.equal(step.obs["critic"][:, 1], torch.full((WORLDS,), float(i)))


def test_a_new_episode_sees_nothing_of_the_one_before():
    env = RobotEnv(Clock(), WORLDS, seed=SEED)
    env.reset()
    for i in range(1, 36):
        step = run(env, 1)[0]
        level = step.obs["policy"].view(WORLDS, 3, 2)[..., 0]
        assert torch.equal(level, step.obs["critic"][:, :1].expand(-1, 3))
        assert torch.equal(ages(step.obs["policy"]), expected(i % 10, delays(env)))


def test_worlds_that_end_begin_anew_while_the_others_go_on():
    env = RobotEnv(Clock(), WORLDS, seed=SEED)
    env.reset()
    run(env, 4)
    state = env.state()
    state["episode_step"][::2] = env.max_episode_steps - 1
    env.load_state(state)
    late = delays(env)
    step = run(env, 1)[0]
    assert step.truncated[::2].all()
    assert (ages(step.obs["policy"])[::2] == 0.0).all()
    assert torch.equal(ages(step.obs["policy"])[1::2], expected(5, late)[1::2])
    assert torch.equal(delays(env)[1::2], late[1::2])


def test_the_last_observations_of_an_episode_are_as_late_as_the_others():
    env = RobotEnv(Clock(), WORLDS, seed=SEED)
    env.reset()
    for i in range(20):
        late = delays(env)
        final = run(env, 1)[0].final_obs
        assert torch.equal(ages(final["policy"]), expected(i % 10 + 1, late))
        assert (final["critic"][:, 1] == i % 10 + 1).all()


def test_every_delay_comes_up_and_is_drawn_anew_in_each_episode():
    env = RobotEnv(Clock(senses=Senses(delay=(1, 3))), 3000, seed=SEED)
    env.reset()
    first = delays(env)
    run(env, 9)
    assert torch.equal(delays(env), first)
    run(env, 1)
    second = delays(env)
    for late in (first, second):
        assert late.bincount().tolist() == pytest.approx([0, 1000, 1000, 1000], abs=100)
    # A third of the worlds would have the same by chance.
    assert (first == second).float().mean().item() == pytest.approx(1 / 3, abs=0.05)


def test_a_delay_is_a_function_of_seed_world_and_step():
    env = RobotEnv(Clock(), WORLDS, seed=SEED)
    env.reset()
    run(env, 9)
    number = draw.uniform(SEED, torch.arange(WORLDS), env._steps, draw.Stream.DELAY, 1)[:, 0]
    run(env, 1)
    assert torch.equal(delays(env), (3 * number).floor().long())


def test_an_env_that_is_stepped_without_a_reset_has_a_first_observation_too():
    env = RobotEnv(Clock(), WORLDS, seed=SEED)
    seen = run(env, 1)[0].obs["policy"].view(WORLDS, 3, 2)
    # An episode's first observation is of a level above zero, which is what memory holds before it.
    assert (seen[..., 0] == 1.0).all()
    assert torch.equal(seen[..., 1], expected(1, delays(env)))


def test_a_reset_in_between_forgets_what_was_seen():
    env = RobotEnv(Clock(), WORLDS, seed=SEED)
    run(env, 5)
    obs = env.reset()
    assert (ages(obs["policy"]) == 0.0).all()
    assert torch.equal(obs["policy"].view(WORLDS, 3, 2)[..., 0], obs["critic"][:, :1].expand(-1, 3))


def same(steps: list[Step], others: list[Step], worlds: slice = slice(None)) -> bool:
    return len(steps) == len(others) and all(
        torch.equal(getattr(one, groups)[name][worlds], getattr(other, groups)[name])
        for one, other in zip(steps, others, strict=True)
        for groups in ("obs", "final_obs")
        for name in one.obs
    )


@pytest.mark.parametrize("after", [1, 7, 10, 13])
def test_a_loaded_state_goes_on_bit_by_bit(after: int):
    env, heir = RobotEnv(Clock(), 6, seed=SEED), RobotEnv(Clock(), 6, seed=SEED)
    run(env, after)
    saved = env.state()
    run(heir, 4)
    heir.load_state(saved)
    assert same(run(env, 25), run(heir, 25))


def test_worlds_are_the_same_however_they_are_spread_over_ranks():
    whole = RobotEnv(Clock(), 6, seed=SEED)
    shards = [RobotEnv(Clock(), 3, seed=SEED, first_env=first) for first in (0, 3)]
    steps = run(whole, 13)
    for part in shards:
        worlds = slice(part.first_env, part.first_env + 3)
        assert same(steps, run(part, 13), worlds)
    # And spread anew: two ranks' state goes on as three.
    state = concatenate([part.state() for part in shards])
    steps = run(whole, 13)
    for first in (0, 2, 4):
        part = RobotEnv(Clock(), 2, seed=SEED, first_env=first)
        part.load_state(shard(state, range(first, first + 2)))
        assert same(steps, run(part, 13), slice(first, first + 2))


def test_prefetching_changes_nothing():
    plain, ahead = RobotEnv(Clock(), 6, seed=SEED), RobotEnv(Clock(), 6, seed=SEED)
    steps = []
    for _ in range(4):
        ahead.prefetch_random(8)
        steps += run(ahead, 7)
    assert same(steps, run(plain, 28))


def test_what_a_step_returned_is_never_written_to_again():
    for senses in (Senses(2), Senses(1, (1, 1)), Senses(2, (0, 1))):
        env = RobotEnv(Clock(senses=senses), 4)
        kept = [env.reset(), *(groups for step in run(env, 12) for groups in (step.obs, step.final_obs))]
        copies = [obs["policy"].clone() for obs in kept]
        run(env, 12)
        assert all(torch.equal(obs["policy"], copy) for obs, copy in zip(kept, copies, strict=True))


def test_a_world_that_blows_up_leaves_nothing_behind():
    env = RobotEnv(Sighted(), 4, seed=SEED)
    env.reset()
    run(env, 3)
    state = env.state()
    state["sim/qpos"][1] = torch.nan
    env.load_state(state)
    step = run(env, 1)[0]
    assert step.terminated.tolist() == [False, True, False, False]
    assert (step.final_obs["policy"][1] == 0.0).all()
    for later in (step, *run(env, 5)):
        assert torch.isfinite(later.obs["policy"]).all()


@dataclass(frozen=True)
class Sighted(Lively):
    """Nothing but the policy's group."""

    senses: Senses = SLIGHTLY_LATE


def test_without_a_group_of_its_own_the_critic_has_the_policys():
    env = RobotEnv(Sighted(), 4)
    assert {name: tuple(obs.shape) for name, obs in env.reset().items()} == {"policy": (4, 12)}


def test_pictures_are_stacked_by_channel():
    @dataclass(frozen=True)
    class Picture(Clock):
        def observe(self, worlds: Worlds) -> dict[str, Tensor]:
            steps = worlds.memory["steps"].to(torch.uint8)
            return {"policy": torch.stack((steps, steps + 100), dim=1)[..., None].expand(-1, -1, 5, 4)}

    env = RobotEnv(Picture(), WORLDS, seed=SEED)
    env.reset()
    seen = run(env, 6)[-1].obs["policy"]
    assert seen.shape == (WORLDS, 6, 5, 4)
    assert seen.dtype == torch.uint8
    assert torch.equal(seen[:, ::2, 2, 2].float(), expected(6, delays(env)))
    assert torch.equal(seen[:, 1::2, 2, 2].float(), expected(6, delays(env)) + 100)


def test_senses_that_change_nothing_keep_nothing():
    plain, default = RobotEnv(Lively(), 4), RobotEnv(replace(Sighted(), senses=Senses()), 4)
    assert plain.state().keys() == default.state().keys()
    assert same(run(plain, 12), run(default, 12))


def test_it_can_be_captured():
    happened = run_refusing_syncs(Sighted(wall=0.05))
    assert happened.terminated >= 1
    assert happened.truncated >= 1


@pytest.fixture
def compiles_afresh() -> Iterator[None]:
    """A function is compiled for a few envs only in one process, and those of other tests count."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("compiles_afresh")
def test_the_stretches_are_graphs_and_compute_the_same():
    plain, fused = (RobotEnv(Clock(), 5, seed=SEED) for _ in range(2))
    for stretch in ("_apply", "_judge", "_observe"):
        work = getattr(fused, stretch)
        setattr(fused, stretch, torch.compile(work, fullgraph=True, dynamic=False, backend="aot_eager"))
    assert torch.equal(plain.reset()["policy"], fused.reset()["policy"])
    assert same(run(plain, 13), run(fused, 13))


@pytest.mark.parametrize(
    ("history", "delay", "said"),
    [
        (0, (0, 0), "history 0 must be at least 1"),
        (-1, (0, 0), "history -1 must be at least 1"),
        (1, (2, 1), r"delay \(2, 1\) must be the fewest and the most control steps"),
        (1, (-1, 1), r"delay \(-1, 1\)"),
        (1, (1,), r"delay \(1,\)"),
        (1, (0, 1.5), r"delay \(0, 1.5\)"),
    ],
)
def test_senses_that_cannot_be_are_refused(history: int, delay: Any, said: str):
    with pytest.raises(UserError, match=said):
        Senses(history, delay)


@pytest.mark.parametrize("senses", [Senses(), Senses(history=2), Senses(delay=(0, 4))])
def test_a_state_of_other_senses_is_refused(senses: Senses):
    env = RobotEnv(Clock(), WORLDS)
    with pytest.raises(UserError, match="resume with the history and the delay that the run has"):
        env.load_state(RobotEnv(Clock(senses=senses), WORLDS).state())


def test_an_exported_policy_takes_the_stacked_observations(tmp_path: Path):
    settings = PpoSettings(horizon=4, epochs=1, minibatches=2, hidden=(8,))
    options = {"history": 3, "delay": (0, 2)}
    config = TrainConfig("go1-velocity", options, settings=asdict(settings), num_envs=4, max_iterations=1)
    train(config, RunDir(tmp_path / "run"), Console(quiet=True))
    file = export(str(tmp_path / "run"), "torchscript", None)
    assert torch.jit.load(file)(torch.zeros(2, 3 * 48)).shape == (2, 12)
