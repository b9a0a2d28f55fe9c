"""The ant and the humanoid: models, observations, rewards and falls."""

import json
import math
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import distribution
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from paceline.env.robot_env import RobotEnv
from paceline.errors import UserError
from paceline.learners.ppo.settings import PpoSettings
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.tasks.locomotion import Ant, Humanoid, LocomotionTask
from paceline.train import train

HIP, ANKLE = (7.5, (-40, 40), 0.01, 0.1, 0.0), (7.5, (30, 100), 0.01, 0.1, 0.0)
OTHER_ANKLE = (7.5, (-100, -30), 0.01, 0.1, 0.0)
LEG = {
    "hip_x": (45.0, (-45, 15), 0.01, 5.0, 10.0),
    "hip_z": (45.0, (-60, 35), 0.01, 5.0, 10.0),
    "hip_y": (135.0, (-120, 45), 0.01, 5.0, 20.0),
    "knee": (90.0, (-160, 2), 0.007, 0.1, 5.0),
}
ELBOW = (45.0, (-90, 50), 0.006, 1.0, 2.0)
JOINTS = {
    "ant": {
        "hip_1": HIP,
        "ankle_1": ANKLE,
        "hip_2": HIP,
        "ankle_2": OTHER_ANKLE,
        "hip_3": HIP,
        "ankle_3": OTHER_ANKLE,
        "hip_4": HIP,
        "ankle_4": ANKLE,
    },
    "humanoid": {
        "abdomen_z": (67.5, (-45, 45), 0.02, 5.0, 20.0),
        "abdomen_y": (67.5, (-75, 30), 0.01, 5.0, 20.0),
        "abdomen_x": (67.5, (-35, 35), 0.01, 5.0, 10.0),
        **{f"{side}_{name}": joint for side in ("right", "left") for name, joint in LEG.items()},
        **{f"right_shoulder{number}": (67.5, (-90, 70), 0.01, 5.0, 10.0) for number in (1, 2)},
        "right_elbow": ELBOW,
        **{f"left_shoulder{number}": (67.5, (-70, 90), 0.01, 5.0, 10.0) for number in (1, 2)},
        "left_elbow": ELBOW,
    },
}
"""Torque, N m, range, degrees, armature, damping and stiffness of Isaac Lab's joints, in the order of the actions."""
START_HEIGHT = {"ant": 0.5, "humanoid": 1.34}

both = pytest.mark.parametrize("task", [Ant(), Humanoid()], ids=["ant", "humanoid"])


def wheel_model(task: LocomotionTask) -> mujoco.MjModel:
    file = distribution("gymnasium").locate_file(f"gymnasium/envs/mujoco/assets/{task.robot}.xml")
    return mujoco.MjModel.from_xml_path(str(file))


def placed(
    task: LocomotionTask,
    height: float | None = None,
    quat: tuple[float, ...] = (1.0, 0.0, 0.0, 0.0),
    speed: float = 0.0,
) -> RobotEnv:
    """Return one env with the joints in the middle of their ranges and a torso that moves along x."""
    env = RobotEnv(task, 1)
    state = env.state()
    qpos, qvel = state["sim/qpos"][0], state["sim/qvel"][0]
    qpos[2] = START_HEIGHT[task.robot] if height is None else height
    qpos[3:7] = torch.tensor(quat)
    qpos[7:] = env.env_state.constants["joint_pos_center"][0]
    qvel.zero_()
    qvel[0] = speed
    env.load_state(state)
    return env


def rewards(env: RobotEnv, fallen: bool = False) -> dict[str, float]:
    terms = env.task.reward(env.env_state, torch.tensor([fallen]))
    return {name: term.item() for name, term in terms.items()}


def about_z(angle: float) -> tuple[float, ...]:
    return (math.cos(angle / 2.0), 0.0, 0.0, math.sin(angle / 2.0))


# The model


