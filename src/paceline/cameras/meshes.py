"""Triangles of MuJoCo's meshes and heightfields, and their normals."""

import mujoco
import numpy as np


def mesh_triangles(model: mujoco.MjModel, mesh: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the vertices, float64 [vertex, 3], and the triangles of a mesh, [triangle, 3]."""
    vertices = model.mesh_vert[model.mesh_vertadr[mesh] :][: model.mesh_vertnum[mesh]]
    return vertices.astype(np.float64), model.mesh_face[model.mesh_faceadr[mesh] :][: model.mesh_facenum[mesh]]


def heightfield_triangles(model: mujoco.MjModel, hfield: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the vertices of the upper side of a heightfield, float64 [row, column, 3], and the two triangles of each
    cell as indices of the flattened vertices, [row - 1, column - 1, 2, 3]."""
    rows, columns = model.hfield_nrow[hfield], model.hfield_ncol[hfield]
    x_size, y_size, z_size, _ = model.hfield_size[hfield]
    heights = model.hfield_data[model.hfield_adr[hfield] :][: rows * columns].reshape(rows, columns)
    x, y = np.meshgrid(np.linspace(-x_size, x_size, columns), np.linspace(-y_size, y_size, rows))
    a = np.arange(rows * columns).reshape(rows, columns)[:-1, :-1]
    b, c, d = a + 1, a + columns, a + columns + 1
    # The diagonal is that of MuJoCo's collision detection.
    faces = np.stack((a, b, d, a, d, c), axis=-1).reshape(rows - 1, columns - 1, 2, 3)
    return np.stack((x, y, z_size * heights.astype(np.float64)), axis=-1), faces


def area_normals(triangles: np.ndarray) -> np.ndarray:
    """Return the normals of triangles [triangle, 3, 3], with twice their area as length."""
    return np.cross(triangles[:, 1] - triangles[:, 0], triangles[:, 2] - triangles[:, 0])


def unit(vectors: np.ndarray) -> np.ndarray:
    """Return vectors [..., 3] with a length of 1. Those of length zero stay zero."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-30)
