"""Task state, pushes, metrics and randomization, on the C engine."""

import dataclasses
import math
import operator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.env.guarded_task import run_guarded
from paceline.env.randomization import INDEPENDENT_FIELDS, Randomization
from paceline.env.robot_env import RobotEnv
from paceline.env.task import EnvState, ResetState, Task
from paceline.env.vec_env import Step
from paceline.errors import UserError
from paceline.tasks.velocity.go1_velocity import Go1Velocity
from paceline.tensors import random
from tests.env.drift import Drift
from tests.env.lively import Lively

COMMAND, LEVEL, STEPS = 2, slice(3, 5), 5
SEED = 4


def run(env: RobotEnv, steps: int) -> list[Step]:
    return [env.step(torch.zeros(env.num_envs, 1)) for _ in range(steps)]


def test_task_state_is_updated_in_each_step_and_reset_with_each_episode():
    env = RobotEnv(Lively(), 3)
    assert (env.reset()["policy"][:, STEPS] == 0).all()
    steps = run(env, 25)
    assert [int(step.final_obs["policy"][0, STEPS]) for step in steps] == [*range(1, 11)] * 2 + [*range(1, 6)]
    assert [int(step.obs["policy"][0, STEPS]) for step in steps[:11]] == [*range(1, 10), 0, 1]


