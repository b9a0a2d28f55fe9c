"""A task that is written wrongly is refused when its env is made, with what to change."""

from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
import pytest
import torch

from paceline.env.robot_env import RobotEnv
from paceline.env.task import Start
from paceline.errors import UserError
from tests.env.drift import Drift
from tests.env.lively import Lively

ENVS = 4


@dataclass(frozen=True)
class Recalling(Lively):
    """A task with memory that is right."""

    def advance(self, worlds: Any, uniform: Any) -> dict[str, Any]:
        return {"steps": worlds.memory["steps"] + 1.0}

    def resample(self, worlds: Any, uniform: Any) -> dict[str, Any]:
        return {"command": uniform}


def broken(kind: type, **members: Any) -> Any:
    """Return a task with these members in place of its own."""
    return type("Broken", (kind,), members)()


def without(kind: type, *names: str) -> Any:
    """Return a task that lacks some members."""
    members = {name: getattr(kind, name) for name in dir(kind) if not name.startswith("__") and name not in names}
    return type("Broken", (), members)()


def model(xml: str) -> Any:
    return lambda task: mujoco.MjModel.from_xml_string(f"<mujoco>{xml}</mujoco>")


def start(**parts: Any) -> Any:
    def made(task: Any, worlds: Any, uniform: Any) -> Start:
        found = {"qpos": worlds.qpos, "qvel": worlds.qvel, "memory": {"level": worlds.memory["level"]}} | parts
        return Start(**found)

    return made


