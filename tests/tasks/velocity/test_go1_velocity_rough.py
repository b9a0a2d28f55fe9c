"""A quadruped on rough terrain: initial positions, the height scan and the curriculum of levels."""

import dataclasses
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.distributed.sharding import concatenate
from paceline.env.robot_env import RobotEnv
from paceline.errors import UserError
from paceline.robots.legged import GO1
from paceline.robots.terrain import CELL, KINDS
from paceline.tasks.velocity.go1_velocity import Go1Velocity
from paceline.tasks.velocity.go1_velocity_rough import Go1VelocityRough
from tests.states import states_of

# Policy of the flat task, whose observations come first in those of the rough task.
POLICY = Path(__file__).parent / "data" / "go1_velocity.pt"
QUIET = Go1VelocityRough(observation_noise_scale=0.0, push_seconds=0.0, randomize=False)
POINTS = 11 * 7
HEIGHT = float(GO1.scene().compile().key("home").qpos[2])
"""Height of the trunk of a standing robot, m."""


def no_action(env: RobotEnv) -> Tensor:
    return torch.zeros(env.num_envs, env.num_actions)


def levels(env: RobotEnv) -> list[float]:
    return env.env_state.task_state["terrain_level"][:, 0].tolist()


def test_robots_start_in_the_middle_of_their_patch_standing_on_it():
    env = RobotEnv(dataclasses.replace(QUIET, initial_terrain_levels=10), 64)
    level, kind = env.env_state.task_state["terrain_level"], env.env_state.task_state["terrain_kind"]
    off = env.sim.qpos[:, :2] - torch.cat(QUIET.terrain.middle(level, kind), dim=1)
    assert off.abs().max() <= 0.5
    cells = ((env.sim.qpos[:, :2] + torch.tensor(QUIET.terrain.size)) / CELL).round().long()
    ground = torch.from_numpy(QUIET.terrain.heights().copy())[cells[:, 1], cells[:, 0]]
    assert ground.max() > 1.0
    assert ground.min() < -1.0
    torch.testing.assert_close(env.sim.qpos[:, 2] - ground, torch.full((64,), HEIGHT + 0.02))
    for _ in range(20):
        assert not env.step(no_action(env)).terminated.any()


def test_initial_terrain_levels_are_the_easy_ones_and_all_kinds_occur():
    env = RobotEnv(dataclasses.replace(QUIET, initial_terrain_levels=3), 100)
    assert set(levels(env)) == {0.0, 1.0, 2.0}
    assert set(env.env_state.task_state["terrain_kind"][:, 0].tolist()) == set(range(len(KINDS)))


EPISODES = {
    # The level, whether the robot fell, its maximum distance, the walked and the commanded distance, m; the next level.
    "follows": (4, False, 3.0, 9.0, 10.0, 5),
    "walks in place": (4, False, 1.0, 9.0, 10.0, 4),
    "stays behind": (4, False, 3.0, 4.0, 10.0, 3),
    "neither": (4, False, 3.0, 6.0, 10.0, 4),
    "stands as commanded": (4, False, 0.1, 0.0, 0.0, 4),
    "falls": (8, True, 3.0, 9.0, 10.0, 7),
    "falls in the first level": (0, True, 3.0, 9.0, 10.0, 0),
}


def test_the_next_level_depends_on_falls_and_distances():
    env = RobotEnv(QUIET, len(EPISODES))
    before, fell, reached, walked, commanded, after = zip(*EPISODES.values(), strict=True)
    state = last_step(env, torch.tensor(before).float(), torch.arange(len(EPISODES)).float() % len(KINDS))
    for name, values in {"max_distance": reached, "distance_walked": walked, "distance_commanded": commanded}.items():
        state[f"task_state/{name}"][:, 0] = torch.tensor(values)
    for env_index in np.flatnonzero(fell):
        state["sim/qpos"][env_index, 3:7] = torch.tensor((0.0, 1.0, 0.0, 0.0))
    env.load_state(state)
    kinds = state["task_state/terrain_kind"].clone()
    step = env.step(no_action(env))
    assert step.terminated.tolist() == list(fell)
    assert (step.terminated | step.truncated).all()
    assert levels(env) == list(after)
    assert torch.equal(env.env_state.task_state["terrain_kind"], kinds)
    for name in ("max_distance", "distance_walked", "distance_commanded"):
        assert (env.env_state.task_state[name] == 0.0).all()


