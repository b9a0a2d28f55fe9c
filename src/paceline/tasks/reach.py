"""An arm moves its tool to a goal above a table."""

from dataclasses import dataclass

import mujoco
import torch
from torch import Tensor

from paceline.env.policy_interface import XYZ, ActionMapping, CommandRange, ObservationPart, joint_names
from paceline.env.task import Decimation, EnvState, ResetState, Task
from paceline.env.training_settings import TrainingSettings
from paceline.robots.scene import load
from paceline.tasks.registry import TaskEntry
from paceline.validation import NonNegative, Positive, Range, check_options

_JOINTS = 6


@dataclass(frozen=True)
class ReachRewards:
    """Weights of the reward terms, per control step. d is the distance of the tool from the goal, m."""

    distance: float = 0.5  # Weight of 1 - tanh(d / 0.3).
    fine_distance: float = 1.0  # Weight of 1 - tanh(d / 0.05).
    action_rate: float = -0.01  # Weight of the sum of squared changes of the action.
    joint_vel: float = -0.01  # Weight of the sum of squared joint velocities, (rad/s)^2.


@dataclass(frozen=True)
class Reach(Task):
    """An action moves the targets of the joints by small steps. The goal is the mocap body of the model."""

    episode_seconds: Positive = 3.0
    decimation: Decimation = 4
    """Number of physics steps of 10 ms per control step, at least 1."""
    action_scale: Positive = 0.05
    """Change of a joint's target at an action of 1, rad; above 0. Actions are clamped to -1 to 1."""
    observe_goal: bool = True
    """The policy observes the position of the goal relative to the tool. The critic always does."""
    goal_x: Range = (0.4, 0.65)
    """Minimum and maximum distance of the goal in front of the base of the arm, m."""
    goal_y: Range = (-0.2, 0.2)
    """Minimum and maximum distance of the goal to the left of the base, m."""
    goal_z: Range = (0.75, 0.95)
    """Minimum and maximum height of the goal, m. The surface of the table is at 0.7."""
    success_distance: Positive = 0.03
    """Maximum distance of the tool from the goal at the end of a successful episode, m; above 0. The metric "success"
    is the fraction of successful episodes."""
    reset_joint_pos_noise: NonNegative = 0.1
    """Maximum offset of the initial joint positions from the home pose, rad; at least 0."""
    rewards: ReachRewards = ReachRewards()

    num_actions = _JOINTS
    num_reset_samples = _JOINTS + 3

    def __post_init__(self) -> None:
        check_options(self)

    def model(self) -> mujoco.MjModel:
        return load("arm").compile()

    def constants(self) -> dict[str, tuple[float, ...]]:
        model = self.model()
        rows = {
            "default_joint_pos": model.key("home").qpos,
            "min_joint_pos": model.jnt_range[:, 0],
            "max_joint_pos": model.jnt_range[:, 1],
        }
        min_goal, max_goal = zip(self.goal_x, self.goal_y, self.goal_z, strict=True)
        return {name: tuple(row.tolist()) for name, row in rows.items()} | {"min_goal": min_goal, "max_goal": max_goal}

    def state_spec(self) -> dict[str, int]:
        # Goal position, joint targets, and the distances from tool to goal after the latest two control steps.
        return {"goal": 3, "joint_target": _JOINTS, "distance": 2}

    def reset(self, state: EnvState, uniform: Tensor) -> ResetState:
        noise, goal = uniform.split((_JOINTS, 3), dim=1)
        constants = state.constants
        joint_pos = constants["default_joint_pos"] + self.reset_joint_pos_noise * (2.0 * noise - 1.0)
        goal = constants["min_goal"] + goal * (constants["max_goal"] - constants["min_goal"])
        return ResetState(joint_pos, torch.zeros_like(joint_pos), {"goal": goal, "joint_target": joint_pos})

    def mocap_pos(self, state: EnvState) -> Tensor:
        return state.task_state["goal"].unsqueeze(1)

    def control(self, state: EnvState) -> Tensor:
        target = state.task_state["joint_target"] + self.action_scale * state.action.clamp(-1.0, 1.0)
        return target.clamp(state.constants["min_joint_pos"], state.constants["max_joint_pos"])

    def update_state(self, state: EnvState, uniform: Tensor) -> dict[str, Tensor]:
        distance = _to_goal(state).norm(dim=1, keepdim=True)
        last_distance = state.task_state["distance"][:, :1]
        return {"joint_target": state.sim.ctrl, "distance": torch.cat((distance, last_distance), dim=1)}

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        joints = (state.qpos - state.constants["default_joint_pos"], state.qvel, state.action.clamp(-1.0, 1.0))
        to_goal = _to_goal(state)
        policy = (*joints, to_goal) if self.observe_goal else joints
        target_error = state.task_state["joint_target"] - state.qpos
        critic = (*joints, to_goal, target_error, state.sensor("tool_pos"), state.sensor("tool_vel"))
        return {"policy": torch.cat(policy, dim=1), "critic": torch.cat(critic, dim=1)}

    def observation_parts(self, model: mujoco.MjModel) -> dict[str, tuple[ObservationPart, ...]]:
        names, home = joint_names(model), tuple(model.key("home").qpos.tolist())
        latest = "Latest action; zero at the start."
        joints = (
            ObservationPart("joint_pos", _JOINTS, "rad", offset=home, labels=names),
            ObservationPart("joint_vel", _JOINTS, "rad/s", labels=names),
            ObservationPart("actions", _JOINTS, clip=(-1.0, 1.0), labels=names, description=latest),
        )
        meaning = "Position of the goal relative to the tool, in the axes of the world."
        goal = ObservationPart("tool_to_goal", 3, "m", labels=XYZ, description=meaning)
        critic = (
            ObservationPart("joint_target_error", _JOINTS, "rad", labels=names, description="Target minus position."),
            ObservationPart("tool_pos", 3, "m", labels=XYZ, description="Position in the world."),
            ObservationPart("tool_vel", 3, "m/s", labels=XYZ, description="Velocity in the axes of the world."),
        )
        policy = (*joints, goal) if self.observe_goal else joints
        return {"policy": policy, "critic": (*joints, goal, *critic)}

    def action_mapping(self, model: mujoco.MjModel) -> ActionMapping:
        low, high = model.jnt_range.T.tolist()
        return ActionMapping(
            scale=(self.action_scale,) * _JOINTS,
            offset=(0.0,) * _JOINTS,
            clip=(-1.0, 1.0),
            relative=True,
            range=(tuple(low), tuple(high)),
            initial_control="joint_pos",
        )

    def command_ranges(self) -> dict[str, CommandRange]:
        low, high = zip(self.goal_x, self.goal_y, self.goal_z, strict=True)
        return {"goal": CommandRange(XYZ, ("m",) * 3, low, high, "goal")}

    def terminated(self, state: EnvState) -> Tensor:
        return torch.zeros_like(state.episode_step, dtype=torch.bool)

    def reward(self, state: EnvState, terminated: Tensor) -> dict[str, Tensor]:
        weights, distance = self.rewards, state.task_state["distance"][:, 0]
        return {
            "distance": weights.distance * (1.0 - torch.tanh(distance / 0.3)),
            "fine_distance": weights.fine_distance * (1.0 - torch.tanh(distance / 0.05)),
            "action_rate": weights.action_rate * (state.action - state.last_action).square().sum(1),
            "joint_vel": weights.joint_vel * state.qvel.square().sum(1),
        }

    def metrics(self, state: EnvState) -> dict[str, Tensor]:
        """Return numbers whose means over an episode are the distance at its end, m, and whether it is a success."""
        distances = state.task_state["distance"]
        successes = (distances <= self.success_distance).float()
        step = state.episode_step
        return {"success": _value_at_end(successes, step), "final_distance": _value_at_end(distances, step)}


def _to_goal(state: EnvState) -> Tensor:
    """Return the position of the goal relative to the tool in global axes, m, [env, 3]."""
    return state.task_state["goal"] - state.sensor("tool_pos")


def _value_at_end(values: Tensor, episode_step: Tensor) -> Tensor:
    """Return numbers whose mean over an episode is the value of its last step, from the values of this step and of the
    one before, [env, 2]. The sum of the first t numbers is t times the value of step t."""
    value, last_value = values.unbind(1)
    return value + (value - last_value) * (episode_step - 1)


ENTRY = TaskEntry(
    Reach,
    summary="an arm moves its tool to a goal above a table",
    training=TrainingSettings(horizon=16, hidden_layers=(128, 128), discount=0.95, entropy_weight=0.0),
    max_iterations=100,
)
