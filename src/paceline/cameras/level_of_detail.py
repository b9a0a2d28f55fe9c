"""Triangles of meshes and heightfields for the GPU renderer, simplified to the resolution of a camera.

A mesh of a CAD file has more triangles than an image has pixels. Vertices in the same cell of a grid are merged into
the point that fits the planes of their triangles best (Lindstrom 2000), and triangles that cannot be seen from outside
the mesh are removed. The size of the cells follows from the size of a pixel at the distance of the mesh.
"""

import math
from typing import NamedTuple

import mujoco
import numpy as np

from paceline.cameras.camera import Camera
from paceline.cameras.meshes import area_normals, heightfield_triangles, mesh_triangles, unit
from paceline.cameras.scene import HFIELD, MESH
from paceline.cameras.smooth_normals import computed_normals, mesh_normals, split_vertices
from paceline.cameras.surface_deviation import distances, visible_points
from paceline.sim.simulation import initial_data

# Numbers of directions and of points per triangle with which the visibility of triangles is tested.
_DIRECTIONS, _POINTS = 80, 12
MAX_VERTICES = 64
"""Largest number of vertices of a cluster. The renderer keeps them in shared memory."""
_MAX_TRIANGLES = 128


class Triangles(NamedTuple):
    """Triangles of all drawn geoms, in clusters that are culled as a whole and share vertices."""

    vertices: np.ndarray
    """Vertices of the clusters in the frame of their geom, float32 [vertex, 3], or [vertex, 6] with smooth normals. A
    vertex without a normal (0, 0, 0) has that of its triangle."""
    triangles: np.ndarray
    """Three vertices, counted within the cluster, in one number with 8 bits each; and the cluster, int32 [triangle,
    2]."""
    cluster_floats: np.ndarray
    """Bounding sphere (4), axis of the cone of normals (3) and sine of its angle to the plane, float32 [cluster, 8]."""
    cluster_ints: np.ndarray
    """Drawn geom, first vertex, number of vertices, first triangle and number of triangles, int32 [cluster, 5]."""
    full_count: int
    """Number of triangles of the meshes before simplification."""
    mesh_count: int
    """Number of triangles of the meshes after simplification."""
    deviation: np.ndarray
    """Distances of points on the visible surface of the meshes from the simplified surface, m, [point]."""


def make_triangles(model: mujoco.MjModel, drawn: np.ndarray, name: str, camera: Camera) -> Triangles:
    """Return the triangles of the drawn geoms that are meshes or heightfields, simplified for a camera."""
    vertices, triangles, floats, ints = [], [], [], []
    num_vertices = num_triangles = full_count = mesh_count = 0
    data, deviation = initial_pose(model), [np.zeros(0)]
    pixels = pixel_sizes(model, data, name, camera)
    for slot, geom in enumerate(drawn.tolist()):
        if model.geom_type[geom] == MESH:
            mesh = model.geom_dataid[geom]
            points, faces = mesh_triangles(model, mesh)
            full_count += len(faces)
            if camera.mesh_detail:
                points, faces = simplify(points, faces, camera.mesh_detail * float(pixels[geom]))
                # A mesh that is smaller than a cell becomes a point.
                surface = points[faces] if len(faces) else points[:1, None].repeat(3, axis=1)
                deviation.append(distances(visible_points(model, data, geom), surface))
            mesh_count += len(faces)
            if camera.smooth_normals:
                normals = computed_normals(points, faces) if camera.mesh_detail else mesh_normals(model, mesh)
                points, faces = split_vertices(points, faces, normals)
            clusters = _mesh_clusters(points[:, :3], faces)
        elif model.geom_type[geom] == HFIELD:
            points, clusters = _heightfield(model, model.geom_dataid[geom])
            if camera.smooth_normals:
                points = np.pad(points, ((0, 0), (0, 3)))
        else:
            continue
        for faces in clusters:
            used, local = np.unique(faces, return_inverse=True)
            local = local.reshape(-1, 3)
            triangles.append(np.stack((local @ (1, 2**8, 2**16), np.full(len(local), len(ints))), axis=1))
            vertices.append(points[used])
            floats.append(_bounds(points[faces][..., :3]))
            ints.append((slot, num_vertices, len(used), num_triangles, len(faces)))
            num_vertices, num_triangles = num_vertices + len(used), num_triangles + len(faces)
    return Triangles(
        np.concatenate(vertices or [np.zeros((1, 6 if camera.smooth_normals else 3))]).astype(np.float32),
        np.concatenate(triangles or [np.zeros((1, 2))]).astype(np.int32),
        np.array(floats, np.float32).reshape(-1, 8),
        np.array(ints, np.int32).reshape(-1, 5),
        full_count,
        mesh_count,
        np.concatenate(deviation),
    )