def last_step(env: RobotEnv, level: Tensor, kind: Tensor) -> dict[str, Tensor]:
    """Return a state of robots that stand in the middle of these patches with zero commands, a step before the time
    limit."""
    state = env.state()
    state["task_state/terrain_level"][:, 0], state["task_state/terrain_kind"][:, 0] = level, kind
    state["sim/qpos"][:, 0], state["sim/qpos"][:, 1] = QUIET.terrain.middle(level, kind)
    table = torch.from_numpy(QUIET.terrain.heights().copy())
    ground = QUIET.terrain.height_at(table, state["sim/qpos"][:, 0], state["sim/qpos"][:, 1])
    state["sim/qpos"][:, 2] = HEIGHT + ground
    state["task_state/command"].zero_()
    state["episode_step"].fill_(env.max_episode_steps - 1)
    return state


def test_robots_that_master_the_last_level_get_random_levels():
    env = RobotEnv(QUIET, 200)
    state = last_step(env, torch.full((200,), 9.0), env.env_state.task_state["terrain_kind"][:, 0].clone())
    for name, value in {"max_distance": 3.0, "distance_walked": 9.0, "distance_commanded": 10.0}.items():
        state[f"task_state/{name}"].fill_(value)
    env.load_state(state)
    env.step(no_action(env))
    assert set(levels(env)) == set(range(10))


def test_levels_are_kept_when_the_env_is_reset_and_when_one_fails():
    env = RobotEnv(QUIET, 5)
    for _ in range(3):
        env.step(no_action(env))
    before = levels(env)
    env.reset()
    assert levels(env) == before
    state = env.state()
    state["sim/qpos"][2] = torch.nan
    env.load_state(state)
    assert env.step(no_action(env)).terminated.tolist() == [False, False, True, False, False]
    assert levels(env) == before
    assert env.sim.qpos.isfinite().all()
    assert all(part.isfinite().all() for part in env.env_state.task_state.values())


def test_without_the_curriculum_the_level_of_every_episode_is_random():
    env = RobotEnv(dataclasses.replace(QUIET, curriculum=False), 200)
    first = levels(env)
    assert set(first) == set(range(10))
    env.step(no_action(env))
    env.reset()
    assert levels(env) != first


def test_walked_and_commanded_distances_are_in_meters():
    env = RobotEnv(dataclasses.replace(QUIET, command_seconds=1e6, standing_fraction=0.0), 16)
    commanded = env.env_state.task_state["command"][:, :2].norm(dim=1)
    start = env.sim.qpos[:, :2].clone()
    for _ in range(25):
        assert not env.step(no_action(env)).terminated.any()
    torch.testing.assert_close(env.env_state.task_state["distance_commanded"][:, 0], 0.5 * commanded)
    # Without actions it sways in place.
    assert (env.sim.qpos[:, :2] - start).norm(dim=1).max() < 0.3
    assert env.env_state.task_state["distance_walked"].abs().max() < 0.3


def test_levels_increase_when_a_policy_walks():
    """A policy that was trained on flat ground masters the first level."""
    task = dataclasses.replace(
        QUIET, episode_seconds=6.0, initial_terrain_levels=1, max_yaw_rate=0.1, standing_fraction=0.0
    )
    env = RobotEnv(task, 24, seed=1)
    policy, obs = torch.jit.load(POLICY), env.reset()
    with torch.inference_mode():
        for _ in range(env.max_episode_steps):
            obs = env.step(policy(obs["policy"][:, :-POINTS])).obs
    assert env.env_state.task_state["terrain_level"].mean() > 0.4