@both
def test_bodies_and_joints_are_those_of_the_wheel(task: LocomotionTask):
    model, original = task.model(), wheel_model(task)
    assert (model.nq, model.nv, model.nu, model.ngeom) == (original.nq, original.nv, original.nu, original.ngeom)
    np.testing.assert_allclose(model.body_mass, original.body_mass)
    np.testing.assert_allclose(model.body_inertia, original.body_inertia)
    np.testing.assert_allclose(model.body_pos[2:], original.body_pos[2:])
    np.testing.assert_allclose(model.jnt_axis, original.jnt_axis)
    prefix = f"{task.robot}/"
    names = [[m.joint(i).name.removeprefix(prefix) for i in range(m.njnt)] for m in (model, original)]
    assert names[0] == names[1] == ["root", *JOINTS[task.robot]]


@both
def test_an_action_of_one_applies_the_torque_of_its_joint(task: LocomotionTask):
    model = task.model()
    data = mujoco.MjData(model)
    for index, (torque, *_) in enumerate(JOINTS[task.robot].values()):
        data.ctrl[:] = np.arange(model.nu) == index
        mujoco.mj_forward(model, data)
        expected = np.zeros(model.nv)
        expected[6 + index] = torque
        np.testing.assert_allclose(data.qfrc_actuator, expected)


@both
def test_joints_have_the_ranges_springs_and_inertias_of_isaac_lab(task: LocomotionTask):
    model = task.model()
    for index, (_, limits, *others) in enumerate(JOINTS[task.robot].values()):
        np.testing.assert_allclose(np.degrees(model.jnt_range[1 + index]), limits)
        found = model.dof_armature[6 + index], model.dof_damping[6 + index], model.jnt_stiffness[1 + index]
        np.testing.assert_allclose(found, others)


@both
def test_a_model_collides_with_the_ground_and_not_with_itself(task: LocomotionTask):
    model = task.model()
    data = mujoco.MjData(model)
    data.qpos[2], data.qpos[7:] = 0.1, 0.5
    mujoco.mj_forward(model, data)
    floor = model.geom("floor").id
    assert data.ncon > 0
    assert all(floor in contact.geom for contact in data.contact)


