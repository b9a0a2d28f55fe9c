"""A quadruped follows a commanded velocity over ground that gets harder as it gets better."""

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Self

import mujoco
import torch
from torch import Tensor

from paceline.env.task import Start, Worlds
from paceline.env.training_settings import TrainingSettings
from paceline.errors import UserError
from paceline.robots.legged import GO1
from paceline.robots.terrain import KINDS, Terrain
from paceline.tasks.registry import TaskEntry
from paceline.tasks.velocity.go1_velocity import Go1Velocity
from paceline.validation import at_least_one, not_negative, options

# Where the ground's height is looked at: metres ahead of the trunk and to its left.
_SCAN = tuple(product([round(0.15 * i, 2) for i in range(-5, 6)], [round(0.15 * i, 2) for i in range(-3, 4)]))
_MOST_LEVELS = 100
_WIDEST_BORDER = 1e6
"""Meters."""
_SCAN_NOISE = 0.05
"""Half-width, metres."""


@dataclass(frozen=True)
class Go1VelocityRough(Go1Velocity):
    """A world keeps to one kind of ground. A robot that follows its commands to the end of an episode starts the next
    one a level up, one that falls or is left behind a level down, and one that masters the last level at any of them.

    The ground around the patches is so wide that nobody leaves it within an episode.
    """

    levels: int = 10
    """Of difficulty; each has a patch of every kind of ground."""
    first_levels: int = 4
    """The first episode's level is drawn from so many, the easiest."""
    curriculum: bool = True
    """Without it every episode's level is drawn, from all of them."""
    terrain_seed: int = 0
    """Of what is random in the ground."""

    def __post_init__(self) -> None:
        super().__post_init__()
        options(partial(at_least_one, most=_MOST_LEVELS), self, "levels", "first_levels")
        options(not_negative, self, "terrain_seed")
        if self.first_levels > self.levels:
            raise UserError(f"--env.first-levels {self.first_levels} is more than --env.levels {self.levels}")

    @property
    def terrain(self) -> Terrain:
        # Wide enough that nobody walks off the end of the world: a robot is pushed at times, but not for long.
        furthest = 1.5 * math.hypot(self.forward_speed, self.sideways_speed) * self.episode_seconds
        return Terrain(self.levels, border=min(max(5.0, furthest), _WIDEST_BORDER), seed=self.terrain_seed)

    @property
    def reset_numbers(self) -> int:
        return super().reset_numbers + 2

    @property
    def step_numbers(self) -> int:
        return super().step_numbers + len(_SCAN)

    def model(self) -> mujoco.MjModel:
        scene = GO1.scene(self.robot)
        self.terrain.replace_floor(scene)
        # The origin, where four patches meet, is no place to stand; the first level of waves is, at height zero.
        home = scene.keys[0]
        home.qpos = [*self.terrain.middle(0.0, 0.0), *list(home.qpos)[2:]]
        return scene.compile()

    def constants(self) -> dict[str, tuple[float, ...]]:
        ahead, left = zip(*_SCAN, strict=True)
        heights = tuple(self.terrain.heights().ravel().tolist())
        return super().constants() | {"heights": heights, "ahead": ahead, "left": left}

    def memory(self) -> dict[str, int]:
        return super().memory() | {
            # Whole numbers; the first is 1 once a world has had an episode.
            "begun": 1,
            "level": 1,
            "kind": 1,
            # Metres in this episode: furthest from the middle of the patch, along the commands, and as commanded.
            "reached": 1,
            "walked": 1,
            "asked": 1,
            "scan_noise": len(_SCAN),
        }

    def start(self, worlds: Worlds, uniform: Tensor) -> Start:
        own, numbers = uniform[:, :2], uniform[:, 2:]
        start = super().start(worlds, numbers)
        begun = worlds.memory["begun"] > 0.0
        kind = torch.where(begun, worlds.memory["kind"], (own[:, :1] * len(KINDS)).floor())
        level = self._next_level(worlds, begun, own[:, 1:])
        place = start.qpos[:, :2] + torch.cat(self.terrain.middle(level, kind), dim=1)
        ground = self._ground(worlds, *place.split(1, dim=1))
        nothing = torch.zeros_like(level)
        memory = {"begun": torch.ones_like(level), "level": level, "kind": kind}
        memory |= {"reached": nothing, "walked": nothing, "asked": nothing}
        qpos = torch.cat((place, start.qpos[:, 2:3] + ground, start.qpos[:, 3:]), dim=1)
        return Start(qpos, start.qvel, start.memory | memory)

    def _next_level(self, worlds: Worlds, begun: Tensor, uniform: Tensor) -> Tensor:
        """[world, 1]"""
        anywhere = (uniform * self.levels).floor()
        if not self.curriculum:
            return anywhere
        level, reached, walked, asked = (worlds.memory[name] for name in ("level", "reached", "walked", "asked"))
        fell = self.terminated(worlds).unsqueeze(1)
        to_the_end = (worlds.episode_step.unsqueeze(1) + 0.5) * self.step_seconds > self.episode_seconds
        # A robot that turns in circles where it started has not seen its ground.
        up = to_the_end & ~fell & (walked > 0.75 * asked) & (reached > 0.25 * self.terrain.patch)
        down = fell | (to_the_end & (walked < 0.5 * asked))
        level = (level + up.float() - down.float()).clamp(min=0.0)
        level = torch.where(level < self.levels, level, anywhere)
        return torch.where(begun, level, (uniform * self.first_levels).floor())

    def at_its_end(self) -> Self:
        return replace(super().at_its_end(), curriculum=False)

    def advance(self, worlds: Worlds, uniform: Tensor) -> dict[str, Tensor]:
        numbers, noise = uniform[:, : -len(_SCAN)], uniform[:, -len(_SCAN) :]
        memory = worlds.memory
        command, velocity = memory["command"][:, :2], worlds.sensor("velocity")[:, :2]
        speed = command.norm(dim=1, keepdim=True)
        along = (velocity * command).sum(1, keepdim=True) / speed.clamp(min=1e-3)
        away = worlds.qpos[:, :2] - torch.cat(self.terrain.middle(memory["level"], memory["kind"]), dim=1)
        return super().advance(worlds, numbers) | {
            "reached": torch.maximum(memory["reached"], away.abs().amax(1, keepdim=True)),
            "walked": memory["walked"] + along * self.step_seconds,
            "asked": memory["asked"] + speed * self.step_seconds,
            "scan_noise": 2.0 * noise - 1.0,
        }

    def observe(self, worlds: Worlds) -> dict[str, Tensor]:
        flat, scan = super().observe(worlds), self._scan(worlds)
        noisy = scan + self.noise * _SCAN_NOISE * worlds.memory["scan_noise"]
        # Not the trunk's height, which comes last: the scan has it, from the ground.
        return {
            "policy": torch.cat((flat["policy"], noisy), dim=1),
            "critic": torch.cat((flat["critic"][:, :-1], scan), dim=1),
        }

    def reward(self, worlds: Worlds, terminated: Tensor) -> dict[str, Tensor]:
        terms = super().reward(worlds, terminated)
        # Slopes and stairs take some of both.
        return terms | {"bounce": 0.25 * terms["bounce"], "tilt": 0.2 * terms["tilt"]}

    def measure(self, worlds: Worlds) -> dict[str, Tensor]:
        return super().measure(worlds) | {"terrain_level": worlds.memory["level"][:, 0]}

    def _scan(self, worlds: Worlds) -> Tensor:
        """How high the ground is, where 0 is where it would be if the robot stood on it; metres, [world, point]."""
        x, y, z, qw, qx, qy, qz = worlds.qpos[:, :7].split(1, dim=1)
        # The trunk's own forward, seen from above.
        east, north = 1.0 - 2.0 * (qy * qy + qz * qz), 2.0 * (qx * qy + qw * qz)
        length = torch.sqrt(east * east + north * north).clamp(min=1e-6)
        cos, sin = east / length, north / length
        ahead, left = worlds.constants["ahead"], worlds.constants["left"]
        ground = self._ground(worlds, x + cos * ahead - sin * left, y + sin * ahead + cos * left)
        return (ground - z + worlds.constants["height"]).clamp(-1.0, 1.0)

    def _ground(self, worlds: Worlds, x: Tensor, y: Tensor) -> Tensor:
        return self.terrain.height_at(worlds.constants["heights"], x, y)


ENTRY = TaskEntry(
    Go1VelocityRough,
    summary="a quadruped of the Go1's class follows a commanded velocity over slopes, stairs and rubble",
    training=TrainingSettings(
        hidden_layers=(512, 256, 128),
        entropy_weight=0.01,
        overrides={
            "rl_games": {"entropy_coef": 0.0},
        },
    ),
    max_iterations=1500,
    cpu_envs=512,
)