def test_the_height_scan_equals_ray_casts_in_the_heading_of_the_trunk():
    env = RobotEnv(dataclasses.replace(QUIET, initial_terrain_levels=10), 6, seed=4)
    state, random = env.state(), np.random.default_rng(0)
    yaw, pitch = random.uniform(-np.pi, np.pi, size=6), random.uniform(-0.4, 0.4, size=6)
    for env_index in range(6):
        qpos = state["sim/qpos"][env_index]
        # Off the flat middle.
        qpos[:2] += torch.from_numpy(random.uniform(1.0, 2.5, size=2))
        turn, lean, both = np.zeros(4), np.zeros(4), np.zeros(4)
        mujoco.mju_axisAngle2Quat(turn, [0.0, 0.0, 1.0], yaw[env_index])
        mujoco.mju_axisAngle2Quat(lean, [0.0, 1.0, 0.0], pitch[env_index])
        mujoco.mju_mulQuat(both, turn, lean)
        qpos[3:7] = torch.from_numpy(both)
    env.load_state(state)
    scans = env.observe()["critic"][:, -POINTS:].numpy()
    model = env.sim.model
    data = mujoco.MjData(model)
    hit, ground_only = np.zeros(1, dtype=np.int32), np.array([1, 0, 0, 0, 0, 0], dtype=np.uint8)
    mujoco.mj_forward(model, data)
    for env_index, scan in enumerate(scans):
        x, y, z = state["sim/qpos"][env_index, :3].tolist()
        cos, sin = np.cos(yaw[env_index]), np.sin(yaw[env_index])
        found = []
        for ahead in np.linspace(-0.75, 0.75, 11):
            for left in np.linspace(-0.45, 0.45, 7):
                above = np.array([x + cos * ahead - sin * left, y + sin * ahead + cos * left, 5.0])
                down = np.array([0.0, 0.0, -1.0])
                found.append(5.0 - mujoco.mj_ray(model, data, above, down, ground_only, 1, -1, hit))
        expected = np.clip(np.array(found) - z + HEIGHT, -1.0, 1.0)
        np.testing.assert_allclose(scan, expected, atol=1e-3)
    assert np.ptp(scans, axis=1).min() > 0.01


def test_only_the_policy_observes_a_noisy_scan():
    loud, quiet = (RobotEnv(dataclasses.replace(QUIET, observation_noise_scale=noise), 16) for noise in (1.0, 0.0))
    for env in (loud, quiet):
        env.step(no_action(env))
    noisy, clean = (env.observe() for env in (loud, quiet))
    assert torch.equal(noisy["critic"], clean["critic"])
    assert torch.equal(clean["policy"][:, -POINTS:], clean["critic"][:, -POINTS:])
    off = (noisy["policy"] - clean["policy"])[:, -POINTS:].abs()
    assert (off.amax(0) > 0.02).all()
    assert off.max() <= 0.05 + 1e-6


def test_observations_do_not_depend_on_the_height_of_the_ground():
    """On top of the stairs that lead down, and at the bottom of those that lead up."""
    env = RobotEnv(QUIET, 2)
    kinds = torch.tensor([KINDS.index("stairs down"), KINDS.index("stairs up")]).float()
    state = last_step(env, torch.full((2,), 9.0), kinds)
    assert state["sim/qpos"][:, 2].tolist() == pytest.approx([HEIGHT + z for z in (1.6, -1.6)], abs=1e-5)
    state["sim/qpos"][:, 2] += 0.1
    state["sim/qpos"][1, 3:], state["sim/qvel"][1] = state["sim/qpos"][0, 3:].clone(), state["sim/qvel"][0].clone()
    env.load_state(state)
    env.sim.sense()
    (high, low) = env.observe()["critic"]
    torch.testing.assert_close(high[:-POINTS], low[:-POINTS], atol=1e-5, rtol=0.0)
    # Up to a distance: further out are the stairs.
    middle = slice(-POINTS + 28, -POINTS + 49)
    torch.testing.assert_close(high[middle], torch.full((21,), -0.1), atol=1e-5, rtol=0.0)
    torch.testing.assert_close(low[middle], high[middle], atol=1e-5, rtol=0.0)