def test_a_missing_wheel_is_named_with_what_to_install(tmp_path: Path):
    script = f"""import sys
from importlib.metadata import MetadataPathFinder
found = MetadataPathFinder.find_distributions
MetadataPathFinder.find_distributions = lambda context: [] if context.name == "gymnasium" else found(context)
sys.argv = ["paceline", "train", "ant", "--gpu-ids", "none", "--num-envs", "2", "--run-dir", {str(tmp_path / "run")!r}]
from paceline.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert "the model comes with gymnasium, which is not installed" in line
    assert "pip install 'paceline[gymnasium]'" in line
    assert not list(tmp_path.iterdir())


# Rewards


def test_a_standing_robot_gets_the_rewards_for_alive_upright_and_heading():
    for task, alive in ((Ant(), 0.5), (Humanoid(), 2.0)):
        expected = {"alive": alive, "upright": 0.1, "heading": 0.5}
        assert rewards(placed(task)) == pytest.approx(
            dict.fromkeys(("progress", "action", "energy", "joint_limits", "termination"), 0.0) | expected
        )


@both
def test_progress_is_twice_the_speed_toward_the_target(task: LocomotionTask):
    env = placed(task, height=3.0, speed=4.0)
    step = env.step(torch.zeros(1, env.num_actions))
    log = dict(zip(env.log_names, step.log[0].tolist(), strict=True))
    assert log["reward/progress"] == pytest.approx(8.0, rel=0.02)
    assert log["measure/speed"] == pytest.approx(4.0, rel=0.02)


@both
def test_the_sum_of_progress_is_proportional_to_the_distance(task: LocomotionTask):
    env = RobotEnv(task, 4, seed=3)
    start, progress = env.sim.qpos[:, 0].clone(), torch.zeros(4)
    place = env.log_names.index("reward/progress")
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        step = env.step(torch.randn(4, env.num_actions, generator=generator))
        assert not step.terminated.any()
        progress = step.log[:, place]
    torch.testing.assert_close(progress, (env.sim.qpos[:, 0] - start) * 120.0, atol=0.05, rtol=0.01)


@both
def test_the_heading_reward_is_negative_for_a_robot_that_faces_away(task: LocomotionTask):
    assert rewards(placed(task, quat=about_z(0.6)))["heading"] == pytest.approx(0.5)
    aside = rewards(placed(task, quat=about_z(1.0)))["heading"]
    assert aside == pytest.approx(0.5 * math.cos(1.0) / 0.8, rel=1e-4)
    assert rewards(placed(task, quat=about_z(math.pi)))["heading"] == pytest.approx(-0.625, rel=1e-4)


@both
def test_a_tilted_torso_gets_no_reward_for_upright(task: LocomotionTask):
    tilts = {angle: (math.cos(angle / 2.0), math.sin(angle / 2.0), 0.0, 0.0) for angle in (0.3, 0.5)}
    terms = {angle: rewards(placed(task, quat=quat))["upright"] for angle, quat in tilts.items()}
    assert terms == pytest.approx({0.3: 0.1, 0.5: 0.0})


@both
def test_actions_and_their_energy_have_negative_rewards(task: LocomotionTask):
    env = placed(task)
    env.env_state.action.fill_(0.5)
    state = env.state()
    state["sim/qvel"][0, 6:] = -2.0
    env.load_state(state)
    terms = rewards(env)
    assert terms["action"] == pytest.approx(task.rewards.action * 0.25 * env.num_actions, rel=1e-4)
    assert terms["energy"] == pytest.approx(-0.05 * task.joint_vel_scale * 1.0 * env.num_actions, rel=1e-4)


@both
def test_joints_at_their_upper_limit_have_negative_rewards(task: LocomotionTask):
    env = placed(task)
    state, constants = env.state(), env.env_state.constants
    state["sim/qpos"][0, 7:9] = constants["max_joint_pos"][0, :2]
    env.load_state(state)
    assert rewards(env)["joint_limits"] == pytest.approx(-2.0)


# Falls


def test_a_fall_replaces_all_other_rewards():
    for task, penalty in ((Ant(), -2.0), (Humanoid(), -1.0)):
        terms = rewards(placed(task), fallen=True)
        assert terms.pop("termination") == penalty
        assert set(terms.values()) == {0.0}


@pytest.mark.parametrize(("task", "height"), [(Ant(), 0.31), (Humanoid(), 0.8)], ids=["ant", "humanoid"])
def test_a_low_torso_ends_the_episode(task: LocomotionTask, height: float):
    for above, ends in ((0.02, False), (-0.02, True)):
        env = placed(task, height=height + above)
        assert bool(task.terminated(env.env_state)) is ends


def test_a_humanoid_without_torques_falls():
    env = RobotEnv(Humanoid(), 8)
    terminated = torch.stack([env.step(torch.zeros(8, env.num_actions)).terminated for _ in range(180)])
    assert terminated.any(0).all()


# Observations


def rotation(env: RobotEnv) -> Tensor:
    """Return the rotation matrix of the torso from MuJoCo, [3, 3]."""
    matrix = np.zeros(9)
    mujoco.mju_quat2Mat(matrix, env.sim.qpos[0, 3:7].double().numpy())
    return torch.from_numpy(matrix).view(3, 3).float()


@both
@pytest.mark.parametrize("seed", range(4))
def test_the_observed_pose_of_the_torso_equals_that_of_mujoco(task: LocomotionTask, seed: int):
    generator = torch.Generator().manual_seed(seed)
    quat = torch.nn.functional.normalize(torch.randn(4, generator=generator), dim=0)
    env = placed(task, quat=tuple(quat.tolist()))
    state = env.state()
    state["sim/qpos"][0, :2] = torch.tensor((990.0, 20.0))
    state["sim/qvel"][0, :6] = torch.randn(6, generator=generator).double()
    env.load_state(state)
    turned, velocity = rotation(env), env.sim.qvel[0]
    height, *_ = obs = task.observe(env.env_state)["policy"][0]
    assert height == pytest.approx(START_HEIGHT[task.robot])
    torch.testing.assert_close(obs[1:4], turned.T @ velocity[:3], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(obs[4:7], task.ang_vel_scale * velocity[3:6])
    yaw, roll = torch.atan2(turned[1, 0], turned[0, 0]), torch.atan2(turned[2, 1], turned[2, 2])
    # Ten meters ahead, and twenty to the right.
    direction = torch.tensor((10.0, -20.0)) / math.hypot(10.0, 20.0)
    aside = (math.atan2(-20.0, 10.0) - yaw + math.pi) % (2.0 * math.pi) - math.pi
    expected = torch.stack((yaw, roll, aside, turned[2, 2], turned[:2, 0] @ direction))
    torch.testing.assert_close(obs[7:12], expected, atol=1e-4, rtol=1e-4)


@both
def test_observed_joint_angles_are_scaled_to_their_ranges(task: LocomotionTask):
    env = placed(task)
    state, constants = env.state(), env.env_state.constants
    state["sim/qpos"][0, 7] = constants["min_joint_pos"][0, 0]
    state["sim/qpos"][0, 8] = constants["max_joint_pos"][0, 1]
    state["sim/qvel"][0, 6] = 3.0
    state["action"][0, 0] = 0.25
    env.load_state(state)
    obs, joints = task.observe(env.env_state)["policy"][0], env.num_actions
    assert len(obs) == 12 + 3 * joints
    assert obs[12:15].tolist() == pytest.approx([-1.0, 1.0, 0.0], abs=1e-5)
    assert obs[12 + joints].item() == pytest.approx(3.0 * task.joint_vel_scale)
    assert obs[12 + 2 * joints].item() == pytest.approx(0.25)


# Episodes and runs


@both
def test_random_actions_keep_the_state_finite(task: LocomotionTask):
    env, generator = RobotEnv(task, 16, seed=2), torch.Generator().manual_seed(2)
    for _ in range(150):
        step = env.step(2.0 * torch.randn(16, env.num_actions, generator=generator))
        assert torch.isfinite(step.obs["policy"]).all()
        assert torch.isfinite(step.reward).all()
    assert env.faults().tolist() == [0.0, 0.0]


@both
def test_initial_joint_angles_are_random_and_within_the_ranges(task: LocomotionTask):
    env = RobotEnv(task, 200)
    angles, constants = env.sim.qpos[:, 7:], env.env_state.constants
    assert (angles >= constants["min_joint_pos"] - 1e-6).all()
    assert (angles <= constants["max_joint_pos"] + 1e-6).all()
    assert (angles - constants["default_joint_pos"]).abs().max() <= 0.2 + 1e-6
    assert (angles.std(0) > 0.05).all()
    torch.testing.assert_close(env.sim.qpos[:, 2], torch.full((200,), START_HEIGHT[task.robot]))


def test_the_result_of_a_run_has_the_speed_of_the_ant(tmp_path: Path):
    settings = PpoSettings(horizon=8, epochs=1, minibatches=2, hidden=(16,))
    config = TrainConfig("ant", {"episode_seconds": 0.1}, settings=asdict(settings), num_envs=8, max_iterations=2)
    result = train(config, RunDir(tmp_path / "run"), Console(quiet=True))
    assert json.loads((tmp_path / "run" / "result.json").read_text())["measures"] == result["measures"]
    assert set(result["measures"]) == {"speed"}


def test_an_invalid_option_is_rejected():
    with pytest.raises(UserError, match=r"--env\.min-height -1 must be above 0"):
        Ant(min_height=-1.0)
