"""A hand turns the cube that lies on its palm until it lies as asked, then as asked next, and so on."""

import math
from dataclasses import dataclass
from typing import Literal

import mujoco
import torch
from torch import Tensor

from paceline.env.task import Command, Start, Worlds
from paceline.env.training_settings import TrainingSettings
from paceline.robots import shadow_hand
from paceline.tasks.registry import TaskEntry
from paceline.tensors import rotations
from paceline.validation import above_zero, finite_options, not_negative, options, physics_rate, within_unit

_JOINTS = len(shadow_hand.JOINTS)
# Of `qpos` and `qvel`: the hand's joints come first, then the cube.
_PLACE, _ROTATION, _VELOCITY = slice(_JOINTS, _JOINTS + 3), slice(_JOINTS + 3, None), slice(_JOINTS, _JOINTS + 3)
# The cube is lower when it lies on the palm than where it is let go.
_LIES_LOWER = 0.04
_HIDDEN = (512, 256, 128)


@dataclass(frozen=True)
class ShadowHandRepose:
    """Observations, rewards and limits as in Isaac Lab's Isaac-Repose-Cube-Shadow-Direct-v0."""

    episode_seconds: float = 10.0
    decimation: int = 2
    physics_hz: float = 120.0
    """Physics steps per second."""
    policy_sees: Literal["state", "fingertips"] = "state"
    """All 157 numbers, or the 42 of them that cameras could tell: the fingertips' and the cube's place, its rotation
    from the goal's, and the latest action. The critic sees all in either case, and the forces at the fingertips."""
    tolerance: float = 0.1
    """A goal is reached when the cube's rotation is no further off; radians."""
    new_target: float = 1.0
    """How much of an action takes effect at once; the rest of the joints' targets stays as it was. After a
    reset that is zero for all joints, wherever they start."""
    fall_distance: float = 0.24
    """From where the cube should be, metres; at it the episode ends."""
    fall_penalty: float = 0.0
    """For a fall, once."""
    success_bonus: float = 250.0
    """For a goal that is reached."""
    reward_scale: float = 0.01
    """What all rewards are multiplied by."""
    start_place: float = 0.01
    """How far off the cube starts along each axis, at most; metres."""
    start_angles: float = 0.2
    """The joints start within this part of their ranges, about zero."""

    num_actions = len(shadow_hand.ACTUATED_JOINTS)
    reset_numbers = 3 + 2 + 2 + _JOINTS
    step_numbers = 2

    def __post_init__(self) -> None:
        options(above_zero, self, "tolerance", "fall_distance", "reward_scale", "new_target")
        options(physics_rate, self, "physics_hz")
        finite_options(self)
        options(within_unit, self, "new_target", "start_angles")
        options(not_negative, self, "fall_penalty", "success_bonus", "start_place")

    def model(self) -> mujoco.MjModel:
        return shadow_hand.scene(self.physics_hz).compile()

    def constants(self) -> dict[str, tuple[float, ...]]:
        ranges = dict(zip(shadow_hand.JOINTS, shadow_hand.RANGES, strict=True))
        motors = [ranges[joint] for joint in shadow_hand.ACTUATED_JOINTS]
        x, y, z = shadow_hand.CUBE.start
        return {
            "low": tuple(low for low, _ in ranges.values()),
            "width": tuple(high - low for low, high in ranges.values()),
            "middle_target": tuple(0.5 * (low + high) for low, high in motors),
            "half_target": tuple(0.5 * (high - low) for low, high in motors),
            "start": (x, y, z),
            "in_hand": (x, y, z - _LIES_LOWER),
        }

    def memory(self) -> dict[str, int]:
        return {"goal": 4, "angle": 1, "reached": 1, "successes": 1}

    def start(self, worlds: Worlds, uniform: Tensor) -> Start:
        place, rotation, goal, angles = uniform.split((3, 2, 2, _JOINTS), dim=1)
        row = worlds.constants
        nothing = torch.zeros_like(uniform[:, :1])
        qpos = torch.cat(
            (
                self.start_angles * (row["low"] + angles * row["width"]),
                row["start"] + self.start_place * (2.0 * place - 1.0),
                _rotation(rotation),
            ),
            dim=1,
        )
        return Start(qpos, torch.zeros_like(worlds.qvel), {"goal": _rotation(goal), "successes": nothing})

    def advance(self, worlds: Worlds, uniform: Tensor) -> dict[str, Tensor]:
        # Computed once for reward, metrics and `resample`.
        off = rotations.difference(worlds.qpos[:, _ROTATION], worlds.memory["goal"])
        angle = rotations.angle(off).unsqueeze(1)
        reached = angle <= self.tolerance
        return {"angle": angle, "reached": reached.float(), "successes": worlds.memory["successes"] + reached}

    def resample(self, worlds: Worlds, uniform: Tensor) -> dict[str, Tensor]:
        reached = worlds.memory["reached"] > 0.0
        return {"goal": torch.where(reached, _rotation(uniform), worlds.memory["goal"])}

    def control(self, worlds: Worlds) -> Tensor:
        row = worlds.constants
        target = row["middle_target"] + row["half_target"] * worlds.action.clamp(-1.0, 1.0)
        return worlds.sim.ctrl + self.new_target * (target - worlds.sim.ctrl)

    def observe(self, worlds: Worlds) -> dict[str, Tensor]:
        row, goal, (place, rotation) = worlds.constants, worlds.memory["goal"], self._cube(worlds)
        action, off = worlds.action.clamp(-1.0, 1.0), rotations.difference(rotation, goal)
        fingertips = _fingertips(worlds, "position")
        state = (
            2.0 * (worlds.qpos[:, :_JOINTS] - row["low"]) / row["width"] - 1.0,
            0.2 * worlds.qvel[:, :_JOINTS],
            place,
            rotation,
            worlds.qvel[:, _VELOCITY],
            0.2 * worlds.sensor("cube_spin"),
            row["in_hand"].expand_as(place),
            goal,
            off,
            fingertips,
            _fingertips(worlds, "rotation"),
            _fingertips(worlds, "velocity"),
            _fingertips(worlds, "spin"),
            action,
        )
        seen = state if self.policy_sees == "state" else (fingertips, place, off, action)
        return {
            "policy": torch.cat(seen, dim=1),
            "critic": torch.cat((*state, _fingertips(worlds, "wrench")), dim=1),
        }

    def terminated(self, worlds: Worlds) -> Tensor:
        return self._distance(worlds) >= self.fall_distance

    def reward(self, worlds: Worlds, terminated: Tensor) -> dict[str, Tensor]:
        each = {
            "distance": -10.0 * self._distance(worlds),
            "rotation": 1.0 / (worlds.memory["angle"][:, 0] + 0.1),
            "effort": -2e-4 * worlds.action.square().sum(1),
            "success": self.success_bonus * worlds.memory["reached"][:, 0],
            "fall": -self.fall_penalty * terminated.float(),
        }
        return {name: self.reward_scale * term for name, term in each.items()}

    def measure(self, worlds: Worlds) -> dict[str, Tensor]:
        """Successes are those of a whole episode, one after the other without a fall."""
        memory = worlds.memory
        # So that the mean over an episode's steps is its last count: up to step t, these add up to t times the count.
        successes = memory["successes"] + memory["reached"] * (worlds.episode_step - 1).unsqueeze(1)
        return {"successes": successes[:, 0], "angle_to_goal": memory["angle"][:, 0]}

    def shown(self, worlds: Worlds) -> Command:
        return Command({}, rotation=worlds.memory["goal"])

    def _cube(self, worlds: Worlds) -> tuple[Tensor, Tensor]:
        return worlds.qpos[:, _PLACE], worlds.qpos[:, _ROTATION]

    def _distance(self, worlds: Worlds) -> Tensor:
        return (worlds.qpos[:, _PLACE] - worlds.constants["in_hand"]).norm(dim=1)