def initial_pose(model: mujoco.MjModel) -> mujoco.MjData:
    """Return the poses of all objects in the initial state."""
    data = initial_data(model)
    mujoco.mj_forward(model, data)
    return data


def describe(triangles: Triangles, name: str, camera: Camera) -> str:
    """Return a line that states how the meshes are simplified for a camera; empty if they are not."""
    if not len(triangles.deviation):
        return ""
    half, most = (1e3 * np.quantile(triangles.deviation, part) for part in (0.5, 0.99))
    return (
        f"Camera {name}: meshes are simplified from {triangles.full_count:,} to {triangles.mesh_count:,} triangles "
        f"(mesh_detail {camera.mesh_detail:g}). Half of the visible surface deviates by at most {half:.2f} mm, "
        f"99 % by at most {most:.2f} mm."
    )


def pixel_sizes(model: mujoco.MjModel, data: mujoco.MjData, name: str, camera: Camera) -> np.ndarray:
    """Return the size of a pixel at the nearest point of each geom in a pose, m, [geom]."""
    index = model.camera(name).id
    distance = np.linalg.norm(data.geom_xpos - data.cam_xpos[index], axis=1) - model.geom_rbound
    tangent = math.tan(0.5 * math.radians(model.cam_fovy[index]))
    return 2.0 * tangent / camera.height * np.maximum(distance, camera.near)


