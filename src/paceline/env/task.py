"""Contract of a task: a MuJoCo model and pure tensor functions over all envs."""

from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, Self

import mujoco
import torch
from annotated_types import Ge, Le
from torch import Tensor

from paceline.cameras.camera import Camera
from paceline.env.policy_interface import ActionMapping, CommandRange, ObservationPart
from paceline.env.randomization import Randomization
from paceline.sim.simulation import Sim

MAX_DECIMATION = 10_000
Decimation = Annotated[int, Ge(1), Le(MAX_DECIMATION)]
"""Number of physics steps per control step."""


@dataclass(frozen=True)
class EnvState:
    """State of all envs, one row per env. A task reads it and never writes to it."""

    sim: Sim
    sensors: dict[str, slice]
    """Columns of each sensor in `sim.sensordata`, by name."""
    action: Tensor
    """Latest action of the policy, [env, actions]; zero after a reset."""
    last_action: Tensor
    """Action before the latest one, [env, actions]; zero after a reset."""
    episode_step: Tensor
    """Number of control steps since the reset, int64 [env]."""
    task_state: dict[str, Tensor] = field(default_factory=dict)
    """State that the task declares in `Task.state_spec`, each [env, width]."""
    constants: dict[str, Tensor] = field(default_factory=dict)
    """Rows of `Task.constants` on the device of the envs, each [1, n]."""

    @property
    def qpos(self) -> Tensor:
        return self.sim.qpos

    @property
    def qvel(self) -> Tensor:
        return self.sim.qvel

    def sensor(self, name: str) -> Tensor:
        """Return the values of a sensor, [env, dim]."""
        if name not in self.sensors:
            raise KeyError(f"no sensor {name!r} in the model; choose from {list(self.sensors)}")
        return self.sim.sensordata[:, self.sensors[name]]


class ResetState(NamedTuple):
    """Initial state of an episode, for all envs. Only the envs that start an episode use it."""

    qpos: Tensor
    """Positions, [env, nq]."""
    qvel: Tensor
    """Velocities, [env, nv]."""
    task_state: dict[str, Tensor] = {}  # noqa: RUF012 (the fields of a tuple are never written to)
    """Initial values of the task state, each [env, width]. Entries that are left out keep their values."""


class CommandDisplay(NamedTuple):
    """Command of a robot and what the robot does, for `paceline play`."""

    numbers: dict[str, tuple[Tensor, ...]]
    """Commanded value and, if there is one, the actual value, each [env], by name and unit, such as "forward m/s"."""
    velocity: tuple[Tensor, Tensor] | None = None
    """Commanded and actual velocity, each [env, 2], forward and to the left of the robot in m/s. They are rendered as
    arrows above the robot."""
    rotation: Tensor | None = None
    """Commanded rotation as a quaternion, [env, 4]. The mocap body of the model is rendered with it."""


