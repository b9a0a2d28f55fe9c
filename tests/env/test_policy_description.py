"""Descriptions of policies against the env and the physics that they describe."""

import dataclasses
from typing import Any

import mujoco
import numpy as np
import pytest
import torch

from paceline.env.policy_description import describe
from paceline.env.policy_interface import ActionMapping, CommandRange, ObservationPart
from paceline.env.robot_env import RobotEnv
from paceline.errors import UserError
from paceline.tasks import registry
from paceline.tasks.velocity.go1_velocity import Go1Velocity
from tests.cameras.small import with_small_camera
from tests.env.drift import Drift

TASKS = [name for name in registry.names() if registry.find(name).task.__module__.startswith("paceline.")]


def env_of(name: str) -> RobotEnv:
    """Return one env of a task without observation noise."""
    task = with_small_camera(registry.find(name).task())
    if hasattr(task, "observation_noise_scale"):
        task = dataclasses.replace(task, observation_noise_scale=0.0)
    return RobotEnv(task, 1, engine="mujoco")


def motors_against_mujoco(env: RobotEnv) -> None:
    """Check the law of the motors against MuJoCo, in random states."""
    model, generator = env.task.model(), np.random.default_rng(0)
    data, robot = mujoco.MjData(model), describe(env, ())["robot"]
    joints = [model.joint(name) for name in robot["joint_names"]]
    effort, limits = np.zeros(model.nu), np.array(robot["effort_limit"])
    for scale in (0.01, 10.0):
        data.qpos[:] = model.qpos0
        for joint in joints:
            data.qpos[joint.qposadr] += scale * generator.normal()
        data.qvel[:], data.ctrl[:] = scale * generator.normal(size=model.nv), scale * generator.normal(size=model.nu)
        mujoco.mj_forward(model, data)
        for i, joint in enumerate(joints):
            control = (
                data.ctrl[i] if robot["control_range"][i] is None else data.ctrl[i].clip(*robot["control_range"][i])
            )
            drag = (
                robot["stiffness"][i] * data.qpos[joint.qposadr[0]] + robot["damping"][i] * data.qvel[joint.dofadr[0]]
            )
            effort[i] = robot["effort_per_control"][i] * control - drag
        expected = data.qfrc_actuator[[joint.dofadr[0] for joint in joints]]
        np.testing.assert_allclose(effort.clip(limits[:, 0], limits[:, 1]), expected, rtol=1e-9)


def joints_against_env(env: RobotEnv) -> None:
    """Check the columns of joint positions and velocities against the state of the env, by the names of the joints."""
    model, state = env.sim.model, env.env_state
    step = env.step(torch.rand(1, env.num_actions))
    if "policy" not in env.observation_spec:
        return
    parts = {part["name"]: part for part in describe(env, ("policy",))["observations"]["obs"]["parts"]}
    for name, source in (("joint_pos", state.qpos), ("joint_vel", state.qvel)):
        if part := parts.get(name):
            joints = [model.joint(label) for label in part["labels"]]
            columns = [int((j.qposadr if name == "joint_pos" else j.dofadr)[0]) for j in joints]
            expected = torch.tensor(part["scale"]) * (source[0, columns] - torch.tensor(part["offset"]))
            torch.testing.assert_close(step.obs["policy"][0, part["start"] : part["stop"]], expected)
    if part := parts.get("actions"):
        torch.testing.assert_close(step.obs["policy"][0, part["start"] : part["stop"]], state.action[0])


@pytest.mark.parametrize("name", TASKS)
def test_a_shipped_task_describes_all_columns_its_joints_and_its_motors(name: str):
    env = env_of(name)
    vectors = [group for group, spec in env.observation_spec.items() if len(spec.shape) == 1]
    assert list(env.task.observation_parts(env.sim.model)) == vectors
    assert env.task.action_mapping(env.sim.model) is not None
    joints_against_env(env)
    motors_against_mujoco(env)


def test_history_and_delay_are_described():
    env = RobotEnv(Go1Velocity(history=3, delay=(1, 2)), 1)
    obs = describe(env, ("policy",))["observations"]["obs"]
    assert (obs["shape"], obs["history"], obs["frame_width"], obs["delay_steps"]) == ([144], 3, 48, [1, 2])
    assert obs["parts"][-1]["stop"] == 48


@dataclasses.dataclass(frozen=True)
class Described(Drift):
    """A task whose description may be wrong."""

    parts: Any = None
    mapping: Any = None
    ranges: Any = None

    def observation_parts(self, model: mujoco.MjModel) -> Any:
        return self.parts or {}

    def action_mapping(self, model: mujoco.MjModel) -> Any:
        return self.mapping

    def command_ranges(self) -> Any:
        return self.ranges or {}


PART = ObservationPart("place", 1)
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"parts": {"policy": (PART,)}}, r"has the width 1 \(place\), but observe\(state\) gives 5"),
    "group": ({"parts": {"image": (PART,)}}, r"has 'image', but observe\(state\) has only 'policy'"),
    "names": ({"parts": {"policy": (PART, PART._replace(width=4))}}, "has two parts 'place': give each its own name"),
    "types": ({"parts": {"policy": [PART]}}, "must be a tuple of ObservationPart"),
    "scale": (
        {"parts": {"policy": (ObservationPart("place", 5, scale=(1.0, 2.0, 3.0)),)}},
        "scale of part 'place' .* has 3 elements, but must have one per column: 5",
    ),
    "mapping": ({"mapping": ActionMapping((1.0, 1.0), (0.0,))}, r"scale of action_mapping\(model\) has 2 elements"),
    "command": ({"ranges": {"speed": CommandRange(("x",), ("m/s",), (0.0, 0.0), (1.0,))}}, "low of command_ranges"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_description_that_does_not_match_the_task_is_refused(name: str):
    members, message = FAULTS[name]
    with pytest.raises(UserError, match=message):
        RobotEnv(Described(**members), 1)
