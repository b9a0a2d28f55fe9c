"""Normals of meshes that are interpolated between vertices, as MuJoCo's OpenGL renderer draws them."""

import math

import mujoco
import numpy as np

from paceline.cameras.meshes import area_normals, mesh_triangles, unit

# Cosine of the largest angle between the normal of a vertex and that of a triangle. At larger angles the edge is sharp.
# OpenGL uses the same number.
_SHARP = 0.8
# Largest number of cells of a grid of triangles along its longest side.
_MAX_CELLS = 128


def mesh_normals(model: mujoco.MjModel, mesh: int) -> np.ndarray:
    """Return the normals of the model at the corners of the triangles of a mesh, [triangle, 3 corners, 3]."""
    points, faces = mesh_triangles(model, mesh)
    numbers = model.mesh_facenormal[model.mesh_faceadr[mesh] :][: len(faces)]
    normals = model.mesh_normal[model.mesh_normaladr[mesh] + numbers].astype(np.float64)
    flat = unit(area_normals(points[faces]))
    smooth = (normals * flat[:, None]).sum(-1, keepdims=True) >= _SHARP
    return np.where(smooth, normals, flat[:, None])


def computed_normals(points: np.ndarray, faces: np.ndarray) -> np.ndarray:
    """Return normals at the corners of triangles, [triangle, 3 corners, 3]: the mean of the triangles that share the
    vertex, weighted by their areas, without those behind a sharp edge."""
    weighted = area_normals(points[faces])
    flat = unit(weighted)
    vertex = faces.reshape(-1)
    # All pairs of a corner and a triangle that has the same vertex.
    order, count = np.argsort(vertex, kind="stable"), np.bincount(vertex)
    pairs, start = count[vertex], (np.cumsum(count) - count)[vertex]
    corner = np.repeat(np.arange(len(vertex)), pairs)
    position = np.arange(len(corner)) - np.repeat(np.cumsum(pairs) - pairs - start, pairs)
    other = order[position] // 3
    smooth = (flat[corner // 3] * flat[other]).sum(1) >= _SHARP
    corner, other = corner[smooth], other[smooth]
    sums = [np.bincount(corner, weighted[other, axis], len(vertex)) for axis in range(3)]
    return unit(np.stack(sums, axis=1)).reshape(-1, 3, 3)


def split_vertices(points: np.ndarray, faces: np.ndarray, normals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return vertices with normals, [vertex, 6], and the triangles of them. A vertex with several normals is split."""
    vertex, normals = faces.reshape(-1, 1), normals.reshape(-1, 3)
    keys = np.concatenate((vertex, np.rint(normals * 1000.0).astype(np.int64)), axis=1)
    _, first, corner = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    return np.concatenate((points[vertex[first, 0]], normals[first]), axis=1), corner.reshape(-1, 3)


class SmoothMesh:
    """Finds the smooth normals at points on the surface of a mesh. Rays of MuJoCo return the point that they hit, but
    not the triangle, so the triangles are sorted into the cells of a grid."""

    def __init__(self, model: mujoco.MjModel, mesh: int):
        points, faces = mesh_triangles(model, mesh)
        triangles = points[faces]
        self._normals = mesh_normals(model, mesh)
        self._first, self._edges = triangles[:, 0], triangles[:, 1:] - triangles[:, :1]
        self._weighted = area_normals(triangles)
        self._area, flat = np.maximum((self._weighted**2).sum(1), 1e-30), unit(self._weighted)
        self._origin, extent = triangles.min((0, 1)), float(np.ptp(triangles, axis=(0, 1)).max())
        # About four triangles of average size fit on the surface in a cell.
        size = math.sqrt(2.0 * np.sqrt(self._area).sum() / len(faces))
        self._cell = max(size, extent / _MAX_CELLS)
        margin = 1e-5 * extent
        low, high = (self._cells(points) for points in (triangles.min(1) - margin, triangles.max(1) + margin))
        self._shape = high.max(0) + 1
        # All cells of the bounding box of each triangle, without those that its plane does not cross.
        sizes = high - low + 1
        count = sizes.prod(1)
        triangle = np.repeat(np.arange(len(faces)), count)
        number = np.arange(len(triangle)) - np.repeat(np.cumsum(count) - count, count)
        sizes = sizes[triangle]
        offset = np.stack(
            (number // (sizes[:, 1] * sizes[:, 2]), number // sizes[:, 2] % sizes[:, 1], number % sizes[:, 2]), axis=1
        )
        cell = low[triangle] + offset
        to_center = self._origin + (cell + 0.5) * self._cell - self._first[triangle]
        reach = 0.5 * self._cell * np.abs(flat).sum(1) + margin
        crossed = np.abs((to_center * flat[triangle]).sum(1)) <= reach[triangle]
        key = np.ravel_multi_index(tuple(cell[crossed].T), tuple(self._shape))
        self._triangles = triangle[crossed][np.argsort(key, kind="stable")]
        self._counts = np.bincount(key, minlength=int(self._shape.prod()))
        self._starts = np.cumsum(self._counts) - self._counts

    def normals(self, points: np.ndarray, flat: np.ndarray) -> np.ndarray:
        """Return the unit normals at points of the surface, [point, 3], in the frame of the mesh. `flat` has those
        of the triangles."""
        cell = np.clip(self._cells(points), 0, self._shape - 1)
        key = np.ravel_multi_index(tuple(cell.T), tuple(self._shape))
        start, count = self._starts[key], self._counts[key]
        found, nearest = flat.copy(), np.full(len(points), 0.1 * self._cell)
        for index in range(count.max(initial=0)):
            row = np.flatnonzero(count > index)
            triangle = self._triangles[start[row] + index]
            distance, normal = self._candidate(points[row], triangle)
            # The other side of a thin sheet is as near.
            better = (distance < nearest[row]) & ((normal * flat[row]).sum(1) > 0.0)
            found[row[better]], nearest[row[better]] = normal[better], distance[better]
        return unit(found)

    def _cells(self, points: np.ndarray) -> np.ndarray:
        return np.maximum(np.floor((points - self._origin) / self._cell), 0.0).astype(np.int64)

    def _candidate(self, points: np.ndarray, triangle: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return how far points are from the plane or outside the borders of one triangle each, and the normals."""
        offset, weighted, area = points - self._first[triangle], self._weighted[triangle], self._area[triangle]
        one, other = self._edges[triangle, 0], self._edges[triangle, 1]
        of_one = (np.cross(offset, other) * weighted).sum(1) / area
        of_other = (np.cross(one, offset) * weighted).sum(1) / area
        weights = np.stack((1.0 - of_one - of_other, of_one, of_other), axis=1)
        outside = np.maximum(-weights.min(1), 0.0) * np.sqrt(np.sqrt(area))
        distance = np.abs((offset * weighted).sum(1)) / np.sqrt(area) + outside
        return distance, (weights[:, :, None] * self._normals[triangle]).sum(1)
