"""Renderer on the GPU: one Warp kernel draws the images of all envs, and can be part of a CUDA graph.

A thread block draws a tile of up to 64x64 pixels. It loads the geoms of its env once, rasterizes triangles (meshes and
heightfields) into a depth buffer in shared memory, and then casts rays at the primitives that may cover each square of
8x8 pixels. The kernel is in renderer.cuh; sizes and options are compiled into it.
"""

# Warp compiles some of these functions, with types that are not Python types.
# pyright: reportIndexIssue=false, reportInvalidTypeForm=false, reportUnknownMemberType=false

import math
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import numpy as np
import torch
import warp as wp
from torch import Tensor

from paceline.cameras.camera import STREAMS, Camera, stream_spec
from paceline.cameras.level_of_detail import MAX_VERTICES, Triangles, describe, make_triangles
from paceline.cameras.scene import HFIELD, MESH, PLANE, Scene, make_scene
from paceline.errors import UserError
from paceline.sim.simulation import Sim
from paceline.sim.warp_sim import on_torch_stream

_THREADS, _THREADS_FOR_TRIANGLES = 128, 256
# With more registers per thread fewer blocks run at once: measured on an H200, meshes are drawn 1.13 times faster.
_MAX_REGISTERS = 64
# Sides of a tile in samples, the fastest first. The depth buffer of triangles, 8 bytes per sample, and the geoms must
# fit into the shared memory of a block.
_TILES = (64, 32, 16)
_SHARED_BYTES = 48 * 1024


class TooManyGeomsError(UserError):
    """The geoms of an env do not fit into the shared memory of a thread block."""


class GpuRenderer:
    """Renders one camera of a `WarpSim`, or in tests of a `MujocoSim`."""

    def __init__(self, name: str, camera: Camera, sim: Sim, classes: Mapping[str, int]):
        wp.config.log_level = wp.LOG_WARNING
        wp.init()
        self._sim = sim
        self.scene: Scene = make_scene(sim.model, camera, classes)
        is_mesh = np.isin(sim.model.geom_type[self.scene.drawn], (MESH, HFIELD))
        # Primitives first.
        drawn = np.concatenate((self.scene.drawn[~is_mesh], self.scene.drawn[is_mesh]))
        self.triangles: Triangles = make_triangles(sim.model, drawn, name, camera)
        self.message = describe(self.triangles, name, camera)
        self._threads = _THREADS_FOR_TRIANGLES if len(self.triangles.cluster_ints) else _THREADS
        counts = {"NUM_PRIMITIVES": int((~is_mesh).sum()), "NUM_DRAWN": len(drawn)}
        choices = [
            _constants(self.scene, name, camera, self.triangles, self._threads, tile) | counts for tile in _TILES
        ]
        constants = next((each for each in choices if len(drawn) <= _max_geoms(each)), None)
        if constants is None:
            raise TooManyGeomsError(
                f"camera {name!r} draws {len(drawn)} geoms, more than {_max_geoms(choices[-1])}: choose fewer "
                "geom_groups, or hide geoms that the camera does not need with an alpha of 0"
            )
        self._blocks = sim.num_envs * constants["TILES"]
        self._kernel, arguments = _make_kernel(constants, camera)
        self._arrays, self._tensors = arguments(), {}
        for table, values in _tables(self.scene, drawn, self.triangles).items():
            self._set(**{table: torch.from_numpy(np.ascontiguousarray(values)).to(sim.device)})
        for pose in ("cam_xpos", "cam_xmat", "geom_xpos", "geom_xmat", "light_xpos", "light_xdir"):
            self._set(**{pose: sim.kinematics(pose)})
        for field in ("cam_fovy", "geom_size", "geom_rgba", "light_ambient", "light_diffuse", "light_specular"):
            self._set(**{field: sim.model_field(field)})
        for stream in STREAMS:
            dtype = stream_spec(camera, stream).dtype
            self._set(**{f"{stream}_out": torch.zeros(1, dtype=dtype, device=sim.device)})

    def render(self, images: dict[str, Tensor], due: Tensor) -> None:
        """Render the envs of `due`, bool [env], into `images`, each [env, channel, height, width] in channels-last
        memory."""
        self._set(due=due, **{f"{stream}_out": image.permute(0, 2, 3, 1) for stream, image in images.items()})
        with on_torch_stream(self._sim.device):
            wp.launch_tiled(self._kernel, dim=[self._blocks], inputs=[self._arrays], block_dim=self._threads)

    def _set(self, **tensors: Tensor) -> None:
        """Set arguments of the kernel. The first dimension of a field of the model is kept: it is 1 if the field is the
        same in all envs."""
        for name, tensor in tensors.items():
            # Warp does not own the memory.
            self._tensors[name] = tensor
            setattr(self._arrays, name, wp.from_torch(tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1)))


