"""A quadruped follows a commanded velocity over rough terrain whose difficulty follows its progress."""

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Self

import mujoco
import torch
from annotated_types import Ge, Le
from torch import Tensor

from paceline.env.policy_interface import ObservationPart
from paceline.env.task import EnvState, ResetState
from paceline.errors import UserError
from paceline.robots.legged import GO1
from paceline.robots.terrain import KINDS, PATCH, Terrain
from paceline.tasks.registry import TaskEntry
from paceline.tasks.velocity import go1_velocity
from paceline.tasks.velocity.go1_velocity import Go1Rewards, Go1Velocity

# Points of the height scan: meters ahead of the trunk and to its left.
_SCAN = tuple(product([round(0.15 * i, 2) for i in range(-5, 6)], [round(0.15 * i, 2) for i in range(-3, 4)]))
NUM_SCAN_POINTS = len(_SCAN)
_Levels = Annotated[int, Ge(1), Le(100)]
_MAX_BORDER = 1e6
"""Maximum width of the flat border around the terrain, m."""
_SCAN_NOISE = 0.05
"""Half-width of the noise of the height scan, m."""
# Slopes and stairs need vertical velocity and tilt.
_REWARDS = Go1Rewards(lin_vel_z=-0.5, flat_orientation=-0.5)