def simplify(vertices: np.ndarray, faces: np.ndarray, cell: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the vertices and triangles of a mesh whose vertices are merged in cells of this size."""
    _, merged = np.unique(np.floor(vertices / cell).astype(np.int64), axis=0, return_inverse=True)
    merged = merged.reshape(-1)
    points = _representatives(vertices, faces, merged, cell)
    kept = merged[faces]
    kept = kept[(kept[:, 0] != kept[:, 1]) & (kept[:, 1] != kept[:, 2]) & (kept[:, 2] != kept[:, 0])]
    # Triangles that became equal are drawn once. The smallest index comes first, in the same direction.
    first = kept.argmin(1)[:, None]
    kept = np.unique(np.take_along_axis(kept, (first + np.arange(3)) % 3, axis=1), axis=0)
    return points, kept[_visible(points[kept], 1.5 * cell)]


def _representatives(vertices: np.ndarray, faces: np.ndarray, merged: np.ndarray, cell: float) -> np.ndarray:
    """Return one point for each group of merged vertices: that with the smallest sum of squared distances to the planes
    of the triangles of the group, weighted by their areas, near the mean of the group."""
    count = merged.max() + 1
    sizes = np.bincount(merged, minlength=count)[:, None]
    mean = np.stack([np.bincount(merged, vertices[:, axis], count) for axis in range(3)], axis=1) / sizes
    first, normal = vertices[faces[:, 0]], area_normals(vertices[faces])
    matrix, vector = np.zeros((count, 3, 3)), np.zeros((count, 3))
    for corner in range(3):
        group = merged[faces[:, corner]]
        offset = ((first - mean[group]) * normal).sum(1)
        np.add.at(matrix, group, normal[:, :, None] * normal[:, None, :])
        np.add.at(vector, group, offset[:, None] * normal)
    values, axes = np.linalg.eigh(matrix)
    # Directions in which the planes do not determine the point keep the mean.
    usable = values > 1e-3 * values[:, 2:]
    inverse = np.where(usable, 1.0 / np.maximum(values, 1e-30), 0.0)
    move = np.einsum("nij,nj,nkj,nk->ni", axes, inverse, axes, vector)
    length = np.linalg.norm(move, axis=1, keepdims=True)
    return mean + np.where(length < cell, move, 0.0)


def _visible(triangles: np.ndarray, cell: float) -> np.ndarray:
    """Return which triangles can be seen from outside, bool [triangle]: from one of many directions, a point on them is
    the nearest one in its cell of a grid."""
    index = np.arange(_DIRECTIONS) + 0.5
    polar, azimuth = np.arccos(1.0 - 2.0 * index / _DIRECTIONS), math.pi * (1.0 + math.sqrt(5.0)) * index
    directions = np.stack((np.cos(azimuth) * np.sin(polar), np.sin(azimuth) * np.sin(polar), np.cos(polar)), axis=1)
    weights = np.random.default_rng(0).dirichlet((1.0, 1.0, 1.0), _POINTS)
    points = np.einsum("kc,fcd->fkd", weights, triangles)
    normal = area_normals(triangles)
    seen = np.zeros(len(triangles), dtype=bool)
    for direction in directions:
        facing = (normal @ direction > 0.0) & ~seen
        if not facing.any():
            continue
        side = np.cross(direction, np.eye(3)[np.abs(direction).argmin()])
        side /= np.linalg.norm(side)
        x, y, depth = points @ side, points @ np.cross(direction, side), -(points @ direction)
        column, row = (((part - part.min()) / cell).astype(np.int64) for part in (x, y))
        place = column * (row.max() + 1) + row
        nearest = np.full(place.max() + 1, np.inf)
        np.minimum.at(nearest, place.reshape(-1), depth.reshape(-1))
        seen |= facing & (depth <= nearest[place] + cell).any(1)
    return seen


def _heightfield(model: mujoco.MjModel, hfield: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the vertices of a heightfield without its bottom, [vertex, 3], and the triangles of its clusters."""
    points, faces = heightfield_triangles(model, hfield)
    rows, columns = points.shape[:2]
    points, grid = points.reshape(-1, 3), np.arange(rows * columns).reshape(rows, columns)
    side = math.isqrt(MAX_VERTICES) - 1
    starts = ((row, column) for row in range(0, rows - 1, side) for column in range(0, columns - 1, side))
    surface = [faces[row : row + side, column : column + side].reshape(-1, 3) for row, column in starts]
    # The sides, from the border counterclockwise down to the base.
    border = np.concatenate((grid[0, :-1], grid[:-1, -1], grid[-1, :0:-1], grid[:0:-1, 0]))
    bottom = len(points) + np.arange(len(border))
    points = np.concatenate((points, points[border] * (1.0, 1.0, 0.0) - (0.0, 0.0, model.hfield_size[hfield, 3])))
    after, bottom_after = np.roll(border, -1), np.roll(bottom, -1)
    walls = np.stack((bottom, bottom_after, after, bottom, after, border), axis=1).reshape(-1, 3)
    return points, surface + _mesh_clusters(points, walls)


def _mesh_clusters(points: np.ndarray, faces: np.ndarray) -> list[np.ndarray]:
    """Divide triangles into clusters of neighbors that face a similar direction."""
    if not len(faces):
        return []
    normals = unit(area_normals(points[faces]))
    centers = points[faces].mean(1)
    extent = max(float(np.ptp(centers, axis=0).max()), 1e-9)
    features = np.concatenate((centers / extent, 0.5 * normals), axis=1)

    def split(index: np.ndarray) -> list[np.ndarray]:
        if len(index) <= _MAX_TRIANGLES and len(np.unique(faces[index])) <= MAX_VERTICES:
            return [faces[index]]
        axis = int(np.ptp(features[index], axis=0).argmax())
        order = index[np.argsort(features[index, axis], kind="stable")]
        middle = len(index) // 2
        return split(order[:middle]) + split(order[middle:])

    return split(np.arange(len(faces)))


def _bounds(triangles: np.ndarray) -> tuple[float, ...]:
    """Return the bounding sphere, the axis of the normals and the sine of the angle within which the camera must lie
    behind all of them for the cluster to face away."""
    points = triangles.reshape(-1, 3)
    center = 0.5 * (points.min(0) + points.max(0))
    radius = float(np.linalg.norm(points - center, axis=1).max())
    normals = area_normals(triangles)
    length = np.linalg.norm(normals, axis=1, keepdims=True)
    normals = (normals / np.maximum(length, 1e-12))[length[:, 0] > 1e-12]
    if not len(normals):
        return (*center, radius, 0.0, 0.0, 1.0, 2.0)
    axis = normals.mean(0)
    axis /= max(float(np.linalg.norm(axis)), 1e-12)
    cosine = min(float((normals @ axis).min()), 1.0)
    # A cone of more than a half-space is never culled.
    sine = math.sqrt(1.0 - cosine**2) if cosine > 0.0 else 2.0
    return (*center, radius, *axis, sine)