class Task:
    """Base class of all tasks. A task is a frozen dataclass whose fields are its options.

    All functions are pure and have fixed shapes: no branch on the value of a tensor, no `.item()`, no `nonzero`, no
    boolean index. A whole rollout can then be captured as one CUDA graph.
    """

    # Required.

    episode_seconds: float
    """Time limit of an episode, s; above 0."""
    decimation: int
    """Number of physics steps per control step, at least 1."""
    num_actions: int
    """Width of an action."""
    num_reset_samples: int
    """Number of uniform samples per env that `reset` takes."""

    def model(self) -> mujoco.MjModel:
        """Return the model."""
        raise NotImplementedError

    def reset(self, state: EnvState, uniform: Tensor) -> ResetState:
        """Return the initial state of an episode for all envs, from samples in [0, 1) of shape [env,
        num_reset_samples]. `state` is that of the episode that ended, on which a curriculum can depend."""
        raise NotImplementedError

    def control(self, state: EnvState) -> Tensor:
        """Return the controls of the actuators for the latest action, [env, nu]."""
        raise NotImplementedError

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        """Return the observation groups, each [env, n]: "policy", and "critic" if the critic observes more. A policy
        that observes only images needs no group "policy"."""
        raise NotImplementedError

    def reward(self, state: EnvState, terminated: Tensor) -> dict[str, Tensor]:
        """Return the reward terms by name, each [env]. The reward is their sum."""
        raise NotImplementedError

    def terminated(self, state: EnvState) -> Tensor:
        """Return whether the episode has terminated, bool [env]. The env applies the time limit."""
        raise NotImplementedError

    # Optional. A hook that a task does not override costs nothing.

    action_choices: tuple[int, ...] = ()
    """Number of choices of each action, if the actions are discrete. `EnvState.action` then holds the indices of the
    choices, from 0."""
    num_step_samples: int = 0
    """Number of uniform samples per env and control step that `update_state` and `resample` take."""
    observation_history: int = 1
    """Number of successive observations that the group "policy" stacks, newest last. The first observation of an
    episode fills the places of those before it."""
    observation_delay: tuple[int, int] = (0, 0)
    """Minimum and maximum delay of the group "policy", in control steps. The delay is sampled in every episode."""

    def cameras(self) -> dict[str, Camera]:
        """Return the cameras by name. The model must have a camera of each name, see `cameras.camera.add_cameras`. Each
        stream of a camera is an observation group NAME_STREAM, for example "front_rgb"."""
        return {}

    def geom_classes(self) -> dict[str, int]:
        """Return the semantic classes of the camera stream "classes": regular expressions for names of geoms or bodies,
        with numbers from 1 to 255. All other geoms, and the background, have class 0."""
        return {}

    def constants(self) -> dict[str, tuple[float, ...]]:
        """Return rows of numbers that the functions use. They become tensors once and are `EnvState.constants`."""
        return {}

    def state_spec(self) -> dict[str, int]:
        """Return the name and width of each entry of the task state: commands, timers, curriculum levels. All are zero
        before the first episode. The task state is saved and restored with the envs, on any number of ranks."""
        return {}

    def update_state(self, state: EnvState, uniform: Tensor) -> dict[str, Tensor]:
        """Return new values of entries of the task state, each [env, width], from samples in [0, 1) of shape [env,
        num_step_samples]. It is called after every control step and before the reward, so it must not change
        commands or goals, which the policy has not observed yet: use `resample` for them."""
        return {}

    def resample(self, state: EnvState, uniform: Tensor) -> dict[str, Tensor]:
        """Return new commands or goals during an episode, as entries of the task state, each [env, width]. It is called
        after reward, termination, metrics and final observations are computed, which use the old values; the next
        observation shows the new ones. `uniform` holds the samples of `update_state`. In envs whose episode
        ended, the values of `reset` are used instead."""
        return {}

    def push_velocity(self, state: EnvState) -> Tensor:
        """Return the change of velocity that is applied after a control step, [env, nv]; zero for no push."""
        return torch.zeros_like(state.qvel)

    def mocap_pos(self, state: EnvState) -> Tensor:
        """Return the positions of the mocap bodies, such as a goal that cameras show, [env, nmocap, 3]. It is called
        after every reset and control step, before sensors are updated."""
        return state.sim.mocap_pos

    def metrics(self, state: EnvState) -> dict[str, Tensor]:
        """Return numbers of the latest control step to log, such as a tracking error, each [env]. The log has their
        means over an episode."""
        return {}

    def randomized_fields(self) -> tuple[Randomization, ...]:
        """Return the fields of the model that are sampled for each env."""
        return ()

    def observation_parts(self, model: mujoco.MjModel) -> dict[str, tuple[ObservationPart, ...]]:
        """Return the parts of each row of `observe`, by observation group, in the order of their columns. Exported
        policies contain them. Groups may be left out; `model` is that of the task."""
        return {}

    def action_mapping(self, model: mujoco.MjModel) -> ActionMapping | None:
        """Return what `control` computes, for exported policies; None if it cannot be expressed this way."""
        return None

    def command_ranges(self) -> dict[str, CommandRange]:
        """Return the largest ranges of the commands and goals by name, for exported policies and the viewer."""
        return {}

    def for_evaluation(self) -> Self:
        """Return the task without curriculum, at full difficulty. Trained policies are evaluated with it."""
        return self

    def command_display(self, state: EnvState) -> CommandDisplay | None:
        """Return the command for `paceline play` to show. It is called on the CPU only and need not be capturable."""
        return None


def overrides(task: Task, hook: str) -> bool:
    """Return whether a task overrides the function `hook` of `Task`."""
    return getattr(type(task), hook) is not getattr(Task, hook)