@dataclass(frozen=True)
class Go1VelocityRough(Go1Velocity):
    """Each env has one kind of terrain. After an episode, its level increases by one if the robot followed its commands
    to the time limit, and decreases by one if the robot fell or walked less than half of the commanded distance. After
    the last level, the level is random."""

    terrain_levels: _Levels = 10
    """Number of levels of difficulty, 1 to 100. Each level has a patch of every kind of terrain."""
    initial_terrain_levels: _Levels = 4
    """Number of easiest levels from which the first level is sampled, 1 to --env.terrain-levels."""
    curriculum: bool = True
    """Adapt the level to the progress of the robot. Otherwise the level of every episode is random."""
    terrain_seed: Annotated[int, Ge(0)] = 0
    """Seed of the random parts of the terrain, at least 0."""
    rewards: Go1Rewards = _REWARDS

    num_reset_samples = Go1Velocity.num_reset_samples + 2
    num_step_samples = Go1Velocity.num_step_samples + NUM_SCAN_POINTS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initial_terrain_levels > self.terrain_levels:
            first, all_levels = self.initial_terrain_levels, self.terrain_levels
            raise UserError(f"--env.initial-terrain-levels {first} is more than --env.terrain-levels {all_levels}")

    @property
    def terrain(self) -> Terrain:
        # The border is so wide that a robot cannot leave it within an episode, also if it is pushed.
        distance = 1.5 * math.hypot(self.max_forward_speed, self.max_lateral_speed) * self.episode_seconds
        return Terrain(self.terrain_levels, border=min(max(5.0, distance), _MAX_BORDER), seed=self.terrain_seed)

    def scene(self) -> mujoco.MjSpec:
        """Return the model of robot and terrain before it is compiled."""
        scene = GO1.scene(self.robot)
        self.terrain.replace_floor(scene)
        # Four patches share a corner at the origin. The first level of waves is flat in its middle, at height zero.
        home = scene.keys[0]
        home.qpos = [*self.terrain.middle(0.0, 0.0), *list(home.qpos)[2:]]
        return scene

    def model(self) -> mujoco.MjModel:
        return self.scene().compile()

    def constants(self) -> dict[str, tuple[float, ...]]:
        forward, left = zip(*_SCAN, strict=True)
        heights = tuple(self.terrain.heights().ravel().tolist())
        return super().constants() | {"terrain_heights": heights, "scan_forward": forward, "scan_left": left}

    def state_spec(self) -> dict[str, int]:
        return super().state_spec() | {
            "started": 1,  # 1 after the first reset.
            "terrain_level": 1,
            "terrain_kind": 1,
            "max_distance": 1,  # Largest distance from the center of the patch in this episode, m.
            "distance_walked": 1,  # Distance along the commands in this episode, m.
            "distance_commanded": 1,
            "scan_noise": NUM_SCAN_POINTS,
        }

    def reset(self, state: EnvState, uniform: Tensor) -> ResetState:
        own, rest = uniform[:, :2], uniform[:, 2:]
        flat = super().reset(state, rest)
        started = state.task_state["started"] > 0.0
        kind = torch.where(started, state.task_state["terrain_kind"], (own[:, :1] * len(KINDS)).floor())
        level = self._next_level(state, started, own[:, 1:])
        position = flat.qpos[:, :2] + torch.cat(self.terrain.middle(level, kind), dim=1)
        ground = self.terrain.height_at(state.constants["terrain_heights"], *position.split(1, dim=1))
        zero = torch.zeros_like(level)
        task_state = {"started": torch.ones_like(level), "terrain_level": level, "terrain_kind": kind}
        task_state |= {"max_distance": zero, "distance_walked": zero, "distance_commanded": zero}
        qpos = torch.cat((position, flat.qpos[:, 2:3] + ground, flat.qpos[:, 3:]), dim=1)
        return ResetState(qpos, flat.qvel, flat.task_state | task_state)

    def _next_level(self, state: EnvState, started: Tensor, uniform: Tensor) -> Tensor:
        """Return the level of the next episode, [env, 1]."""
        random_level = (uniform * self.terrain_levels).floor()
        if not self.curriculum:
            return random_level
        walked, commanded = state.task_state["distance_walked"], state.task_state["distance_commanded"]
        fell, time_out = self.ending(state)
        # A robot that turns in place has not crossed its terrain.
        crossed = state.task_state["max_distance"] > 0.25 * PATCH
        up = time_out & ~fell & (walked > 0.75 * commanded) & crossed
        down = fell | (time_out & (walked < 0.5 * commanded))
        level = (state.task_state["terrain_level"] + up.float() - down.float()).clamp(min=0.0)
        level = torch.where(level < self.terrain_levels, level, random_level)
        return torch.where(started, level, (uniform * self.initial_terrain_levels).floor())

    def for_evaluation(self) -> Self:
        return replace(super().for_evaluation(), curriculum=False)

    def update_state(self, state: EnvState, uniform: Tensor) -> dict[str, Tensor]:
        rest, noise = uniform[:, :-NUM_SCAN_POINTS], uniform[:, -NUM_SCAN_POINTS:]
        previous = state.task_state
        command, velocity = previous["command"][:, :2], state.sensor("velocity")[:, :2]
        commanded_speed = command.norm(dim=1, keepdim=True)
        speed = (velocity * command).sum(1, keepdim=True) / commanded_speed.clamp(min=1e-3)
        center = torch.cat(self.terrain.middle(previous["terrain_level"], previous["terrain_kind"]), dim=1)
        distance = (state.qpos[:, :2] - center).abs().amax(1, keepdim=True)
        return super().update_state(state, rest) | {
            "max_distance": torch.maximum(previous["max_distance"], distance),
            "distance_walked": previous["distance_walked"] + speed * self.step_seconds,
            "distance_commanded": previous["distance_commanded"] + commanded_speed * self.step_seconds,
            "scan_noise": 2.0 * noise - 1.0,
        }

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        flat, scan = super().observe(state), self._height_scan(state)
        noisy = scan + self.observation_noise_scale * _SCAN_NOISE * state.task_state["scan_noise"]
        # The height of the trunk, which is last, is replaced by the scan, which is relative to the ground.
        return {
            "policy": torch.cat((flat["policy"], noisy), dim=1),
            "critic": torch.cat((flat["critic"][:, :-1], scan), dim=1),
        }

    def observation_parts(self, model: mujoco.MjModel) -> dict[str, tuple[ObservationPart, ...]]:
        groups = super().observation_parts(model)
        meaning = "Height of the terrain relative to the ground under a standing robot. Labels: meters ahead and left."
        points = tuple(f"{forward:g} {left:g}" for forward, left in _SCAN)
        scan = ObservationPart(
            "terrain_heights", NUM_SCAN_POINTS, "m", clip=(-1.0, 1.0), labels=points, description=meaning
        )
        return {"policy": (*groups["policy"], scan), "critic": (*groups["critic"][:-1], scan)}

    def metrics(self, state: EnvState) -> dict[str, Tensor]:
        return super().metrics(state) | {"terrain_level": state.task_state["terrain_level"][:, 0]}

    def _height_scan(self, state: EnvState) -> Tensor:
        """Return the height of the terrain around the robot relative to the ground under a standing robot, m,
        [env, point]."""
        x, y, z, qw, qx, qy, qz = state.qpos[:, :7].split(1, dim=1)
        # Horizontal direction of the forward axis of the trunk.
        forward_x, forward_y = 1.0 - 2.0 * (qy * qy + qz * qz), 2.0 * (qx * qy + qw * qz)
        length = torch.sqrt(forward_x * forward_x + forward_y * forward_y).clamp(min=1e-6)
        cos, sin = forward_x / length, forward_y / length
        constants, forward, left = state.constants, state.constants["scan_forward"], state.constants["scan_left"]
        scan_x, scan_y = x + cos * forward - sin * left, y + sin * forward + cos * left
        height = self.terrain.height_at(constants["terrain_heights"], scan_x, scan_y)
        return (height - z + constants["default_height"]).clamp(-1.0, 1.0)


ENTRY = TaskEntry(
    Go1VelocityRough,
    summary="a quadruped like the Unitree Go1 follows a commanded velocity on rough terrain",
    training=replace(go1_velocity.ENTRY.training, hidden_layers=(512, 256, 128)),
    max_iterations=1500,
    cpu_envs=512,
)
