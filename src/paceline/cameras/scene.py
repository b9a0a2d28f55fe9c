"""Geoms, materials, textures and lights that a camera draws, read from a MuJoCo model.

Lighting follows the fixed-function pipeline of OpenGL, which MuJoCo's own renderer uses: ambient, diffuse and specular
parts of each light, attenuation, spot cone and exponent, with the material's emission, specularity and shininess.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import mujoco
import numpy as np

from paceline.cameras.camera import Camera
from paceline.errors import UserError

PLANE, HFIELD, SPHERE, CAPSULE, ELLIPSOID, CYLINDER, BOX, MESH = range(8)
"""Types of geoms, as in MuJoCo."""
DIRECTIONAL, POINT, SPOT = 0, 1, 2
"""Types of lights."""
_DEFAULT_RGBA = (0.5, 0.5, 0.5, 1.0)
_DEFAULT_SPECULAR = _DEFAULT_SHININESS = 0.5


@dataclass(frozen=True)
class Textures:
    """All textures of a model with their mipmaps in one buffer. A level of a 2D texture is [row, column]; a level of a
    cube texture is [face, row, column], with the faces in OpenGL's order."""

    texels: np.ndarray
    """RGB colors and one unused byte, uint8 [texel, 4]."""
    starts: np.ndarray
    """First texel of each level, int32 [texture, level]."""
    widths: np.ndarray
    """Width of the first level, int32 [texture]; each level has half the width of the level before it."""
    heights: np.ndarray
    """Height of the first level, int32 [texture]."""
    levels: np.ndarray
    """Number of levels, int32 [texture]."""


@dataclass(frozen=True)
class Lights:
    """Lights of a model. The last one is the headlight, which is at the camera and shines along its axis."""

    kind: np.ndarray
    ambient: np.ndarray
    diffuse: np.ndarray
    specular: np.ndarray
    attenuation: np.ndarray
    cutoff: np.ndarray
    """Cosine of the angle between the axis and the border of the cone; -1 for lights other than spots."""
    exponent: np.ndarray
    castshadow: np.ndarray


@dataclass(frozen=True)
class Scene:
    """Everything about a model that a renderer needs besides poses and per-env fields."""

    model: mujoco.MjModel
    drawn: np.ndarray
    """Geoms that the camera draws, int32 [drawn]."""
    classes: np.ndarray
    """Semantic class of each geom, uint8 [geom]; 0 for none."""
    emission: np.ndarray
    """Emission of each geom's material, float32 [geom]."""
    specular: np.ndarray
    shininess: np.ndarray
    """Exponent of the specular part, float32 [geom]."""
    texture: np.ndarray
    """Texture of each geom, int32 [geom]; -1 for none."""
    texture_scale: np.ndarray
    """Repetitions per meter along x and y of a plane, float32 [geom, 2]."""
    texture_offset: np.ndarray
    """Texture coordinates at the center of a plane, float32 [geom, 2]."""
    sky: int
    """Texture of the background; -1 for black."""
    textures: Textures
    lights: Lights


def make_scene(model: mujoco.MjModel, camera: Camera, classes: Mapping[str, int]) -> Scene:
    """Describe what `camera` draws. `classes` maps regular expressions, for names of geoms or of their bodies, to
    semantic classes from 1 to 255."""
    visible = np.isin(model.geom_group, camera.geom_groups) & (model.geom_rgba[:, 3] > 0.0) & (model.geom_type <= MESH)
    material, texture = model.geom_matid, np.full(model.ngeom, -1, dtype=np.int32)
    has = material >= 0
    roles = [mujoco.mjtTextureRole.mjTEXROLE_RGB.value, mujoco.mjtTextureRole.mjTEXROLE_RGBA.value]
    # -1 where a material has no texture in a role.
    if camera.textures:
        texture[has] = model.mat_texid[material[has]][:, roles].max(1)
    for geom in np.flatnonzero(texture >= 0):
        is_cube = model.tex_type[texture[geom]] != mujoco.mjtTexture.mjTEXTURE_2D
        # Other combinations need texture coordinates that only MuJoCo's own renderer has.
        if model.geom_type[geom] not in ((BOX,) if is_cube else (PLANE, HFIELD)):
            texture[geom] = -1
    scale, offset = _plane_texture(model)

    def of_material(name: str, default: float) -> np.ndarray:
        return np.where(has, getattr(model, name)[np.maximum(material, 0)] if model.nmat else default, default)

    skies = np.flatnonzero(model.tex_type == mujoco.mjtTexture.mjTEXTURE_SKYBOX)
    return Scene(
        model,
        np.flatnonzero(visible).astype(np.int32),
        _classes(model, classes),
        of_material("mat_emission", 0.0).astype(np.float32),
        of_material("mat_specular", _DEFAULT_SPECULAR).astype(np.float32),
        (of_material("mat_shininess", _DEFAULT_SHININESS) * 128.0).astype(np.float32),
        texture,
        scale,
        offset,
        int(skies[0]) if len(skies) else -1,
        _textures(model),
        _lights(model),
    )


def bake_colors(model: mujoco.MjModel) -> None:
    """Write the colors of materials into `geom_rgba`, from which renderers read them, so that randomization of
    `geom_rgba` applies to all geoms. MuJoCo uses a geom's own color unless it is the default."""
    for geom in range(model.ngeom):
        material = model.geom_matid[geom]
        if material >= 0 and np.allclose(model.geom_rgba[geom], _DEFAULT_RGBA):
            model.geom_rgba[geom] = model.mat_rgba[material]