def test_an_entry_that_reset_leaves_out_keeps_its_value():
    env = RobotEnv(Lively(), 3)
    first = env.reset()["policy"][:, LEVEL]
    levels = [step.obs["policy"][0, LEVEL].tolist() for step in run(env, 25)]
    start = first[0, 0].item()
    assert levels == [[start + i // 10] * 2 for i in range(1, 26)]


def test_samples_of_update_state_are_a_function_of_seed_env_and_step():
    env = RobotEnv(Lively(), 4, seed=SEED)
    commands = torch.stack([step.final_obs["policy"][:, COMMAND] for step in run(env, 4)])
    expected = random.uniform(SEED, torch.arange(4), env.state()["steps"] - 2, random.Stream.STEP, 1)[:, 0]
    assert (commands[:2] == 0).all()
    assert torch.equal(commands[2], expected)
    assert torch.equal(commands[3], expected)


def test_a_push_changes_the_velocity_only_at_its_time():
    task = dataclasses.replace(Lively(), fields=())
    speeds = torch.stack([step.obs["policy"][:, 1] for step in run(RobotEnv(task, 3), 9)])
    changes = speeds.diff(dim=0)
    assert (changes[3] == -1.0).all()
    assert (changes[torch.arange(len(changes)) != 3] == 0.0).all()


def test_a_metric_is_logged_as_the_mean_over_the_episode():
    task = dataclasses.replace(Lively(), fields=())
    env = RobotEnv(task, 3)
    assert env.log_names[-2:] == ("measure/speed", "measure/age")
    last = run(env, 10)[-1]
    assert last.truncated.all()
    # Steps 1 to 10.
    torch.testing.assert_close(last.log[:, -1], torch.full((3,), 5.5))
    assert run(env, 1)[0].log[0, -1] == 1.0


def field(env: RobotEnv, name: str) -> Tensor:
    return env.sim.field(name).clone()


def test_each_env_has_its_own_samples_within_the_bounds():
    env = RobotEnv(Lively(), 64)
    mass, armature = field(env, "body_mass")[:, 1], field(env, "dof_armature")[:, 0]
    assert (field(env, "body_mass")[:, 0] == 0.0).all()
    assert ((mass >= 1.0) & (mass < 2.0)).all()
    assert ((armature >= 0.5) & (armature < 1.0)).all()
    assert len(mass.unique()) == len(armature.unique()) == 64
    assert mass.std() > 0.2


def test_randomized_fields_change_the_physics():
    env = RobotEnv(dataclasses.replace(Lively(), decimation=1), 16)
    before = env.sim.qvel.clone()
    env.step(torch.ones(16, 1))
    inertia = field(env, "body_mass")[:, 1] + field(env, "dof_armature")[:, 0]
    damping = field(env, "dof_damping")[:, 0]
    # One implicit step of 0.01 s under a force of 1 N.
    expected = (before[:, 0] * inertia + 0.01) / (inertia + 0.01 * damping)
    torch.testing.assert_close(env.sim.qvel[:, 0], expected, rtol=1e-5, atol=1e-6)


def test_fields_are_sampled_once_or_at_every_reset():
    env = RobotEnv(Lively(), 8)
    mass, armature = field(env, "body_mass"), field(env, "dof_armature")
    run(env, 9)
    assert torch.equal(field(env, "dof_armature"), armature)
    run(env, 1)
    assert torch.equal(field(env, "body_mass"), mass)
    assert (field(env, "dof_armature") != armature).all()


def test_an_interval_samples_a_field_within_the_episode():
    env = RobotEnv(Lively(), 8)
    seen = [field(env, "dof_damping")]
    for _ in range(9):
        run(env, 1)
        seen.append(field(env, "dof_damping"))
    # Every 0.12 s, which is three control steps.
    changed = [not torch.equal(a, b) for a, b in pairwise(seen)]
    assert changed == [False, False, True] * 3


@pytest.mark.parametrize("after", [7, 13])
def test_a_loaded_state_continues_bit_by_bit(after: int):
    env = RobotEnv(Lively(), 5, seed=SEED)
    run(env, after)
    saved = env.state()
    rest = run(env, 12)
    restored = RobotEnv(Lively(), 5, seed=SEED)
    run(restored, 3)
    restored.load_state(saved)
    for one, other in zip(rest, run(restored, 12), strict=True):
        assert torch.equal(one.obs["policy"], other.obs["policy"])
        assert torch.equal(one.log, other.log)


def test_envs_on_another_rank_are_the_same():
    whole, part = RobotEnv(Lively(), 6, seed=SEED), RobotEnv(Lively(), 2, seed=SEED, first_env=3)
    for one, other in zip(run(whole, 25), run(part, 25), strict=True):
        assert torch.equal(one.obs["policy"][3:5], other.obs["policy"])


@dataclass(frozen=True)
class Odometer(Drift):
    """Adds up where the block was, over all episodes."""

    num_step_samples: int = 0

    def state_spec(self) -> dict[str, int]:
        return {"total": 1, "largest": 1, "level": 1}

    def update_state(self, state: EnvState, uniform: Tensor) -> dict[str, Tensor]:
        task_state = state.task_state
        return {"total": task_state["total"] + state.qpos, "largest": torch.maximum(task_state["largest"], state.qpos)}

    def reset(self, state: EnvState, uniform: Tensor) -> ResetState:
        # `total` is left out, and the others depend on their last values.
        task_state = {name: state.task_state[name] + 1.0 for name in ("largest", "level")}
        return super().reset(state, uniform)._replace(task_state=task_state)


def test_task_state_is_finite_after_an_env_failed():
    env, healthy = RobotEnv(Odometer(), 3), RobotEnv(Odometer(), 3)
    for each in (env, healthy):
        run(each, 3)
    state = env.state()
    state["sim/qpos"][1] = torch.nan
    env.load_state(state)
    for each in (env, healthy):
        assert each.step(torch.zeros(3, 1)).terminated.tolist() == [False, each is env, False]
    task_state = env.env_state.task_state
    assert [task_state[name][1, 0].item() for name in ("total", "largest")] == [0.0, 1.0]
    assert task_state["level"][1, 0] == healthy.env_state.task_state["level"][1, 0] + 1.0
    for name, part in task_state.items():
        assert torch.equal(part[[0, 2]], healthy.env_state.task_state[name][[0, 2]])
    run(env, 30)
    assert all(part.isfinite().all() for part in task_state.values())


@dataclass(frozen=True)
class Commanded(Lively):
    """Samples the command after every step; the reward is the command."""

    def update_state(self, state: EnvState, uniform: Tensor) -> dict[str, Tensor]:
        return {"steps": state.task_state["steps"] + 1.0}

    def resample(self, state: EnvState, uniform: Tensor) -> dict[str, Tensor]:
        return {"command": uniform, "steps": state.task_state["steps"] + 0.5}

    def reset(self, state: EnvState, uniform: Tensor) -> ResetState:
        reset = super().reset(state, uniform)
        return reset._replace(task_state=reset.task_state | {"command": -uniform[:, :1]})

    def reward(self, state: EnvState, terminated: Tensor) -> dict[str, Tensor]:
        return {"command": state.task_state["command"][:, 0]}


def test_a_command_is_resampled_after_the_reward_and_before_the_next_observation():
    env = RobotEnv(Commanded(wall=0.3), 8, seed=SEED)
    obs, ended = env.reset()["policy"], 0
    for _ in range(25):
        now = env.state()["steps"]
        step = env.step(torch.zeros(8, 1))
        assert torch.equal(step.reward, obs[:, COMMAND])
        assert torch.equal(step.final_obs["policy"][:, COMMAND], obs[:, COMMAND])
        done = step.terminated | step.truncated
        sampled = random.uniform(SEED, torch.arange(8), now, random.Stream.STEP, 1)[:, 0]
        started = -random.uniform(SEED, torch.arange(8), now, random.Stream.RESET, 2)[:, 0]
        assert torch.equal(step.obs["policy"][:, COMMAND], torch.where(done, started, sampled))
        counted = step.final_obs["policy"][:, STEPS] + 0.5
        assert torch.equal(step.obs["policy"][:, STEPS], torch.where(done, 0.0, counted))
        obs, ended = step.obs["policy"], ended + int(done.sum())
    assert ended > 8


def test_resampling_can_be_captured():
    run = run_guarded(Commanded(wall=0.05))
    assert (run.guard.syncs, run.guard.contract) == ([], [])
    assert run.guard.calls["resample"] >= 64


def test_all_hooks_can_be_captured():
    run = run_guarded(Lively(wall=0.05))
    assert (run.guard.syncs, run.guard.contract, run.is_finite) == ([], [], True)
    assert run.terminated >= 1
    for function in ("update_state", "reset", "push_velocity", "metrics"):
        assert run.guard.calls[function] >= 64, function


@pytest.mark.parametrize("name", INDEPENDENT_FIELDS)
def test_mujoco_derives_no_constants_from_an_independent_field(name: str):
    model, changed = Go1Velocity().model(), Go1Velocity().model()
    field = operator.attrgetter(name)(changed)
    assert field.size
    field *= 1.5
    field += 0.1
    for each in (model, changed):
        mujoco.mj_setConst(each, mujoco.MjData(each))
    constants = [other for other in dir(model) if other != name and isinstance(getattr(model, other), np.ndarray)]
    assert "body_invweight0" in constants
    for constant in constants:
        assert np.array_equal(getattr(model, constant), getattr(changed, constant)), constant


@dataclass(frozen=True)
class Falling(Drift):
    """Gravity differs in strength, and slopes along the rail."""

    fields: tuple[Randomization, ...] = (
        Randomization("opt.gravity", 0.9, 1.1, column=2),
        Randomization("opt.gravity", -1.0, 1.0, how="add", column=0, when="once", every_seconds=0.03),
    )
    decimation: int = 1
    episode_seconds: float = 0.1

    def randomized_fields(self) -> tuple[Randomization, ...]:
        return self.fields

    def model(self) -> mujoco.MjModel:
        model = super().model()
        model.opt.gravity = (0.0, 0.0, -10.0)
        return model


def test_gravity_differs_between_envs_in_strength_and_direction():
    env = RobotEnv(Falling(), 64)
    gravity = field(env, "opt.gravity")
    assert gravity.shape == (64, 3)
    assert (gravity[:, 1] == 0.0).all()
    for column, low, high in ((0, -1.0, 1.0), (2, -11.0, -9.0)):
        values = gravity[:, column]
        assert ((values >= low) & (values <= high)).all()
        assert len(values.unique()) == 64
    before = env.sim.qvel.clone()
    env.step(torch.zeros(64, 1))
    torch.testing.assert_close(env.sim.qvel[:, 0] - before[:, 0], 0.01 * gravity[:, 0], rtol=1e-4, atol=1e-6)


def test_components_of_gravity_are_sampled_at_their_own_times():
    env = RobotEnv(Falling(), 8)
    seen = [field(env, "opt.gravity")]
    for _ in range(10):
        run(env, 1)
        seen.append(field(env, "opt.gravity"))
    slope, strength = ([bool((a[:, c] != b[:, c]).all()) for a, b in pairwise(seen)] for c in (0, 2))
    assert slope == [i % 3 == 0 for i in range(1, 10)] + [False]
    assert strength == [False] * 9 + [True]


@dataclass(frozen=True)
class Wrong(Drift):
    fields: tuple[Randomization, ...] = ()

    def randomized_fields(self) -> tuple[Randomization, ...]:
        return self.fields


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (Randomization("body_mas", 0.0, 1.0), "no field 'body_mas'"),
        (Randomization("opt_gravity", 0.0, 1.0), "no field 'opt_gravity'"),
        (Randomization("body_mass", 0.0, 1.0, names="leg"), "no name matches 'leg'"),
        (Randomization("opt.gravity", 0.0, 1.0, names="block"), r"no name matches 'block'; there are \['gravity'\]"),
        (Randomization("opt.wind", 0.0, 1.0), r"no field 'opt.wind'.*opt.gravity"),
        (Randomization("opt.gravity", 0.0, 1.0, column=3), "no column 3; choose from 0 to 2"),
        (Randomization("geom_friction", 0.0, 1.0, column=-1), "no column -1; choose from 0 to 2"),
        (Randomization("body_mass", 0.0, 1.0, column=0), "no column 0; it has one number per object"),
        (Randomization("body_mass", 0.0, 1.0, also="geom_size"), "'geom_size' is not a field of the same kind"),
        (Randomization("actuator_gainprm", 0.0, 1.0, also="actuator_bias"), "'actuator_bias' is not a field of the"),
    ],
)
def test_an_unknown_field_name_or_column_is_an_error(item: Randomization, message: str):
    task: Task = Wrong(fields=(item,))
    with pytest.raises(UserError, match=message):
        RobotEnv(task, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"how": "multiply"}, "how 'multiply' must be 'scale', 'add' or 'set'"),
        ({"when": "often"}, "when 'often' must be 'once' or 'reset'"),
        ({"every_seconds": -1.0}, "every_seconds -1.0 must be at least 0"),
        ({"high": math.nan}, "high nan must be at most"),
        ({"low": 3.0}, "from 3 to 2 is no range: swap them"),
        ({"names": "(left"}, r"names '\(left' is not a regular expression: missing \)"),
    ],
)
def test_an_invalid_argument_of_a_randomization_is_an_error(arguments: dict[str, Any], message: str):
    with pytest.raises(UserError, match=f"randomization of body_mass: {message}"):
        Randomization(**{"field": "body_mass", "low": 1.0, "high": 2.0, **arguments})