def test_a_loaded_state_continues_with_the_same_levels():
    task = Go1VelocityRough(episode_seconds=0.3, initial_terrain_levels=10)
    first, second = (RobotEnv(task, 6) for _ in range(2))
    initial, random = levels(first), torch.Generator().manual_seed(0)
    for _ in range(40):
        first.step(torch.randn(6, 12, generator=random))
    assert levels(first) != initial
    second.load_state(first.state())
    for _ in range(20):
        assert levels(first) == levels(second)
        action = torch.randn(6, 12, generator=random)
        assert torch.equal(first.step(action).obs["policy"], second.step(action).obs["policy"])


def test_levels_stay_with_their_envs_on_other_ranks():
    task = Go1VelocityRough(episode_seconds=0.3)
    whole, random = RobotEnv(task, 6), torch.Generator().manual_seed(0)
    halves = [RobotEnv(task, 3, first_env=first) for first in (0, 3)]
    for _ in range(20):
        whole.step(torch.ones(6, 12))
    for half, envs in zip(halves, (range(3), range(3, 6)), strict=True):
        half.load_state(states_of(envs, whole.state()))
    for _ in range(20):
        action = torch.randn(6, 12, generator=random)
        whole.step(action)
        for half, part in zip(halves, action.split(3), strict=True):
            half.step(part)
    together = concatenate([half.state() for half in halves])
    for name in ("terrain_level", "terrain_kind", "distance_walked"):
        assert torch.equal(together[f"task_state/{name}"], whole.state()[f"task_state/{name}"])


def test_the_mean_level_is_logged():
    env = RobotEnv(dataclasses.replace(QUIET, episode_seconds=0.02), 8)
    before = levels(env)
    log = env.step(no_action(env)).log
    assert log[:, env.log_names.index("measure/terrain_level")].tolist() == before


def test_vertical_velocity_and_tilt_cost_less_than_on_flat_ground():
    rough, flat = (
        RobotEnv(QUIET, 4),
        RobotEnv(Go1Velocity(observation_noise_scale=0.0, push_seconds=0.0, randomize=False), 4),
    )
    state = rough.state()
    for env in (rough, flat):
        own = env.state()
        own["sim/qvel"] = state["sim/qvel"]
        own["sim/qpos"][:, 3:] = state["sim/qpos"][:, 3:]
        own["sim/qpos"][:, 3:7] = torch.tensor((0.96, 0.28, 0.0, 0.0))
        env.load_state(own)
        env.sim.sense()
    terminated = torch.zeros(4, dtype=torch.bool)
    on_rough, on_flat = (env.task.reward(env.env_state, terminated) for env in (rough, flat))
    assert on_rough.keys() == on_flat.keys()
    for name, share in {"lin_vel_z": 0.25, "flat_orientation": 0.2, "ang_vel_xy": 1.0, "joint_vel": 1.0}.items():
        assert (on_flat[name] < 0.0).all()
        torch.testing.assert_close(on_rough[name], share * on_flat[name], atol=1e-6, rtol=1e-4)


def test_the_border_is_wider_than_the_longest_walk():
    far = Go1VelocityRough(max_forward_speed=3.0, episode_seconds=60.0)
    assert far.terrain.border > 3.0 * 60.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial_terrain_levels": 11}, r"--env\.initial-terrain-levels 11 is more than --env\.terrain-levels 10"),
        ({"initial_terrain_levels": 0}, r"--env\.initial-terrain-levels 0 must be at least 1"),
        ({"max_forward_speed": -1.0}, r"--env\.max-forward-speed -1 must be above 0"),
    ],
)
def test_an_invalid_option_is_rejected(options: dict, message: str):
    with pytest.raises(UserError, match=message):
        Go1VelocityRough(**options)
