"""Triangles of MuJoCo's meshes, and their normals."""

import mujoco
import numpy as np


def mesh_triangles(model: mujoco.MjModel, mesh: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the vertices, float64 [vertex, 3], and the triangles of a mesh, [triangle, 3]."""
    vertices = model.mesh_vert[model.mesh_vertadr[mesh] :][: model.mesh_vertnum[mesh]]
    return vertices.astype(np.float64), model.mesh_face[model.mesh_faceadr[mesh] :][: model.mesh_facenum[mesh]]


def area_normals(triangles: np.ndarray) -> np.ndarray:
    """Return the normals of triangles [triangle, 3, 3], with twice their area as length."""
    return np.cross(triangles[:, 1] - triangles[:, 0], triangles[:, 2] - triangles[:, 0])


def unit(vectors: np.ndarray) -> np.ndarray:
    """Return vectors [..., 3] with a length of 1. Those of length zero stay zero."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-30)