def undrawable(model: mujoco.MjModel, camera: Camera) -> str:
    """Return a statement about objects of the model that only MuJoCo Warp's renderer draws; empty if it has none."""
    is_sdf = (model.geom_type == mujoco.mjtGeom.mjGEOM_SDF) & np.isin(model.geom_group, camera.geom_groups)
    found = {"flexes": model.nflex > 0, "SDF geoms": is_sdf.any()}
    kinds = " and ".join(kind for kind, has in found.items() if has)
    return f"the model has {kinds}" if kinds else ""


def _plane_texture(model: mujoco.MjModel) -> tuple[np.ndarray, np.ndarray]:
    scale, offset = np.zeros((model.ngeom, 2), np.float32), np.full((model.ngeom, 2), 0.5, np.float32)
    for geom in np.flatnonzero(np.isin(model.geom_type, (PLANE, HFIELD)) & (model.geom_matid >= 0)):
        material, size = model.geom_matid[geom], model.geom_size[geom, :2]
        repeat, bounded = model.mat_texrepeat[material], size > 0.0
        across = np.where(bounded, repeat * (size if model.mat_texuniform[material] else 1.0), repeat)
        # Texture coordinates go from 0 to `across` over the plane, or over 2 m of an infinite plane.
        scale[geom] = 0.5 * across / np.where(bounded, size, 1.0)
        offset[geom] = np.where(bounded, 0.5 * across, 0.5)
    return scale, offset


def _classes(model: mujoco.MjModel, classes: Mapping[str, int]) -> np.ndarray:
    found = np.zeros(model.ngeom, np.uint8)
    for pattern, number in classes.items():
        if not 1 <= number <= 255:
            raise UserError(f"class {number} of {pattern!r} must be from 1 to 255: 0 is the background")
        names = [(model.geom(geom).name, model.body(model.geom_bodyid[geom]).name) for geom in range(model.ngeom)]
        matches = [geom for geom, pair in enumerate(names) if any(re.fullmatch(pattern, name) for name in pair)]
        if not matches:
            raise UserError(f"no geom or body matches {pattern!r} of class {number}; bodies are {_body_names(model)}")
        found[matches] = number
    return found


def _body_names(model: mujoco.MjModel) -> str:
    return ", ".join(model.body(index).name for index in range(model.nbody))


def _textures(model: mujoco.MjModel) -> Textures:
    texels, starts, count = [], [], 0
    for index in range(model.ntex):
        width, height, channels = model.tex_width[index], model.tex_height[index], model.tex_nchannel[index]
        data = model.tex_data[model.tex_adr[index] :][: width * height * channels]
        is_cube = model.tex_type[index] != mujoco.mjtTexture.mjTEXTURE_2D
        faces = 6 if is_cube and height == 6 * width else 1
        level = data.reshape(faces, height // faces, width, channels)
        level = level[..., :3] if channels >= 3 else level[..., :1].repeat(3, axis=-1)
        if is_cube and faces == 1:
            level = level.repeat(6, axis=0)
        level, begins = level.astype(np.float32), []
        while True:
            begins.append(count)
            rows = np.zeros((level[..., 0].size, 4), np.uint8)
            rows[:, :3] = np.rint(level).reshape(-1, 3)
            texels.append(rows)
            count += len(rows)
            _, rows_left, columns_left, _ = level.shape
            if rows_left % 2 or columns_left % 2:
                break
            level = level.reshape(len(level), rows_left // 2, 2, columns_left // 2, 2, 3).mean((2, 4))
        starts.append(begins)
    levels = np.array([len(begins) for begins in starts], np.int32)
    table = np.zeros((len(starts), levels.max(initial=1)), np.int32)
    for row, begins in zip(table, starts, strict=True):
        row[: len(begins)] = begins
    is_cube = model.tex_type != mujoco.mjtTexture.mjTEXTURE_2D
    heights = np.where(is_cube, model.tex_width, model.tex_height).astype(np.int32)
    colors = np.concatenate(texels) if texels else np.zeros((1, 4), np.uint8)
    return Textures(colors, table, model.tex_width.astype(np.int32), heights, levels)


def _lights(model: mujoco.MjModel) -> Lights:
    headlight = model.vis.headlight
    on = np.append(model.light_active, bool(headlight.active))[:, None]
    kinds = {
        int(mujoco.mjtLightType.mjLIGHT_DIRECTIONAL): DIRECTIONAL,
        int(mujoco.mjtLightType.mjLIGHT_SPOT): SPOT,
        int(mujoco.mjtLightType.mjLIGHT_POINT): POINT,
    }
    kind = np.array([*(kinds.get(int(value), DIRECTIONAL) for value in model.light_type), DIRECTIONAL], np.int32)
    parts = {
        name: np.concatenate((getattr(model, f"light_{name}"), getattr(headlight, name)[None])) * on
        for name in ("ambient", "diffuse", "specular")
    }
    cutoff = np.cos(np.radians(np.append(model.light_cutoff, 180.0)))
    return Lights(
        kind,
        attenuation=np.concatenate((model.light_attenuation, [[1.0, 0.0, 0.0]])).astype(np.float32),
        cutoff=np.where(kind == SPOT, cutoff, -1.0).astype(np.float32),
        exponent=np.where(kind == SPOT, np.append(model.light_exponent, 0.0), 0.0).astype(np.float32),
        castshadow=np.append(model.light_castshadow & model.light_active, False),
        **{name: values.astype(np.float32) for name, values in parts.items()},
    )
