"""Rough terrain: one height field with patches of several kinds, each in several levels of difficulty."""

from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import mujoco
import numpy as np
import torch
from torch import Tensor

Number = TypeVar("Number", float, Tensor)

KINDS = ("waves", "roughness", "slopes", "stairs down", "stairs up", "blocks")
"""Stairs and slopes are named as seen from the middle. Slopes go down in even levels and up in odd levels."""

CELL, PATCH = 0.1, 8.0
"""Distance between two points of the height field, and width of a patch, meters."""
# Lengths in cells: the width of a patch; the distances from its middle, along x or y, at which the start area ends,
# at which the full height begins, and beyond which every patch has height zero, so that patches join; a stair's depth.
_CELLS = 80
_START, _FULL, _EDGE = 9, 12, 39
_STAIR = 3


@dataclass(frozen=True)
class Terrain:
    """A grid of patches with its middle at the origin: levels along x, kinds along y. A flat border surrounds it."""

    levels: int = 10
    border: float = 20.0
    """Width of the flat border, meters."""
    seed: int = 0

    @property
    def points(self) -> tuple[int, int]:
        """Number of points of the height field along y and x."""
        return len(KINDS) * _CELLS + 1, self.levels * _CELLS + 1

    @property
    def size(self) -> tuple[float, float]:
        """Half of the extent of all patches along x and y, meters."""
        return 0.5 * self.levels * PATCH, 0.5 * len(KINDS) * PATCH

    def middle(self, level: Number, kind: Number) -> tuple[Number, Number]:
        """Return x and y of the middle of a patch, where robots start, in meters."""
        return (level + 0.5) * PATCH - self.size[0], (kind + 0.5) * PATCH - self.size[1]

    def heights(self) -> np.ndarray:
        """Return the heights in meters, float32 [y, x], read-only."""
        return _heights(self)

    def replace_floor(self, scene: mujoco.MjSpec) -> None:
        """Replace the geom "floor" of a scene with this terrain."""
        scene.delete(scene.geom("floor"))
        heights, (x, y), (rows, columns) = self.heights(), self.size, self.points
        lowest, highest = float(heights.min()), float(heights.max())
        # The compiler normalizes the data to [0, 1]; the third size restores the range.
        size = (x, y, highest - lowest, 1.0)
        scene.add_hfield(name="terrain", nrow=rows, ncol=columns, size=size, userdata=heights.ravel().tolist())
        # Darker tiles make steps visible.
        tiles = scene.texture("tiles")
        tiles.rgb1, tiles.rgb2, scene.material("tiles").specular = (0.66, 0.6, 0.5), (0.6, 0.545, 0.455), 0.0
        # Slopes have dark specks where the shadow map ends; this moves its end far from the robot.
        scene.visual.map.shadowclip = 3.0
        ground = {"material": "tiles", "contype": 1, "conaffinity": 0}
        field, box = mujoco.mjtGeom.mjGEOM_HFIELD, mujoco.mjtGeom.mjGEOM_BOX
        scene.worldbody.add_geom(name="terrain", type=field, hfieldname="terrain", pos=(0.0, 0.0, lowest), **ground)
        half, long = 0.5 * self.border, x + self.border
        sides = {
            "east": ((x + half, 0.0, -0.5), (half, y, 0.5)),
            "west": ((-x - half, 0.0, -0.5), (half, y, 0.5)),
            "north": ((0.0, y + half, -0.5), (long, half, 0.5)),
            "south": ((0.0, -y - half, -0.5), (long, half, 0.5)),
        }
        for name, (center, size) in sides.items():
            scene.worldbody.add_geom(name=name, type=box, pos=center, size=size, **ground)

    def height_at(self, heights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the height of the ground in meters, in the shape of `x` and `y`.

        `heights` are those of the height field, flattened, on the device of `x` and `y`. Heights are interpolated on
        the triangles that the engines use for collisions. Beyond the patches, the height at the edge is returned.
        """
        rows, columns = self.points
        x_cells, y_cells = (x + self.size[0]) / CELL, (y + self.size[1]) / CELL
        # The indices are clamped as integers, so that they are valid for NaN too.
        column, row = x_cells.long().clamp(0, columns - 2), y_cells.long().clamp(0, rows - 2)
        u, v = (x_cells - column).clamp(0.0, 1.0), (y_cells - row).clamp(0.0, 1.0)
        corner, table = row * columns + column, heights.flatten()
        near, far = table[corner], table[corner + columns + 1]
        # The diagonal of each cell goes from its corner of smallest x and y to the opposite corner.
        side = table[corner + torch.where(u > v, 1, columns)]
        return near + torch.maximum(u, v) * (side - near) + torch.minimum(u, v) * (far - side)


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
    """Return the heights of a patch with both edges, meters, [y, x]."""
    difficulty = level / max(1, terrain.levels - 1)
    cells = np.arange(_CELLS + 1) - _CELLS // 2
    from_middle = np.maximum(abs(cells[:, None]), abs(cells))
    to_edge = _EDGE - np.clip(from_middle, _START, _EDGE)
    # The height grows from zero, at the start area and at the edge, to the full height within three cells.
    fade = np.clip(np.minimum((from_middle - _START) / (_FULL - _START), to_edge / (_FULL - _START)), 0.0, 1.0)
    match kind:
        case "waves":
            wave = np.cos(cells * (2.0 * np.pi * 4.0 / _CELLS))
            return (0.02 + 0.18 * difficulty) * fade * 0.5 * (wave[:, None] + wave)
        case "roughness":
            return (0.01 + 0.08 * difficulty) * fade * _rough(random)
        case "slopes":
            return (0.05 + 0.45 * difficulty) * CELL * to_edge * (-1.0) ** level
        case "stairs down":
            return (0.03 + 0.13 * difficulty) * (to_edge // _STAIR)
        case "stairs up":
            return -(0.03 + 0.13 * difficulty) * (to_edge // _STAIR)
        case "blocks":
            # Blocks are not faded, because their sides are vertical.
            return (0.03 + 0.12 * difficulty) * (fade == 1.0) * _blocks(random)
        case _:
            raise ValueError(f"no terrain of kind {kind!r}; choose from {KINDS}")


def _rough(random: np.random.Generator) -> np.ndarray:
    """Sample heights in [-1, 1] at every second point; points between them get the mean of their neighbors."""
    sampled = random.uniform(-1.0, 1.0, size=(_CELLS // 2 + 1, _CELLS // 2 + 1)).repeat(2, axis=0).repeat(2, axis=1)
    rows = 0.5 * (sampled[1:] + sampled[:-1])
    return 0.5 * (rows[:, 1:] + rows[:, :-1])


def _blocks(random: np.random.Generator) -> np.ndarray:
    """Sample blocks with heights in [-1, 1]; where blocks overlap, the last one is kept."""
    heights = np.zeros((_CELLS + 1, _CELLS + 1))
    for _ in range(90):
        (y, x), (width, depth) = random.integers(0, _CELLS, size=2), random.integers(4, 11, size=2)
        heights[y : y + width, x : x + depth] = random.uniform(-1.0, 1.0)
    return heights
