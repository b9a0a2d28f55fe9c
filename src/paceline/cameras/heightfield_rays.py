"""Rays against a heightfield, for all rays at once. MuJoCo tests each ray against all cells of a rectangle around its
path, which takes about 40 us on a large terrain."""

import mujoco
import numpy as np

from paceline.cameras.meshes import heightfield_triangles, unit

# Tolerance in cells at the borders of triangles, so that no ray passes between two of them.
_MARGIN = 1e-9


class HeightfieldRays:
    """Casts rays at the upper surface of a heightfield that does not move, from points above it."""

    def __init__(self, model: mujoco.MjModel, data: mujoco.MjData, geom: int):
        points, _ = heightfield_triangles(model, model.geom_dataid[geom])
        rows, columns = points.shape[:2]
        x, y = points[-1, -1, :2]
        self._heights = points[..., 2]
        self._pos, self._mat = data.geom_xpos[geom].copy(), data.geom_xmat[geom].reshape(3, 3).copy()
        # Cells per meter, and the position of the first corner.
        self._scale = np.array([(columns - 1) / (2.0 * x), (rows - 1) / (2.0 * y), 1.0])
        self._corner = np.array([x, y, 0.0])
        self._last = np.array([columns - 1.0, rows - 1.0])

    def are_above(self, points: np.ndarray) -> bool:
        """Return whether all points [n, 3] are above the surface and within its borders."""
        x, y, z = self._local(points).T
        inside = (x >= 0.0) & (x <= self._last[0]) & (y >= 0.0) & (y <= self._last[1])
        if not inside.all():
            return False
        (column, row), (h00, h10, h01, h11) = self._cell(x, y)
        u, v = x - column, y - row
        lower = h00 + u * (h10 - h00) + v * (h11 - h10)
        upper = h00 + v * (h01 - h00) + u * (h11 - h01)
        return bool((z > np.where(u > v, lower, upper)).all())

    def cast(self, origins: np.ndarray, rays: np.ndarray, limit: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the distances in units of the length of a ray, infinite for none up to `limit`, and the unit normals.
        `origins` are [env, 1, 3], `rays` are [env, ray, 3]."""
        shape = rays.shape[:2]
        start = np.broadcast_to(self._local(origins), rays.shape).reshape(-1, 3)
        step = (rays @ self._mat * self._scale).reshape(-1, 3)
        distance, normal = np.full(len(step), np.inf), np.zeros_like(step)
        with np.errstate(divide="ignore", invalid="ignore"):
            # The ray leaves the heightfield at its borders, below its lowest point, or above its highest point.
            ends = np.where(step[:, :2] > 0.0, self._last, 0.0)
            exits = np.nanmin((ends - start[:, :2]) / step[:, :2], axis=1, initial=limit)
            z_end = np.where(step[:, 2] < 0.0, self._heights.min() - 1.0, self._heights.max())
            exits = np.fmin(exits, np.maximum((z_end - start[:, 2]) / step[:, 2], 0.0))
        active, now = np.arange(len(step)), np.zeros(len(step))
        cell = np.clip(np.floor(start[:, :2]), 0.0, self._last - 1.0)
        while len(active):
            hit, normal_of_hit, leave, axis = self._cross(start[active], step[active], cell[active], now[active])
            found = np.isfinite(hit)
            distance[active[found]], normal[active[found]] = hit[found], normal_of_hit[found]
            now[active] = leave
            cell[active, axis] += np.sign(step[active, axis])
            outside = (cell[active] < 0.0).any(1) | (cell[active] >= self._last).any(1)
            active = active[~found & (leave < exits[active]) & ~outside]
        distance[distance > limit] = np.inf
        normal = unit((normal * self._scale) @ self._mat.T)
        return distance.reshape(shape), normal.reshape(*shape, 3)

    def _cross(
        self, start: np.ndarray, step: np.ndarray, cell: np.ndarray, now: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return where rays hit one of the two triangles of their cell from above, infinite for none, with the normal,
        and where and along which axis they leave the cell."""
        with np.errstate(divide="ignore", invalid="ignore"):
            borders = np.where(step[:, :2] > 0.0, cell + 1.0, cell)
            times = np.where(step[:, :2] == 0.0, np.inf, (borders - start[:, :2]) / step[:, :2])
        axis, leave = times.argmin(1), times.min(1)
        _, (h00, h10, h01, h11) = self._cell(cell[:, 0], cell[:, 1])
        u, v = (start[:, :2] - cell).T
        hit, normal = np.full(len(start), np.inf), np.zeros_like(start)
        for slope_x, slope_y, below in ((h10 - h00, h11 - h10, True), (h11 - h01, h01 - h00, False)):
            # Height above the plane of the triangle: at the start, and its change along the ray.
            height = start[:, 2] - h00 - u * slope_x - v * slope_y
            change = step[:, 2] - step[:, 0] * slope_x - step[:, 1] * slope_y
            with np.errstate(divide="ignore", invalid="ignore"):
                time = -height / change
                side = (u + time * step[:, 0]) - (v + time * step[:, 1])
            in_triangle = side >= -_MARGIN if below else side <= _MARGIN
            in_cell = (time >= now - _MARGIN) & (time <= leave + _MARGIN)
            better = (change < 0.0) & in_cell & in_triangle & (time < hit)
            hit[better] = time[better]
            normal[better] = np.stack((-slope_x, -slope_y, np.ones_like(height)), axis=1)[better]
        return hit, normal, leave, axis

    def _cell(self, x: np.ndarray, y: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, ...]]:
        """Return the column and the row of the cells of points, and the heights of their corners: (0, 0), (1, 0),
        (0, 1) and (1, 1) in x and y."""
        column = np.clip(x.astype(np.int64), 0, int(self._last[0]) - 1)
        row = np.clip(y.astype(np.int64), 0, int(self._last[1]) - 1)
        corners = ((row, column), (row, column + 1), (row + 1, column), (row + 1, column + 1))
        return (column, row), tuple(self._heights[corner] for corner in corners)

    def _local(self, points: np.ndarray) -> np.ndarray:
        """Return points in the frame of the heightfield, in cells along x and y and in meters along z."""
        return ((points - self._pos) @ self._mat + self._corner) * self._scale
