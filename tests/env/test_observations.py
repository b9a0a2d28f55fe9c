"""History and delay of observations, checked by a clock that each observation contains."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from paceline.distributed.sharding import concatenate
from paceline.env.guarded_task import run_guarded
from paceline.env.robot_env import RobotEnv
from paceline.env.task import EnvState
from paceline.env.vec_env import Step
from paceline.errors import UserError
from paceline.export import export
from paceline.learners.ppo.settings import PpoSettings
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.tensors import random
from paceline.train import train
from tests.env.lively import Lively
from tests.states import states_of

SEED = 4
NUM_ENVS = 32


@dataclass(frozen=True)
class Clock(Lively):
    """The policy observes the number of its episode and the step in it; the critic observes them without delay."""

    observation_history: int = 3
    observation_delay: tuple[int, int] = (0, 2)

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        now = torch.cat((state.task_state["level"][:, :1], state.task_state["steps"]), dim=1)
        return {"policy": now, "critic": now, "place": state.qpos}


def run(env: RobotEnv, steps: int) -> list[Step]:
    return [env.step(torch.zeros(env.num_envs, 1)) for _ in range(steps)]


def ages(policy: Tensor, history: int = 3) -> Tensor:
    """Return the observed steps, [env, history]."""
    return policy.view(len(policy), history, 2)[..., 1]


def expected(step: int, delay: Tensor, history: int = 3) -> Tensor:
    """Return the steps that an env observes at `step` of its episode, newest last."""
    back = torch.arange(history - 1, -1, -1)
    return (step - delay[:, None] - back).clamp(min=0).float()


def delays(env: RobotEnv) -> Tensor:
    return env.state()["observation_history/delay"]


@pytest.mark.parametrize("history", [1, 3])
@pytest.mark.parametrize("delay", [(0, 0), (0, 2), (2, 2), (1, 3)])
def test_each_observation_is_delayed_as_its_env(history: int, delay: tuple[int, int]):
    env = RobotEnv(Clock(observation_history=history, observation_delay=delay), NUM_ENVS, seed=SEED)
    obs = env.reset()
    late = delays(env) if (history, delay) != (1, (0, 0)) else torch.zeros(NUM_ENVS)
    assert torch.equal(ages(obs["policy"], history), expected(0, late, history))
    for i, step in enumerate(run(env, 9), start=1):
        assert torch.equal(ages(step.obs["policy"], history), expected(i, late, history))
        assert torch.equal(step.obs["critic"][:, 1], torch.full((NUM_ENVS,), float(i)))


def test_a_new_episode_has_no_observations_of_the_one_before():
    env = RobotEnv(Clock(), NUM_ENVS, seed=SEED)
    env.reset()
    for i in range(1, 36):
        step = run(env, 1)[0]
        level = step.obs["policy"].view(NUM_ENVS, 3, 2)[..., 0]
        assert torch.equal(level, step.obs["critic"][:, :1].expand(-1, 3))
        assert torch.equal(ages(step.obs["policy"]), expected(i % 10, delays(env)))


def test_envs_whose_episode_ended_restart_their_history_and_the_others_keep_it():
    env = RobotEnv(Clock(), NUM_ENVS, seed=SEED)
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


def test_final_observations_have_the_same_delay():
    env = RobotEnv(Clock(), NUM_ENVS, seed=SEED)
    env.reset()
    for i in range(20):
        late = delays(env)
        final = run(env, 1)[0].final_obs
        assert torch.equal(ages(final["policy"]), expected(i % 10 + 1, late))
        assert (final["critic"][:, 1] == i % 10 + 1).all()


def test_every_delay_occurs_and_is_sampled_in_each_episode():
    env = RobotEnv(Clock(observation_history=1, observation_delay=(1, 3)), 3000, seed=SEED)
    env.reset()
    first = delays(env)
    run(env, 9)
    assert torch.equal(delays(env), first)
    run(env, 1)
    second = delays(env)
    for late in (first, second):
        assert late.bincount().tolist() == pytest.approx([0, 1000, 1000, 1000], abs=100)
    # A third of the envs has the same delay by chance.
    assert (first == second).float().mean().item() == pytest.approx(1 / 3, abs=0.05)


def test_a_delay_is_a_function_of_seed_env_and_step():
    env = RobotEnv(Clock(), NUM_ENVS, seed=SEED)
    env.reset()
    run(env, 9)
    number = random.uniform(SEED, torch.arange(NUM_ENVS), env.state()["steps"], random.Stream.DELAY, 1)[:, 0]
    run(env, 1)
    assert torch.equal(delays(env), (3 * number).floor().long())


def test_an_env_that_is_stepped_without_a_reset_has_a_first_observation():
    env = RobotEnv(Clock(), NUM_ENVS, seed=SEED)
    seen = run(env, 1)[0].obs["policy"].view(NUM_ENVS, 3, 2)
    # The level is above zero from the first observation of the first episode on.
    assert (seen[..., 0] == 1.0).all()
    assert torch.equal(seen[..., 1], expected(1, delays(env)))


def test_a_reset_clears_the_history():
    env = RobotEnv(Clock(), NUM_ENVS, seed=SEED)
    run(env, 5)
    obs = env.reset()
    assert (ages(obs["policy"]) == 0.0).all()
    assert torch.equal(obs["policy"].view(NUM_ENVS, 3, 2)[..., 0], obs["critic"][:, :1].expand(-1, 3))


def same(steps: list[Step], others: list[Step], envs: slice = slice(None)) -> bool:
    return len(steps) == len(others) and all(
        torch.equal(getattr(one, groups)[name][envs], getattr(other, groups)[name])
        for one, other in zip(steps, others, strict=True)
        for groups in ("obs", "final_obs")
        for name in one.obs
    )


@pytest.mark.parametrize("after", [1, 7, 10, 13])
def test_a_loaded_state_continues_bit_by_bit(after: int):
    env, restored = RobotEnv(Clock(), 6, seed=SEED), RobotEnv(Clock(), 6, seed=SEED)
    run(env, after)
    saved = env.state()
    run(restored, 4)
    restored.load_state(saved)
    assert same(run(env, 25), run(restored, 25))


def test_envs_are_the_same_for_any_number_of_ranks():
    whole = RobotEnv(Clock(), 6, seed=SEED)
    shards = [RobotEnv(Clock(), 3, seed=SEED, first_env=first) for first in (0, 3)]
    steps = run(whole, 13)
    for part in shards:
        envs = slice(part.first_env, part.first_env + 3)
        assert same(steps, run(part, 13), envs)
    # The state of two ranks continues on three.
    state = concatenate([part.state() for part in shards])
    steps = run(whole, 13)
    for first in (0, 2, 4):
        part = RobotEnv(Clock(), 2, seed=SEED, first_env=first)
        part.load_state(states_of(range(first, first + 2), state))
        assert same(steps, run(part, 13), slice(first, first + 2))


def test_prefetching_changes_nothing():
    plain, ahead = RobotEnv(Clock(), 6, seed=SEED), RobotEnv(Clock(), 6, seed=SEED)
    steps = []
    for _ in range(4):
        ahead.prefetch_random(8)
        steps += run(ahead, 7)
    assert same(steps, run(plain, 28))


def test_what_a_step_returned_is_never_written_to_again():
    for history, delay in ((2, (0, 0)), (1, (1, 1)), (2, (0, 1))):
        env = RobotEnv(Clock(observation_history=history, observation_delay=delay), 4)
        kept = [env.reset(), *(groups for step in run(env, 12) for groups in (step.obs, step.final_obs))]
        copies = [obs["policy"].clone() for obs in kept]
        run(env, 12)
        assert all(torch.equal(obs["policy"], copy) for obs, copy in zip(kept, copies, strict=True))


def test_an_env_that_fails_leaves_no_non_finite_observation():
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
    """Has only the group "policy"."""

    observation_history: int = 2
    observation_delay: tuple[int, int] = (0, 1)


def test_without_a_critic_group_only_the_policy_group_exists():
    env = RobotEnv(Sighted(), 4)
    assert {name: tuple(obs.shape) for name, obs in env.reset().items()} == {"policy": (4, 12)}


def test_images_are_stacked_by_channel():
    @dataclass(frozen=True)
    class Image(Clock):
        def observe(self, state: EnvState) -> dict[str, Tensor]:
            steps = state.task_state["steps"].to(torch.uint8)
            return {"policy": torch.stack((steps, steps + 100), dim=1)[..., None].expand(-1, -1, 5, 4)}

    env = RobotEnv(Image(), NUM_ENVS, seed=SEED)
    env.reset()
    seen = run(env, 6)[-1].obs["policy"]
    assert seen.shape == (NUM_ENVS, 6, 5, 4)
    assert seen.dtype == torch.uint8
    assert torch.equal(seen[:, ::2, 2, 2].float(), expected(6, delays(env)))
    assert torch.equal(seen[:, 1::2, 2, 2].float(), expected(6, delays(env)) + 100)


def test_without_history_and_delay_nothing_is_stored():
    plain, default = RobotEnv(Lively(), 4), RobotEnv(Sighted(observation_history=1, observation_delay=(0, 0)), 4)
    assert plain.state().keys() == default.state().keys()
    assert same(run(plain, 12), run(default, 12))


def test_history_and_delay_can_be_captured():
    run = run_guarded(Sighted(wall=0.05))
    assert (run.guard.syncs, run.guard.contract, run.is_finite) == ([], [], True)
    assert run.terminated >= 1
    assert run.truncated >= 1


@pytest.fixture
def clear_compiled_functions() -> Iterator[None]:
    """Clear the compiled functions: their number per process is limited, and other tests compile too."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("clear_compiled_functions")
