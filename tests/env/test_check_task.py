"""Errors of a task that breaks its contract say what to change, when its env is made."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
import pytest
import torch

from paceline.env.policy_interface import ActionMapping
from paceline.env.robot_env import RobotEnv
from paceline.env.task import ResetState, Task
from paceline.errors import UserError
from tests.env.drift import Drift
from tests.env.lively import Lively

ENVS = 4


@dataclass(frozen=True)
class Recalling(Lively):
    """A correct task with state."""

    def update_state(self, state: Any, uniform: Any) -> dict[str, Any]:
        return {"steps": state.task_state["steps"] + 1.0}

    def resample(self, state: Any, uniform: Any) -> dict[str, Any]:
        return {"command": uniform}


def broken(kind: type, **members: Any) -> Any:
    """Return a task with these members."""
    return type("Broken", (kind,), members)()


def without(kind: type, name: str) -> Any:
    """Return a task that lacks a member."""
    return broken(kind, **{name: getattr(Task, name, None)})


def missing(name: str) -> Any:
    """Return a task without an attribute that Drift defines as an option."""
    return broken(Drift, **{name: None, "__init__": lambda task: None})


class Broken(Drift):
    """A task whose options may be wrong."""


@dataclass(frozen=True)
class Weights:
    place: float = 1.0
    crash: float = -5.0


def option(name: str, value: Any) -> Any:
    """Return a task with one more option."""
    field = dataclasses.field(default=value)
    return dataclasses.make_dataclass("Broken", [(name, type(value), field)], bases=(Drift,), frozen=True)()


def model(xml: str) -> Any:
    return lambda task: mujoco.MjModel.from_xml_string(f"<mujoco>{xml}</mujoco>")


def reset(**parts: Any) -> Any:
    def made(task: Any, state: Any, uniform: Any) -> ResetState:
        found = {"qpos": state.qpos, "qvel": state.qvel, "task_state": {"level": state.task_state["level"]}} | parts
        return ResetState(**found)

    return made


BODY = "<worldbody><body><joint name='j'/><geom size='.1'/></body></worldbody>"
FAULTS: dict[str, tuple[Any, str]] = {
    # Members
    "no task": (type("Broken", (), {})(), "it is not a Task: write class Broken(Task), with paceline.env.task.Task"),
    "no control": (
        without(Drift, "control"),
        "no function 'control': define control(state: EnvState) -> Tensor",
    ),
    "no reset": (
        without(Drift, "reset"),
        "define reset(state: EnvState, uniform: Tensor) -> ResetState",
    ),
    "no state_spec": (
        broken(Drift, resample=lambda *_: {}),
        "it has 'resample' but no task state: define state_spec() -> dict[str, int]",
    ),
    "no actions": (without(Drift, "num_actions"), "'num_actions' is None, but must be a whole number from 1 to"),
    "zero actions": (broken(Drift, num_actions=0), "'num_actions' is 0, but must be a whole number from 1 to"),
    "float samples": (broken(Drift, num_reset_samples=2.0), "'num_reset_samples' is 2.0, but must be a whole number"),
    "no decimation": (missing("decimation"), "'decimation' is None, but must be a whole number from 1 to 10000"),
    "no episode_seconds": (
        missing("episode_seconds"),
        "'episode_seconds' is None, but must be the time limit in seconds, above 0",
    ),
    "no physics steps": (Broken(decimation=0), "'decimation' is 0, but must be a whole number from 1 to 10000"),
    "no time": (
        Broken(episode_seconds=0.0),
        "'episode_seconds' is 0.0, but must be the time limit in seconds, above 0",
    ),
    "an option push_velocity": (
        broken(Drift, push_velocity=0.5),
        "'push_velocity' is 0.5, but push_velocity() is a function of tasks: rename the option",
    ),
    "an option metrics": (broken(Drift, metrics=True), "'metrics' is True, but metrics() is a function of tasks"),
    "history": (
        broken(Drift, observation_history=0),
        "'observation_history' is 0, but must be a whole number from 1 to 1000",
    ),
    "randomized_fields": (
        broken(Drift, randomized_fields=lambda task: True),
        "randomized_fields() is True, but must be a tuple of Randomization",
    ),
    # Names
    "measures": (
        broken(Drift, measures=lambda *_: {}),
        "tasks have no 'measures': did you mean 'metrics'? otherwise rename the member",
    ),
    "randomisation": (broken(Drift, randomisation=()), "did you mean 'randomized_fields'? otherwise rename the member"),
    "observ": (broken(Drift, observ=lambda *_: {}), "did you mean 'observe'?"),
    "terminate": (broken(Drift, terminate=lambda *_: {}), "did you mean 'terminated'?"),
    "updatestate": (broken(Drift, updatestate=lambda *_: {}), "did you mean 'update_state'?"),
    "num_action": (broken(Drift, num_action=3), "did you mean 'num_actions'?"),
    "an option that is very close": (
        option("decimations", 4),
        "did you mean 'decimation'? otherwise rename the option",
    ),
    # The model
    "no model": (broken(Drift, model=lambda task: None), "model() is NoneType None, but must be a mujoco.MjModel"),
    "a path": (
        broken(Drift, model=lambda task: "robot.xml"),
        "model() is str 'robot.xml', but must be a mujoco.MjModel",
    ),
    "a spec": (
        broken(Drift, model=lambda task: mujoco.MjSpec()),
        "mujoco.MjModel: call compile() of a MjSpec",
    ),
    "no actuators": (
        broken(Drift, model=model(BODY)),
        "its model has no actuators: add them in the <actuator> section",
    ),
    "no joints": (broken(Drift, model=model("")), "its model has no joints: give the bodies that move a <joint>"),
    # Where an episode starts
    "flat reset": (
        broken(Drift, reset=lambda task, state, uniform: ResetState(uniform[:, 0], uniform[:, 1])),
        "qpos of reset(state, uniform) is a float32 tensor of shape [4], but must be a float32 tensor of shape "
        "[env, nq], here [4, 1]",
    ),
    "one row for all": (
        broken(Drift, reset=lambda task, state, uniform: ResetState(uniform[:, :1], torch.zeros(1))),
        "qvel of reset(state, uniform) is a float32 tensor of shape [1], but must be a float32 tensor of shape [env, ",
    ),
    "reset without a velocity": (
        broken(Drift, reset=lambda task, state, uniform: uniform[:, :1]),
        "reset(state, uniform) is a float32 tensor of shape [4, 1], but must be a ResetState(qpos, qvel, task_state)",
    ),
    "reset in float64": (
        broken(Drift, reset=lambda task, state, uniform: ResetState(uniform[:, :1].double(), uniform[:, 1:])),
        "qpos of reset(state, uniform) is a float64 tensor of shape [4, 1], but must be a float32 tensor",
    ),
    "reset to NaN": (
        broken(Drift, reset=lambda task, state, uniform: ResetState(uniform[:, :1], uniform[:, :1] / 0.0)),
        "qvel of reset(state, uniform) has numbers that are not finite",
    ),
    "a plain tuple": (
        broken(Recalling, reset=lambda task, state, uniform: (state.qpos, state.qvel)),
        "reset(state, uniform) is a tuple, but must be a ResetState(qpos, qvel, task_state)",
    ),
    # Task state
    "an unknown part": (
        broken(Recalling, update_state=lambda task, state, uniform: {"stepz": state.qpos}),
        "update_state(state, uniform) has 'stepz', but state_spec() has only 'command', 'level', 'steps'",
    ),
    "a narrow part": (
        broken(Recalling, reset=reset(task_state={"level": torch.zeros(ENVS, 1)})),
        "task_state of reset(state, uniform)['level'] is a float32 tensor of shape [4, 1], but must be a float32 "
        "tensor of shape [env, width], here [4, 2]",
    ),
    "an integer part": (
        broken(Recalling, resample=lambda task, state, uniform: {"command": uniform.long()}),
        "resample(state, uniform)['command'] is an int64 tensor of shape [4, 1], but must be a float32 tensor",
    ),
    "a part that is never set": (
        broken(Recalling, resample=lambda *_: {}),
        "state_spec() has 'command', which reset, update_state and resample never set: remove it",
    ),
    "no result": (
        broken(Recalling, update_state=lambda *_: None),
        "update_state(state, uniform) is NoneType None, but must be a dict with names as keys",
    ),
    "no width": (
        broken(Recalling, state_spec=lambda task: {"a": None}),
        "state_spec()['a'] is None, but must be the width",
    ),
    "a list of parts": (
        broken(Recalling, state_spec=lambda task: ["a"]),
        "state_spec() is list ['a'], but must be a dict",
    ),
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
        broken(Drift, control=lambda task, state: state.action[:, 0]),
        "control(state) is a float32 tensor of shape [4], but must be a float32 tensor of shape [env, actuator], here "
        "[4, 1]",
    ),
    "more actions than actuators": (
        broken(Drift, num_actions=3),
        "control(state) is a float32 tensor of shape [4, 3], but must be a float32 tensor of shape [env, actuator], ",
    ),
    "choices of another action": (
        broken(Drift, action_choices=(3, 2)),
        "'action_choices' is (3, 2), but must have one entry per action: 'num_actions' is 1",
    ),
    "one number of choices": (
        broken(Drift, action_choices=3),
        "'action_choices' is 3, but must be a tuple of numbers of choices, each above 0",
    ),
    "choices with a mapping": (
        broken(Drift, action_choices=(3,), action_mapping=lambda task, model: ActionMapping((1.0,), (0.0,))),
        "action_mapping(model) must be None: the actions are choices, (3,)",
    ),
    # Observations
    "no policy": (
        broken(Drift, observe=lambda task, state: {"obs": state.qpos}),
        "observe(state) has 'obs', but must have 'policy'",
    ),
    "a bare tensor": (
        broken(Drift, observe=lambda task, state: state.qpos),
        "observe(state) is a float32 tensor of shape [4, 1], but must be a dict with names as keys",
    ),
    "flat observations": (
        broken(Drift, observe=lambda task, state: {"policy": state.qpos[:, 0]}),
        "observe(state)['policy'] is a float32 tensor of shape [4], but must be a float32 tensor of shape [env, n], ",
    ),
    "no observations": (
        broken(Drift, observe=lambda task, state: {"policy": state.qpos[:, :0]}),
        "observe(state)['policy'] is a float32 tensor of shape [4, 0], but must be a float32 tensor of shape [env, n]",
    ),
    "observations of one env": (
        broken(Drift, observe=lambda task, state: {"policy": state.qpos, "critic": state.qpos[:1]}),
        "observe(state)['critic'] is a float32 tensor of shape [1, 1], but must be a float32 tensor of shape [env, n]",
    ),
    "observations in float64": (
        broken(Drift, observe=lambda task, state: {"policy": state.qpos.double()}),
        "observe(state)['policy'] is a float64 tensor of shape [4, 1], but must be a float32 tensor",
    ),
    "numpy": (
        broken(Drift, observe=lambda task, state: {"policy": np.zeros((ENVS, 100))}),
        "observe(state)['policy'] is a ndarray, but must be a float32 tensor of shape [env, n], here [4, 1]",
    ),
    "another device": (
        broken(Drift, observe=lambda task, state: {"policy": state.qpos.to("meta")}),
        "observe(state)['policy'] is on meta, but must be on cpu, as state.qpos is",
    ),
    # Ends and rewards
    "a float end": (
        broken(Drift, terminated=lambda task, state: state.qpos[:, 0]),
        "terminated(state) is a float32 tensor of shape [4], but must be a bool tensor of shape [env], here [4]",
    ),
    "a wide end": (
        broken(Drift, terminated=lambda task, state: state.qpos > 0.0),
        "terminated(state) is a bool tensor of shape [4, 1], but must be a bool tensor of shape [env], here [4]",
    ),
    "a plain bool": (
        broken(Drift, terminated=lambda task, state: False),
        "terminated(state) is bool False, but must be a bool tensor of shape [env], here [4]",
    ),
    "a float reward": (
        broken(Drift, reward=lambda task, state, terminated: {"alive": 1.0}),
        "reward(state, terminated)['alive'] is float 1.0, but must be a float32 tensor of shape [env], here [4]",
    ),
    "a bool reward": (
        broken(Drift, reward=lambda task, state, terminated: {"alive": ~terminated}),
        "reward(state, terminated)['alive'] is a bool tensor of shape [4], but must be a float32 tensor",
    ),
    "a wide reward": (
        broken(Drift, reward=lambda task, state, terminated: {"place": state.qpos}),
        "reward(state, terminated)['place'] is a float32 tensor of shape [4, 1], but must be a float32 tensor",
    ),
    "a sum": (
        broken(Drift, reward=lambda task, state, terminated: state.qpos[:, 0]),
        "reward(state, terminated) is a float32 tensor of shape [4], but must be a dict with names as keys",
    ),
    "no terms": (
        broken(Drift, reward=lambda *_: {}),
        "reward(state, terminated) is empty, but must have at least one term",
    ),
    "a term without a weight": (
        broken(
            type(option("rewards", Weights())),
            reward=lambda task, state, terminated: {"crush": state.qpos[:, 0]},
        ),
        "unknown reward term 'crush': did you mean 'crash'? choose from crash, place, or add a weight",
    ),
    # The rest
    "a wide metric": (
        broken(Lively, metrics=lambda task, state: {"speed": state.qvel}),
        "metrics(state)['speed'] is a float32 tensor of shape [4, 1], but must be a float32 tensor of shape [env]",
    ),
    "a flat push": (
        broken(Lively, push_velocity=lambda task, state: state.qvel[:, 0]),
        "push_velocity(state) is a float32 tensor of shape [4], but must be a float32 tensor of shape [env, nv], here",
    ),
    "a flat goal": (
        broken(Drift, mocap_pos=lambda task, state: state.qpos),
        "mocap_pos(state) is a float32 tensor of shape [4, 1], but must be a float32 tensor of shape [env, nmocap, n]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_says_what_to_change(fault: str):
    task, message = FAULTS[fault]
    with pytest.raises(UserError) as refused:
        RobotEnv(task, ENVS)
    assert str(refused.value).startswith("task Broken: ")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_correct_task_is_accepted():
    env = RobotEnv(Recalling(), ENVS)
    env.step(torch.zeros(ENVS, 1))


def test_whole_numbers_among_constants_become_floats():
    env = RobotEnv(broken(Drift, constants=lambda task: {"a": (0, 1)}), ENVS)
    assert env.env_state.constants["a"].dtype == torch.float32


@pytest.mark.parametrize(
    "task",
    [
        option("rewards", Weights()),
        option("randomization", Weights()),
        option("push", 0.5),
        option("history", 2),
        option("reset_noise", 0.1),
        broken(Drift, terrain=property(lambda task: 1), moving=lambda task, state: state.qpos),
    ],
)
def test_options_and_helpers_with_other_names_are_accepted(task: Any):
    RobotEnv(task, ENVS).step(torch.zeros(ENVS, 1))


def test_a_model_needs_no_keyframe():
    assert Drift().model().nkey == 0
    RobotEnv(Drift(), ENVS)