def _rotation(uniform: Tensor) -> Tensor:
    """Any at all would do; this is how the published task draws cube and goal, from [world, 2]."""
    x, y = (math.pi * (2.0 * uniform - 1.0)).unbind(1)
    return rotations.about_x_after_y(x, y)


def _fingertips(worlds: Worlds, kind: str) -> Tensor:
    """Sensors of one kind, of all fingers; they stand side by side."""
    first, last = shadow_hand.FINGERS[0], shadow_hand.FINGERS[-1]
    return worlds.sim.sensordata[:, worlds.sensors[f"{first}_{kind}"].start : worlds.sensors[f"{last}_{kind}"].stop]


ENTRY = TaskEntry(
    ShadowHandRepose,
    summary="a Shadow Hand turns a cube on its palm to one given rotation after another",
    training=TrainingSettings(
        horizon=16,
        hidden_layers=(512, 256, 128),
        learning_rate=5e-4,
        desired_kl=0.016,
        overrides={
            "rl_games": {
                "bounds_loss_coef": 1e-4,
                "critic_coef": 4.0,
                "entropy_coef": 0.0,
                "schedule_type": "standard",
            },
            "skrl": {"entropy_loss_scale": 0.0},
        },
    ),
    max_iterations=3000,
    cpu_envs=512,
    gpu_envs=8192,
)
