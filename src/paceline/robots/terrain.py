"""Ground that is not flat: patches of several kinds, each in several levels of difficulty, in one height field."""

from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import mujoco
import numpy as np
import torch
from torch import Tensor

Number = TypeVar("Number", float, Tensor)

KINDS = ("waves", "roughness", "slopes", "stairs down", "stairs up", "blocks")
"""Stairs and slopes as they are met from the middle of the patch; slopes go down in even levels and up in odd ones."""

# A patch in cells: its width; and how far from its middle, along x or y, the flat ground ends on which robots start,
# the full height begins, and all patches have height zero, so that neighbours meet.
_CELLS = 80
_START, _FULL, _EDGE = 9, 12, 39
_STAIR = 3


@dataclass(frozen=True)
class Terrain:
    """Levels follow each other along x, kinds along y; the middle is the origin. Around it is flat ground."""

    levels: int = 10
    cell: float = 0.1
    """Metres between two points of the height field; a patch is 80 of them wide."""
    border: float = 20.0
    """Width of the flat ground around, metres."""
    seed: int = 0

    @property
    def patch(self) -> float:
        """Width of a patch, metres."""
        return _CELLS * self.cell

    @property
    def points(self) -> tuple[int, int]:
        """Of the height field, along y and x."""
        return len(KINDS) * _CELLS + 1, self.levels * _CELLS + 1

    @property
    def size(self) -> tuple[float, float]:
        """Half of what the patches cover along x and y, metres."""
        return 0.5 * self.levels * self.patch, 0.5 * len(KINDS) * self.patch

    def middle(self, level: Number, kind: Number) -> tuple[Number, Number]:
        """Where robots start on a patch: x and y, metres."""
        return (level + 0.5) * self.patch - self.size[0], (kind + 0.5) * self.patch - self.size[1]

    def heights(self) -> np.ndarray:
        """Metres, float32 [y, x], not to be written to."""
        return _heights(self)

    def add_to(self, scene: mujoco.MjSpec) -> None:
        """The ground of a scene that has none."""
        heights, (x, y), (rows, columns) = self.heights(), self.size, self.points
        lowest, highest = float(heights.min()), float(heights.max())
        # The compiler stretches the numbers to between 0 and 1, and the size brings them back.
        scene.add_hfield(
            name="terrain",
            nrow=rows,
            ncol=columns,
            size=(x, y, highest - lowest, 1.0),
            userdata=heights.ravel().tolist(),
        )
        _add_earth(scene)
        # Where shadows end, slopes are drawn with dark specks: that shall be far from the robot.
        scene.visual.map.shadowclip = 3.0
        ground = {"material": "earth", "contype": 1, "conaffinity": 0}
        scene.worldbody.add_geom(
            name="terrain", type=mujoco.mjtGeom.mjGEOM_HFIELD, hfieldname="terrain", pos=(0.0, 0.0, lowest), **ground
        )
        half, long = 0.5 * self.border, x + self.border
        sides = {
            "east": ((x + half, 0.0), (half, y)),
            "west": ((-x - half, 0.0), (half, y)),
            "north": ((0.0, y + half), (long, half)),
            "south": ((0.0, -y - half), (long, half)),
        }
        for name, (centre, size) in sides.items():
            scene.worldbody.add_geom(
                name=name, type=mujoco.mjtGeom.mjGEOM_BOX, pos=(*centre, -0.5), size=(*size, 0.5), **ground
            )

    def height_at(self, heights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Of the ground, metres, in the shape of x and y; `heights` are the height field's, in a row, on their device.

        On the triangles that the engines collide with; beyond the patches it is the edge's.
        """
        rows, columns = self.points
        across, along = (x + self.size[0]) / self.cell, (y + self.size[1]) / self.cell
        # Clamped as whole numbers: a place that is not a number has to be somewhere too.
        column, row = across.long().clamp(0, columns - 2), along.long().clamp(0, rows - 2)
        u, v = (across - column).clamp(0.0, 1.0), (along - row).clamp(0.0, 1.0)
        corner, table = row * columns + column, heights.flatten()
        near, far = table[corner], table[corner + columns + 1]
        # Each cell is halved from its corner of least x and y to the opposite one.
        beside = table[corner + torch.where(u > v, 1, columns)]
        return near + torch.maximum(u, v) * (beside - near) + torch.minimum(u, v) * (far - beside)


def _add_earth(scene: mujoco.MjSpec) -> None:
    """Squares of a metre, darker than a floor's so that steps stand out in the light."""
    scene.add_texture(
        name="earth",
        type=mujoco.mjtTexture.mjTEXTURE_2D,
        builtin=mujoco.mjtBuiltin.mjBUILTIN_CHECKER,
        rgb1=(0.66, 0.6, 0.5),
        rgb2=(0.6, 0.545, 0.455),
        width=64,
        height=64,
    )
    earth = scene.add_material(name="earth", texuniform=True, specular=0.0)
    earth.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = "earth"


@cache
def _heights(terrain: Terrain) -> np.ndarray:
    heights = np.zeros(terrain.points, dtype=np.float32)
    for row, kind in enumerate(KINDS):
        for level in range(terrain.levels):
            patch = _patch(kind, level, terrain, np.random.default_rng((terrain.seed, row, level)))
            y, x = row * _CELLS, level * _CELLS
            heights[y : y + _CELLS + 1, x : x + _CELLS + 1] = patch
    heights.flags.writeable = False
    return heights


def _patch(kind: str, level: int, terrain: Terrain, random: np.random.Generator) -> np.ndarray:
    """Metres, [y, x], both edges included."""
    hard = level / max(1, terrain.levels - 1)
    cells = np.arange(_CELLS + 1) - _CELLS // 2
    from_middle = np.maximum(abs(cells[:, None]), abs(cells))
    to_edge = _EDGE - np.clip(from_middle, _START, _EDGE)
    # From nothing, where robots start and at the edge, to full height in three cells.
    fade = np.clip(np.minimum((from_middle - _START) / (_FULL - _START), to_edge / (_FULL - _START)), 0.0, 1.0)
    match kind:
        case "waves":
            wave = np.cos(cells * (2.0 * np.pi * 4.0 / _CELLS))
            return (0.02 + 0.18 * hard) * fade * 0.5 * (wave[:, None] + wave)
        case "roughness":
            return (0.01 + 0.08 * hard) * fade * _rough(random)
        case "slopes":
            return (0.05 + 0.45 * hard) * terrain.cell * to_edge * (-1.0) ** level
        case "stairs down":
            return (0.03 + 0.13 * hard) * (to_edge // _STAIR)
        case "stairs up":
            return -(0.03 + 0.13 * hard) * (to_edge // _STAIR)
        case "blocks":
            # Not faded, for blocks have upright sides.
            return (0.03 + 0.12 * hard) * (fade == 1.0) * _blocks(random)
        case _:
            raise ValueError(f"no ground of kind {kind!r}; choose from {KINDS}")


def _rough(random: np.random.Generator) -> np.ndarray:
    """Between -1 and 1, drawn for every other point; the points between are at the mean of their neighbours."""
    drawn = random.uniform(-1.0, 1.0, size=(_CELLS // 2 + 1, _CELLS // 2 + 1)).repeat(2, axis=0).repeat(2, axis=1)
    rows = 0.5 * (drawn[1:] + drawn[:-1])
    return 0.5 * (rows[:, 1:] + rows[:, :-1])


def _blocks(random: np.random.Generator) -> np.ndarray:
    """Between -1 and 1; where blocks overlap, the last one stands."""
    heights = np.zeros((_CELLS + 1, _CELLS + 1))
    for _ in range(90):
        (y, x), (width, depth) = random.integers(0, _CELLS, size=2), random.integers(4, 11, size=2)
        heights[y : y + width, x : x + depth] = random.uniform(-1.0, 1.0)
    return heights
