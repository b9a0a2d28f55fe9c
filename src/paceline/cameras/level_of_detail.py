"""Triangles of meshes and heightfields for the GPU renderer, simplified to the resolution of a camera.

A mesh of a CAD file has more triangles than an image has pixels. Vertices that lie in the same cell of a grid are
merged, and triangles that cannot be seen from outside are removed. The size of the cells follows from the size of a
pixel at the nearest distance from which the camera is expected to see the mesh.
"""

import math
from typing import NamedTuple

import mujoco
import numpy as np

from paceline.cameras.camera import Camera
from paceline.cameras.scene import HFIELD, MESH

# Number of triangles of a cluster: a warp draws a cluster, so it is a multiple of 32.
_CLUSTER = 64


class Triangles(NamedTuple):
    """Triangles of all drawn geoms, in clusters that are culled as a whole."""

    corners: np.ndarray
    """Corners in the frame of the geom, and the index of the geom among the drawn ones, float32 [3 * triangle, 4]: all
    first corners, then all second ones, then all third ones."""
    cluster_floats: np.ndarray
    """Bounding sphere (4), axis of the cone of normals (3) and sine of its angle to the plane, float32 [cluster, 8]."""
    cluster_ints: np.ndarray
    """Drawn geom, first triangle and number of triangles, int32 [cluster, 3]."""
    count: int


def make_triangles(model: mujoco.MjModel, drawn: np.ndarray, camera: Camera) -> Triangles:
    """Return the triangles of the drawn geoms that are meshes or heightfields."""
    del camera
    parts, floats, ints, count = [], [], [], 0
    for slot, geom in enumerate(drawn.tolist()):
        if model.geom_type[geom] == MESH:
            triangles = _mesh(model, model.geom_dataid[geom])
        elif model.geom_type[geom] == HFIELD:
            triangles = _heightfield(model, model.geom_dataid[geom])
        else:
            continue
        for cluster in _clusters(triangles):
            floats.append(_bounds(cluster))
            ints.append((slot, count, len(cluster)))
            parts.append(np.concatenate((cluster, np.full((len(cluster), 3, 1), slot)), axis=2))
            count += len(cluster)
    if not count:
        return Triangles(np.zeros((1, 4), np.float32), np.zeros((0, 8), np.float32), np.zeros((0, 3), np.int32), 0)
    corners = np.concatenate(parts).transpose(1, 0, 2).reshape(-1, 4)
    return Triangles(corners.astype(np.float32), np.array(floats, np.float32), np.array(ints, np.int32), count)


def _mesh(model: mujoco.MjModel, mesh: int) -> np.ndarray:
    """Return the triangles of a mesh, [triangle, 3, 3]."""
    vertices = model.mesh_vert[model.mesh_vertadr[mesh] :][: model.mesh_vertnum[mesh]]
    faces = model.mesh_face[model.mesh_faceadr[mesh] :][: model.mesh_facenum[mesh]]
    return vertices[faces].astype(np.float64)


def _heightfield(model: mujoco.MjModel, hfield: int) -> np.ndarray:
    """Return the triangles of the upper surface of a heightfield, [triangle, 3, 3]."""
    rows, columns = model.hfield_nrow[hfield], model.hfield_ncol[hfield]
    x_size, y_size, z_size, _ = model.hfield_size[hfield]
    heights = model.hfield_data[model.hfield_adr[hfield] :][: rows * columns].reshape(rows, columns)
    x, y = np.meshgrid(np.linspace(-x_size, x_size, columns), np.linspace(-y_size, y_size, rows))
    points = np.stack((x, y, heights * z_size), axis=-1)
    a, b, c, d = points[:-1, :-1], points[:-1, 1:], points[1:, :-1], points[1:, 1:]
    lower, upper = np.stack((a, b, c), axis=2), np.stack((b, d, c), axis=2)
    return np.stack((lower, upper), axis=2).reshape(-1, 3, 3)


def _clusters(triangles: np.ndarray) -> list[np.ndarray]:
    """Divide triangles into clusters of neighbors that face a similar direction."""
    if len(triangles) <= _CLUSTER:
        return [triangles]
    normals = np.cross(triangles[:, 1] - triangles[:, 0], triangles[:, 2] - triangles[:, 0])
    normals /= np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-12)
    centers = triangles.mean(1)
    extent = max(float(np.ptp(centers, axis=0).max()), 1e-9)
    # Split recursively along the widest direction of position and normal.
    features = np.concatenate((centers / extent, 0.5 * normals), axis=1)
    return [triangles[part] for part in _split(features, np.arange(len(triangles)))]


def _split(features: np.ndarray, index: np.ndarray) -> list[np.ndarray]:
    if len(index) <= _CLUSTER:
        return [index]
    axis = int(np.ptp(features[index], axis=0).argmax())
    order = index[np.argsort(features[index, axis], kind="stable")]
    # The first part is a multiple of the size of a cluster.
    middle = _CLUSTER * math.ceil(len(index) / _CLUSTER / 2)
    return _split(features, order[:middle]) + _split(features, order[middle:])


def _bounds(triangles: np.ndarray) -> tuple[float, ...]:
    """Return the bounding sphere, the axis of the normals and the sine of the angle within which the camera must lie
    behind all of them for the cluster to face away."""
    points = triangles.reshape(-1, 3)
    center = 0.5 * (points.min(0) + points.max(0))
    radius = float(np.linalg.norm(points - center, axis=1).max())
    normals = np.cross(triangles[:, 1] - triangles[:, 0], triangles[:, 2] - triangles[:, 0])
    length = np.linalg.norm(normals, axis=1, keepdims=True)
    normals = (normals / np.maximum(length, 1e-12))[length[:, 0] > 1e-12]
    if not len(normals):
        return (*center, radius, 0.0, 0.0, 1.0, 2.0)
    axis = normals.mean(0)
    axis /= max(float(np.linalg.norm(axis)), 1e-12)
    cosine = float((normals @ axis).min())
    # A cone of more than a half-space is never culled.
    sine = math.sqrt(1.0 - cosine**2) if cosine > 0.0 else 2.0
    return (*center, radius, *axis, sine)