def _constants(
    scene: Scene, name: str, camera: Camera, triangles: Triangles, threads: int, tile: int
) -> dict[str, int]:
    """Return the constants of renderer.cuh except the numbers of geoms."""
    model, samples = scene.model, camera.samples
    tiles = [math.ceil(pixels / (tile // samples)) for pixels in (camera.width, camera.height)]
    return {
        "WIDTH": camera.width,
        "HEIGHT": camera.height,
        # Tiles of equal size, a multiple of 8.
        "TILE_WIDTH": 8 * math.ceil(camera.width / tiles[0] / 8),
        "TILE_HEIGHT": 8 * math.ceil(camera.height / tiles[1] / 8),
        "TILES_X": tiles[0],
        "TILES": tiles[0] * tiles[1],
        "SAMPLES": samples,
        "CAMERA": model.camera(name).id,
        "NUM_CAMERAS": model.ncam,
        "NUM_GEOMS": model.ngeom,
        "NUM_LIGHTS": model.nlight,
        "NUM_CLUSTERS": len(triangles.cluster_ints),
        "MAX_VERTICES": MAX_VERTICES,
        "VERTEX_FLOATS": triangles.vertices.shape[1],
        "BLOCK": threads,
        "SKY": scene.sky,
        "TEXTURE_LEVELS": scene.textures.starts.shape[1],
        **{stream.upper(): stream in camera.streams for stream in STREAMS},
        "SHADOWS": camera.shadows,
    }


def _max_geoms(constants: dict[str, int]) -> int:
    """Return the number of geoms that fit into the shared memory of a block, with the layout that is described in
    renderer.cuh."""
    per_geom, needed = 23 * 4, (constants["NUM_LIGHTS"] + 1) * 15 * 4
    if constants["NUM_CLUSTERS"]:
        samples = constants["TILE_WIDTH"] * constants["TILE_HEIGHT"] * constants["SAMPLES"] ** 2
        needed += 8 * samples + constants["BLOCK"] // 32 * MAX_VERTICES * 5 * 4
    return (_SHARED_BYTES - needed) // per_geom


def _tables(scene: Scene, drawn: np.ndarray, triangles: Triangles) -> dict[str, np.ndarray]:
    """Return the constant arrays of the kernel."""
    model, textures, lights = scene.model, scene.textures, scene.lights
    # Planes have no bounding sphere.
    radius = np.where(model.geom_type[drawn] == PLANE, 0.0, model.geom_rbound[drawn])
    materials = (getattr(scene, field)[drawn] for field in ("emission", "specular", "shininess"))
    textured = (*scene.texture_scale[drawn].T, *scene.texture_offset[drawn].T)
    light_floats = np.zeros((len(lights.kind), 16), np.float32)
    light_floats[:, 0] = lights.kind
    light_floats[:, 1:4] = lights.attenuation
    light_floats[:, 4], light_floats[:, 5] = lights.cutoff, lights.exponent
    light_floats[:-1, 6], light_floats[:-1, 7] = model.light_active, lights.castshadow[:-1]
    # The headlight is not part of the model's fields.
    light_floats[-1, 7:] = np.concatenate((lights.ambient[-1], lights.diffuse[-1], lights.specular[-1]))
    sizes = np.stack((textures.widths, textures.heights, textures.levels), axis=1)
    geom_ints = (drawn, model.geom_type[drawn], scene.texture[drawn], scene.classes[drawn])
    return {
        "geom_ints": np.stack(geom_ints, axis=1).astype(np.int32),
        "geom_floats": np.stack((radius, *materials, *textured), axis=1).astype(np.float32),
        "light_floats": light_floats,
        "texture_ints": np.concatenate((sizes, textures.starts), axis=1).astype(np.int32),
        "texels": textures.texels,
        "vertices": triangles.vertices,
        "triangles": triangles.triangles,
        "cluster_floats": triangles.cluster_floats,
        "cluster_ints": triangles.cluster_ints,
    }


def _make_kernel(constants: dict[str, int], camera: Camera) -> tuple[Any, Any]:
    """Compile renderer.cuh with the given constants. Return the kernel and the struct of its arguments."""
    depth_type = wp.float16 if camera.depth_dtype == "float16" else wp.float32
    lines = [f"constexpr int {name} = {int(value)};" for name, value in constants.items()]
    lines += [f"constexpr float NEAR = {camera.near!r}f, FAR = {camera.far!r}f;"]
    source = (files("paceline.cameras") / "renderer.cuh").read_text()

    @wp.struct
    class Arrays:
        due: wp.array2d[bool]
        cam_xpos: wp.array2d[float]
        cam_xmat: wp.array2d[float]
        geom_xpos: wp.array2d[float]
        geom_xmat: wp.array2d[float]
        cam_fovy: wp.array2d[float]
        geom_size: wp.array2d[float]
        geom_rgba: wp.array2d[float]
        light_xpos: wp.array2d[float]
        light_xdir: wp.array2d[float]
        light_ambient: wp.array2d[float]
        light_diffuse: wp.array2d[float]
        light_specular: wp.array2d[float]
        geom_ints: wp.array2d[int]
        geom_floats: wp.array2d[float]
        light_floats: wp.array2d[float]
        texture_ints: wp.array2d[int]
        texels: wp.array2d[wp.uint8]
        vertices: wp.array2d[float]
        triangles: wp.array2d[int]
        cluster_floats: wp.array2d[float]
        cluster_ints: wp.array2d[int]
        rgb_out: wp.array2d[wp.uint8]
        depth_out: wp.array2d[depth_type]
        distance_out: wp.array2d[depth_type]
        segmentation_out: wp.array2d[int]
        classes_out: wp.array2d[wp.uint8]
        normals_out: wp.array2d[depth_type]

    @wp.func_native("\n".join((*lines, source)))
    def draw(block: int, arrays: Arrays): ...  # pyright: ignore[reportGeneralTypeIssues]

    @wp.kernel(
        module="unique", enable_backward=False, module_options={"fast_math": True}, cuda_max_registers=_MAX_REGISTERS
    )
    def render_tiles(arrays: Arrays):  # pyright: ignore[reportGeneralTypeIssues]
        draw(wp.tid(), arrays)

    return render_tiles, Arrays
