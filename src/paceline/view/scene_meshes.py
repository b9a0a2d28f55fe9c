"""The visible geoms of a MuJoCo model as GLB files, which a browser renders."""

import copy
from typing import NamedTuple

import mujoco
import numpy as np
import trimesh
from PIL import Image
from trimesh.exchange.gltf import export_glb
from trimesh.visual.material import PBRMaterial
from trimesh.visual.texture import TextureVisuals

from paceline.cameras.camera import Camera
from paceline.cameras.meshes import heightfield_triangles, mesh_triangles
from paceline.cameras.scene import (
    BOX,
    CAPSULE,
    CYLINDER,
    ELLIPSOID,
    HFIELD,
    MESH,
    PLANE,
    Scene,
    bake_colors,
    make_scene,
)
from paceline.cameras.smooth_normals import computed_normals, mesh_normals, split_vertices

# Half of the width of an infinite plane, m.
_PLANE_RADIUS = 150.0
# Number of segments of a circle, and of the meridian of a capsule.
_SEGMENTS, _MERIDIAN = 20, 12


class SceneMesh(NamedTuple):
    """Geoms that move together."""

    body: int
    """Body in whose frame the geoms are."""
    is_floor: bool
    """True for planes of the world, which all envs share."""
    glb: bytes


class _Surface(NamedTuple):
    """Triangles of a geom in its frame."""

    points: np.ndarray
    """Vertices, float [vertex, 3]; with normals, [vertex, 6]."""
    faces: np.ndarray
    """Vertices of the triangles, int [triangle, 3]."""


def scene_meshes(model: mujoco.MjModel) -> list[SceneMesh]:
    """Return the visible geoms of a model. Geoms of one body are in one file, except planes and heightfields."""
    model = copy.copy(model)
    bake_colors(model)
    scene = make_scene(model, Camera(), {})
    parts: dict[int, list[trimesh.Trimesh]] = {}
    found = list[SceneMesh]()
    for geom in scene.drawn.tolist():
        body, kind, mesh = int(model.geom_bodyid[geom]), model.geom_type[geom], _mesh(scene, geom)
        if kind in (PLANE, HFIELD):
            # A browser merges the meshes of a file, so all or none of them have texture coordinates and normals.
            found.append(SceneMesh(body, bool(kind == PLANE and not body), _glb([mesh], kind == PLANE)))
        else:
            parts.setdefault(body, []).append(mesh)
    return found + [SceneMesh(body, False, _glb(meshes)) for body, meshes in parts.items()]


def _mesh(scene: Scene, geom: int) -> trimesh.Trimesh:
    """Return the triangles of a geom in the frame of its body, with its color or texture."""
    model = scene.model
    has_texture = scene.texture[geom] >= 0 and model.geom_type[geom] in (PLANE, HFIELD)
    surface = _surface(model, geom)
    rotation = np.zeros(9)
    mujoco.mju_quat2Mat(rotation, model.geom_quat[geom])
    rotation = rotation.reshape(3, 3)
    points, normals = surface.points[:, :3], surface.points[:, 3:]
    material = PBRMaterial(
        baseColorFactor=_color(scene, geom, has_texture),
        metallicFactor=0.0,
        roughnessFactor=float(1.0 - 0.6 * scene.specular[geom]),
        alphaMode="BLEND" if model.geom_rgba[geom, 3] < 1.0 else "OPAQUE",
    )
    uv = None
    if has_texture:
        material.baseColorTexture = _image(model, scene.texture[geom])
        uv = points[:, :2] * scene.texture_scale[geom] + scene.texture_offset[geom]
        # The first row of a texture is at v = 0. It is at v = 1 in the coordinates of trimesh.
        uv[:, 1] = 1.0 - uv[:, 1]
    return trimesh.Trimesh(
        points @ rotation.T + model.geom_pos[geom],
        surface.faces,
        vertex_normals=normals @ rotation.T if normals.size else None,
        visual=TextureVisuals(uv=uv, material=material),
        process=False,
    )


def _color(scene: Scene, geom: int, has_texture: bool) -> np.ndarray:
    """Return the color of a geom, RGBA from 0 to 255. A texture that is not drawn changes it to the mean color of the
    texture."""
    model = scene.model
    material, rgba = model.geom_matid[geom], model.geom_rgba[geom]
    roles = mujoco.mjtTextureRole.mjTEXROLE_RGB.value, mujoco.mjtTextureRole.mjTEXROLE_RGBA.value
    texture = max(model.mat_texid[material][list(roles)]) if material >= 0 else -1
    if texture >= 0 and not has_texture:
        rgba = np.append(rgba[:3] * np.asarray(_image(model, texture)).mean((0, 1)) / 255.0, rgba[3])
    return np.rint(255.0 * rgba).astype(np.uint8)


def _image(model: mujoco.MjModel, texture: int) -> Image.Image:
    width, height, channels = model.tex_width[texture], model.tex_height[texture], model.tex_nchannel[texture]
    data = model.tex_data[model.tex_adr[texture] :][: width * height * channels].reshape(height, width, channels)
    return Image.fromarray(data[..., :3] if channels >= 3 else data[..., :1].repeat(3, axis=2))


def _surface(model: mujoco.MjModel, geom: int) -> _Surface:
    size, kind, number = model.geom_size[geom], int(model.geom_type[geom]), int(model.geom_dataid[geom])
    if kind == PLANE:
        # The planes of the world are shared by all envs.
        is_infinite = not model.geom_bodyid[geom]
        x, y = (_PLANE_RADIUS if is_infinite or extent <= 0.0 else extent for extent in size[:2])
        points = np.array([[-x, -y, 0.0], [x, -y, 0.0], [x, y, 0.0], [-x, y, 0.0]])
        return _Surface(points, np.array([[0, 1, 2], [0, 2, 3]]))
    if kind == HFIELD:
        return _heightfield(model, number)
    if kind == MESH:
        points, faces = mesh_triangles(model, number)
        return _Surface(*split_vertices(points, faces, mesh_normals(model, number)))
    if kind == CAPSULE:
        primitive = trimesh.creation.capsule(2.0 * size[1], size[0], count=(_MERIDIAN, _SEGMENTS))
    elif kind == CYLINDER:
        primitive = trimesh.creation.cylinder(size[0], 2.0 * size[1], _SEGMENTS)
    elif kind == BOX:
        primitive = trimesh.creation.box(2.0 * size)
    else:
        primitive = trimesh.creation.icosphere(subdivisions=2).apply_scale(size if kind == ELLIPSOID else size[0])
    points, faces = np.asarray(primitive.vertices), np.asarray(primitive.faces)
    if kind == CAPSULE:
        points = points - (0.0, 0.0, 0.5 * (points[:, 2].min() + points[:, 2].max()))
    return _Surface(*split_vertices(points, faces, computed_normals(points, faces)))


def _heightfield(model: mujoco.MjModel, number: int) -> _Surface:
    """Return the upper side of a heightfield. Without normals, a browser shades each triangle on its own, so that
    steps have sharp edges."""
    points, faces = heightfield_triangles(model, number)
    return _Surface(points.reshape(-1, 3), faces.reshape(-1, 3))


def _glb(meshes: list[trimesh.Trimesh], normals: bool = True) -> bytes:
    return export_glb(trimesh.Scene(meshes), include_normals=normals)
