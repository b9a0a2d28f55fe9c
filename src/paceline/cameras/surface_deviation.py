"""Distance of a simplified mesh from the original one, measured where the mesh can be seen from outside."""

import mujoco
import numpy as np

from paceline.cameras.meshes import area_normals, unit

# Number of rays per geom that find points on its surface.
_RAYS = 400
# Number of pairs of a point and a triangle that are compared at once, which bounds the memory.
_PAIRS = 2**21


def visible_points(model: mujoco.MjModel, data: mujoco.MjData, geom: int) -> np.ndarray:
    """Return points at which parallel rays from random directions hit the mesh of a geom, in its frame, [point, 3]."""
    random = np.random.default_rng(0)
    directions = unit(random.normal(size=(_RAYS, 3)))
    pos, mat = data.geom_xpos[geom], data.geom_xmat[geom].reshape(3, 3)
    center, radius = pos + mat @ model.geom_aabb[geom, :3], float(np.linalg.norm(model.geom_aabb[geom, 3:]))
    # Origins on a disk across each direction, outside the mesh.
    side = unit(np.cross(directions, unit(random.normal(size=(_RAYS, 3)))))
    offset = radius * np.sqrt(random.uniform(size=(_RAYS, 1))) * side
    origins = center + offset - 2.0 * radius * directions
    points = []
    for origin, direction in zip(origins, directions, strict=True):
        distance = mujoco.mj_rayMesh(model, data, geom, origin, direction)
        if distance >= 0.0:
            points.append(origin + distance * direction)
    return (np.array(points).reshape(-1, 3) - pos) @ mat


def distances(points: np.ndarray, triangles: np.ndarray) -> np.ndarray:
    """Return the distance of each point [point, 3] from the nearest of the triangles [triangle, 3, 3], m."""
    centers = triangles.mean(1)
    radius = np.linalg.norm(triangles - centers[:, None], axis=-1).max(1)
    found = np.zeros(len(points))
    for rows in np.array_split(np.arange(len(points)), 1 + len(points) * len(triangles) // _PAIRS):
        chunk = points[rows]
        squares = (chunk**2).sum(1)[:, None] + (centers**2).sum(1) - 2.0 * chunk @ centers.T
        to_center = np.sqrt(np.maximum(squares, 0.0))
        # A triangle cannot be the nearest one if another one's center is nearer than all of its points.
        row, column = np.nonzero(to_center - radius <= to_center.min(1, keepdims=True) + 1e-6)
        nearest = np.full(len(rows), np.inf)
        np.minimum.at(nearest, row, _distance(chunk[row], triangles[column]))
        found[rows] = nearest
    return found


def _distance(points: np.ndarray, triangles: np.ndarray) -> np.ndarray:
    """Return the distance of each point from one triangle."""
    a, b, c = triangles.transpose(1, 0, 2)
    normal = area_normals(triangles)
    inside, on_borders = np.ones(len(points), dtype=bool), np.full(len(points), np.inf)
    for start, end in ((a, b), (b, c), (c, a)):
        edge, offset = end - start, points - start
        # False for a triangle without area.
        inside &= (np.cross(edge, offset) * normal).sum(1) > 0.0
        along = (offset * edge).sum(1) / np.maximum((edge**2).sum(1), 1e-30)
        rest = offset - np.clip(along, 0.0, 1.0)[:, None] * edge
        on_borders = np.minimum(on_borders, np.linalg.norm(rest, axis=1))
    return np.where(inside, np.abs(((points - a) * unit(normal)).sum(1)), on_borders)