BODY = "<worldbody><body><joint name='j'/><geom size='.1'/></body></worldbody>"
FAULTS: dict[str, tuple[Any, str]] = {
    # Members
    "no control": (without(Drift, "control"), "it has no function 'control': define control(worlds) -> Tensor"),
    "no reset": (without(Drift, "reset"), "it has no function 'reset': define reset(uniform) -> tuple[Tensor, Tensor]"),
    "no start": (
        without(Recalling, "start"),
        "it has no function 'start': define start(worlds, uniform) -> Start, bec",
    ),
    "no memory": (
        broken(Drift, resample=lambda *_: {}),
        "no function 'memory': define memory() -> dict[str, int], bec",
    ),
    "no step_numbers": (without(Recalling, "step_numbers"), "'step_numbers' is None, but must be a whole number"),
    "no actions": (without(Drift, "num_actions"), "'num_actions' is None, but must be a whole number, at least 1"),
    "zero actions": (broken(Drift, num_actions=0), "'num_actions' is 0, but must be a whole number, at least 1"),
    "float reset_numbers": (broken(Drift, reset_numbers=2.0), "'reset_numbers' is 2.0, but must be a whole number"),
    "no decimation": (without(Drift, "decimation"), "it has no whole number 'decimation': set the physics steps"),
    "no episode_seconds": (without(Drift, "episode_seconds"), "it has no number 'episode_seconds': set the time limit"),
    "an option push": (broken(Drift, push=0.5), "'push' is 0.5, but push() is a function of tasks: rename the option"),
    "an option measure": (broken(Drift, measure=True), "'measure' is True, but measure() is a function of tasks"),
    "senses": (broken(Drift, senses=3), "'senses' is 3, but must be a Senses"),
    "randomization": (broken(Drift, randomization=True), "'randomization' is True, but must be a tuple of Rand"),
    # The model
    "no model": (broken(Drift, model=lambda task: None), "model() is NoneType None, but must be a mujoco.MjModel"),
    "a path": (
        broken(Drift, model=lambda task: "robot.xml"),
        "model() is str 'robot.xml', but must be a mujoco.MjModel",
    ),
    "a spec": (broken(Drift, model=lambda task: mujoco.MjSpec()), "but must be a MjModel: return spec.compile()"),
    "no actuators": (
        broken(Drift, model=model(BODY)),
        "its model has no actuators: add them in the <actuator> section",
    ),
    "no joints": (broken(Drift, model=model("")), "its model has no joints: give the bodies that move a <joint>"),
    # Where an episode starts
    "flat reset": (
        broken(Drift, reset=lambda task, uniform: (uniform[:, 0], uniform[:, 1])),
        "qpos of reset(uniform) is a float32 tensor of shape [4], but must be a float32 tensor of shape [env, nq], "
        "here [4, 1]",
    ),
    "one row for all": (
        broken(Drift, reset=lambda task, uniform: (uniform[:, :1], torch.zeros(1))),
        "qvel of reset(uniform) is a float32 tensor of shape [1], but must be a float32 tensor of shape [env, nv], ",
    ),
    "reset without a velocity": (
        broken(Drift, reset=lambda task, uniform: uniform[:, :1]),
        "reset(uniform) is a float32 tensor of shape [4, 1], but must be a tuple (qpos, qvel)",
    ),
    "reset in float64": (
        broken(Drift, reset=lambda task, uniform: (uniform[:, :1].double(), uniform[:, 1:])),
        "qpos of reset(uniform) is a float64 tensor of shape [4, 1], but must be a float32 tensor",
    ),
    "reset to NaN": (
        broken(Drift, reset=lambda task, uniform: (uniform[:, :1], uniform[:, :1] / 0.0)),
        "qvel of reset(uniform) has numbers that are not finite",
    ),
    "a plain tuple": (
        broken(Recalling, start=lambda task, worlds, uniform: (worlds.qpos, worlds.qvel)),
        "start(worlds, uniform) is a tuple, but must be a Start(qpos, qvel, memory)",
    ),
    # Memory
    "an unknown part": (
        broken(Recalling, advance=lambda task, worlds, uniform: {"stepz": worlds.qpos}),
        "advance(worlds, uniform) has 'stepz', but memory() has only 'command', 'level', 'steps'",
    ),
    "a narrow part": (
        broken(Recalling, start=start(memory={"level": torch.zeros(ENVS, 1)})),
        "memory of start(worlds, uniform)['level'] is a float32 tensor of shape [4, 1], but must be a float32 tensor "
        "of shape [env, width], here [4, 2]",
    ),
    "an integer part": (
        broken(Recalling, resample=lambda task, worlds, uniform: {"command": uniform.long()}),
        "resample(worlds, uniform)['command'] is an int64 tensor of shape [4, 1], but must be a float32 tensor",
    ),
    "a part that is never set": (
        broken(Recalling, resample=lambda *_: {}),
        "memory() has 'command', which start, advance and resample never set: remove it",
    ),
    "no result": (
        broken(Recalling, advance=lambda *_: None),
        "advance(worlds, uniform) is NoneType None, but must be a dict with names as keys",
    ),
    "no width": (broken(Recalling, memory=lambda task: {"a": None}), "memory()['a'] is None, but must be the numbers"),
    "a list of parts": (broken(Recalling, memory=lambda task: ["a"]), "memory() is list ['a'], but must be a dict"),
    # Constants
    "a scalar": (
        broken(Drift, constants=lambda task: {"a": 1.0}),
        "constants()['a'] is float 1.0, but must be a tuple",
    ),
    "a matrix": (
        broken(Drift, constants=lambda task: {"a": ((1.0,),)}),
        "constants()['a'] is tuple ((1.0,),), but must",
    ),
    # Control
    "one control for two": (
        broken(Drift, control=lambda task, worlds: worlds.action[:, 0]),
        "control(worlds) is a float32 tensor of shape [4], but must be a float32 tensor of shape [env, actuator], here "
        "[4, 1]",
    ),
    "more actions than actuators": (
        broken(Drift, num_actions=3),
        "control(worlds) is a float32 tensor of shape [4, 3], but must be a float32 tensor of shape [env, actuator], ",
    ),
    # Observations
    "no policy": (
        broken(Drift, observe=lambda task, worlds: {"obs": worlds.qpos}),
        "observe(worlds) has 'obs', but must have 'policy'",
    ),
    "a bare tensor": (
        broken(Drift, observe=lambda task, worlds: worlds.qpos),
        "observe(worlds) is a float32 tensor of shape [4, 1], but must be a dict with names as keys",
    ),
    "flat observations": (
        broken(Drift, observe=lambda task, worlds: {"policy": worlds.qpos[:, 0]}),
        "observe(worlds)['policy'] is a float32 tensor of shape [4], but must be a float32 tensor of shape [env, n], ",
    ),
    "no observations": (
        broken(Drift, observe=lambda task, worlds: {"policy": worlds.qpos[:, :0]}),
        "observe(worlds)['policy'] is a float32 tensor of shape [4, 0], but must be a float32 tensor of shape [env, n]",
    ),
    "observations of one env": (
        broken(Drift, observe=lambda task, worlds: {"policy": worlds.qpos, "critic": worlds.qpos[:1]}),
        "observe(worlds)['critic'] is a float32 tensor of shape [1, 1], but must be a float32 tensor of shape [env, n]",
    ),
    "observations in float64": (
        broken(Drift, observe=lambda task, worlds: {"policy": worlds.qpos.double()}),
        "observe(worlds)['policy'] is a float64 tensor of shape [4, 1], but must be a float32 tensor",
    ),
    "numpy": (
        broken(Drift, observe=lambda task, worlds: {"policy": np.zeros((ENVS, 100))}),
        "observe(worlds)['policy'] is a ndarray, but must be a float32 tensor of shape [env, n], here [4, 1]",
    ),
    "elsewhere": (
        broken(Drift, observe=lambda task, worlds: {"policy": worlds.qpos.to("meta")}),
        "observe(worlds)['policy'] is on meta, but must be on cpu, as worlds.qpos is",
    ),
    # Ends and rewards
    "a float end": (
        broken(Drift, terminated=lambda task, worlds: worlds.qpos[:, 0]),
        "terminated(worlds) is a float32 tensor of shape [4], but must be a bool tensor of shape [env], here [4]",
    ),
    "a wide end": (
        broken(Drift, terminated=lambda task, worlds: worlds.qpos > 0.0),
        "terminated(worlds) is a bool tensor of shape [4, 1], but must be a bool tensor of shape [env], here [4]",
    ),
    "a plain bool": (
        broken(Drift, terminated=lambda task, worlds: False),
        "terminated(worlds) is bool False, but must be a bool tensor of shape [env], here [4]",
    ),
    "a float reward": (
        broken(Drift, reward=lambda task, worlds, terminated: {"alive": 1.0}),
        "reward(worlds, terminated)['alive'] is float 1.0, but must be a float32 tensor of shape [env], here [4]",
    ),
    "a bool reward": (
        broken(Drift, reward=lambda task, worlds, terminated: {"alive": ~terminated}),
        "reward(worlds, terminated)['alive'] is a bool tensor of shape [4], but must be a float32 tensor",
    ),
    "a wide reward": (
        broken(Drift, reward=lambda task, worlds, terminated: {"place": worlds.qpos}),
        "reward(worlds, terminated)['place'] is a float32 tensor of shape [4, 1], but must be a float32 tensor",
    ),
    "a sum": (
        broken(Drift, reward=lambda task, worlds, terminated: worlds.qpos[:, 0]),
        "reward(worlds, terminated) is a float32 tensor of shape [4], but must be a dict with names as keys",
    ),
    "no terms": (
        broken(Drift, reward=lambda *_: {}),
        "reward(worlds, terminated) is empty, but must have at least one term",
    ),
    # The rest
    "a wide measure": (
        broken(Lively, measure=lambda task, worlds: {"speed": worlds.qvel}),
        "measure(worlds)['speed'] is a float32 tensor of shape [4, 1], but must be a float32 tensor of shape [env]",
    ),
    "a flat push": (
        broken(Lively, push=lambda task, worlds: worlds.qvel[:, 0]),
        "push(worlds) is a float32 tensor of shape [4], but must be a float32 tensor of shape [env, nv], here [4, 1]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_says_what_to_change(fault: str):
    task, said = FAULTS[fault]
    with pytest.raises(UserError) as refused:
        RobotEnv(task, ENVS)
    assert str(refused.value).startswith("task Broken: ")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_task_that_is_right_is_not_refused():
    env = RobotEnv(Recalling(), ENVS)
    env.step(torch.zeros(ENVS, 1))


def test_whole_numbers_among_constants_become_floats():
    env = RobotEnv(broken(Drift, constants=lambda task: {"a": (0, 1)}), ENVS)
    assert env.worlds.constants["a"].dtype == torch.float32


def test_an_option_may_be_called_start():
    RobotEnv(broken(Drift, start=0.1), ENVS).step(torch.zeros(ENVS, 1))


def test_a_model_without_a_keyframe_is_enough():
    assert Drift().model().nkey == 0
    RobotEnv(Drift(), ENVS)