def test_the_fused_functions_are_graphs_and_compute_the_same(monkeypatch: pytest.MonkeyPatch):
    def fuse(work: Any, device: torch.device) -> Any:
        return torch.compile(work, fullgraph=True, dynamic=False, backend="aot_eager")

    plain = RobotEnv(Clock(), 5, seed=SEED)
    monkeypatch.setattr("paceline.tensors.graph.fuse", fuse)
    fused = RobotEnv(Clock(), 5, seed=SEED)
    assert torch.equal(plain.reset()["policy"], fused.reset()["policy"])
    assert same(run(plain, 13), run(fused, 13))


@pytest.mark.parametrize(
    ("history", "delay", "message"),
    [
        (0, (0, 0), "'observation_history' is 0, but must be a whole number from 1 to 1000"),
        (-1, (0, 0), "'observation_history' is -1, but must be a whole number from 1 to 1000"),
        (1, (2, 1), r"'observation_delay' is \(2, 1\), but must be the minimum and the maximum in control steps"),
        (1, (-1, 1), r"'observation_delay' is \(-1, 1\)"),
        (1, (1,), r"'observation_delay' is \(1,\)"),
        (1, (0, 1.5), r"'observation_delay' is \(0, 1.5\)"),
    ],
)
def test_an_invalid_history_or_delay_is_refused(history: int, delay: Any, message: str):
    with pytest.raises(UserError, match=message):
        RobotEnv(Clock(observation_history=history, observation_delay=delay), 1)


@pytest.mark.parametrize(("history", "delay"), [(1, (0, 0)), (2, (0, 0)), (1, (0, 4))])
def test_a_state_with_another_history_or_delay_is_refused(history: int, delay: tuple[int, int]):
    env = RobotEnv(Clock(), NUM_ENVS)
    with pytest.raises(UserError, match="resume with the history and the delay that the run has"):
        env.load_state(RobotEnv(Clock(observation_history=history, observation_delay=delay), NUM_ENVS).state())


def test_an_exported_policy_takes_the_stacked_observations(tmp_path: Path):
    settings = PpoSettings(horizon=4, epochs=1, minibatches=2, hidden=(8,))
    options = {"history": 3, "delay": (0, 2)}
    config = TrainConfig("go1-velocity", options, settings=asdict(settings), num_envs=4, max_iterations=1)
    train(config, RunDir(tmp_path / "run"), Console(quiet=True))
    file = export(str(tmp_path / "run"), "torchscript", None)
    assert torch.jit.load(file)(torch.zeros(2, 3 * 48)).shape == (2, 12)
