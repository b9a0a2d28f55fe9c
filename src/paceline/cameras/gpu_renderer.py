"""Renderer on the GPU: one Warp kernel draws the images of all envs, and can be part of a CUDA graph.

A thread block draws a tile of up to 64x64 pixels. It loads the geoms of its env once, rasterizes triangles (meshes and
heightfields) into a depth buffer in shared memory, and then casts rays at the primitives that may cover each square of
8x8 pixels. The kernel is in renderer.cuh; sizes and options are compiled into it.
"""

import math
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import numpy as np
import torch
import warp as wp
from torch import Tensor

from paceline.cameras.camera import Camera, Stream
from paceline.cameras.level_of_detail import Triangles, make_triangles
from paceline.cameras.scene import HFIELD, MESH, Scene, make_scene
from paceline.sim.warp_sim import WarpSim, on_torch_stream

_THREADS = 128
# Side of a tile in samples. Its depth buffer, 8 bytes per sample, must fit into the shared memory of a block.
_TILE = 64
_OUTPUTS: dict[Stream, Any] = {"rgb": wp.uint8, "segmentation": wp.int32, "classes": wp.uint8}


class GpuRenderer:
    """Renders one camera of a `WarpSim`."""

    def __init__(self, name: str, camera: Camera, sim: WarpSim, classes: Mapping[str, int]):
        self._camera, self._sim = camera, sim
        self.scene: Scene = make_scene(sim.model, camera, classes)
        model, is_mesh = sim.model, np.isin(sim.model.geom_type[self.scene.drawn], (MESH, HFIELD))
        # Primitives first.
        drawn = np.concatenate((self.scene.drawn[~is_mesh], self.scene.drawn[is_mesh]))
        self.triangles: Triangles = make_triangles(model, drawn, name, camera)
        samples = 2 if camera.antialias and "rgb" in camera.streams else 1
        tiles = [math.ceil(size / (_TILE // samples)) for size in (camera.width, camera.height)]
        # Tiles of equal size, a multiple of 8.
        tile = [8 * math.ceil(size / count / 8) for size, count in zip((camera.width, camera.height), tiles, strict=True)]
        textures, lights = self.scene.textures, self.scene.lights
        constants = {
            "WIDTH": camera.width,
            "HEIGHT": camera.height,
            "TILE_WIDTH": tile[0],
            "TILE_HEIGHT": tile[1],
            "TILES_X": tiles[0],
            "TILES": tiles[0] * tiles[1],
            "SAMPLES": samples,
            "CAMERA": model.camera(name).id,
            "NUM_CAMERAS": model.ncam,
            "NUM_GEOMS": model.ngeom,
            "NUM_PRIMITIVES": int((~is_mesh).sum()),
            "NUM_DRAWN": len(drawn),
            "NUM_LIGHTS": model.nlight,
            "NUM_CLUSTERS": len(self.triangles.cluster_ints),
            "NUM_TRIANGLES": self.triangles.count,
            "SKY": self.scene.sky,
            "TEXTURE_LEVELS": textures.starts.shape[1],
            **{stream.upper(): stream in camera.streams for stream in (*_OUTPUTS, "depth", "distance", "normals")},
            "SHADOWS": camera.shadows,
        }
        self._blocks = sim.num_envs * tiles[0] * tiles[1]
        self._kernel = _make_kernel(constants, camera)
        self._poses = [sim.kinematics(name) for name in ("cam_xpos", "cam_xmat", "geom_xpos", "geom_xmat")]
        self._light_poses = [sim.kinematics(name) for name in ("light_xpos", "light_xdir")]
        scene, device = self.scene, sim.device
        geom_ints = np.stack((drawn, model.geom_type[drawn], scene.texture[drawn], scene.classes[drawn]), axis=1)
        radius = np.where(model.geom_type[drawn] == 0, 0.0, model.geom_rbound[drawn])
        materials = [getattr(scene, field)[drawn] for field in ("emission", "specular", "shininess")]
        planes = scene.texture_scale[drawn].T, scene.texture_offset[drawn].T
        geom_floats = np.stack((radius, *materials, *planes[0], *planes[1]), axis=1)
        light_floats = np.zeros((len(lights.kind), 16))
        light_floats[:, 0] = lights.kind
        light_floats[:, 1:4] = lights.attenuation
        light_floats[:, 4], light_floats[:, 5] = lights.cutoff, lights.exponent
        light_floats[:-1, 6], light_floats[:-1, 7] = model.light_active, lights.castshadow[:-1]
        light_floats[-1, 7:] = np.concatenate((lights.ambient[-1], lights.diffuse[-1], lights.specular[-1]))
        texture_ints = np.concatenate(
            (np.stack((textures.widths, textures.heights, textures.levels), axis=1), textures.starts), axis=1
        )
        arrays = {
            "geom_ints": geom_ints.astype(np.int32),
            "geom_floats": geom_floats.astype(np.float32),
            "light_floats": light_floats.astype(np.float32),
            "texture_ints": texture_ints.astype(np.int32),
            "texels": textures.texels,
            "triangles": self.triangles.corners,
            "cluster_floats": self.triangles.cluster_floats,
            "cluster_ints": self.triangles.cluster_ints,
        }
        # Tensors, because Warp does not own their memory and a graph needs it at the same place.
        self._tables = [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays.values()]
        self._no_output = {dtype: torch.zeros(1, dtype=dtype, device=device) for dtype in _torch_types(camera)}

    def render(self, images: dict[str, Tensor], due: Tensor) -> None:
        """Render the envs of `due`, bool [env], into `images`, each [env, channel, height, width] in channels-last
        memory."""
        sim = self._sim
        fields = [sim.model_field(name) for name in ("cam_fovy", "geom_size", "geom_rgba")]
        lights = [sim.model_field(f"light_{name}") for name in ("ambient", "diffuse", "specular")]
        outputs = [
            images[stream].permute(0, 2, 3, 1) if stream in images else self._no_output[dtype]
            for stream, dtype in zip(_STREAMS, _torch_types(self._camera), strict=True)
        ]
        inputs = [due, *self._poses, *fields, *self._light_poses, *lights, *self._tables, *outputs]
        with on_torch_stream(sim.device):
            wp.launch_tiled(
                self._kernel, dim=[self._blocks], inputs=[_flat(tensor) for tensor in inputs], block_dim=_THREADS
            )


_STREAMS: tuple[Stream, ...] = ("rgb", "depth", "distance", "segmentation", "classes", "normals")


def _torch_types(camera: Camera) -> list[torch.dtype]:
    depth = camera.depth_type
    return [torch.uint8, depth, depth, torch.int32, torch.uint8, depth]


def _flat(tensor: Tensor) -> wp.array:
    """Return a Warp array over the memory of a tensor. The first dimension of fields of the model is kept, because the
    kernel reads from it whether they differ between envs."""
    return wp.from_torch(tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1))


def _make_kernel(constants: dict[str, int], camera: Camera) -> Any:
    """Compile renderer.cuh with the given constants."""
    depth = wp.float16 if camera.depth_dtype == "float16" else wp.float32
    lines = [f"constexpr int {name} = {int(value)};" for name, value in constants.items()]
    lines += [f"constexpr float NEAR = {camera.near!r}f, FAR = {camera.far!r}f;"]
    source = (files("paceline.cameras") / "renderer.cuh").read_text()
    code = "\n".join((*lines, source))

    @wp.func_native(code)
    def draw(
        block: int,
        due: wp.array2d(dtype=bool),
        cam_xpos: wp.array2d(dtype=float),
        cam_xmat: wp.array2d(dtype=float),
        geom_xpos: wp.array2d(dtype=float),
        geom_xmat: wp.array2d(dtype=float),
        fovy: wp.array2d(dtype=float),
        geom_size: wp.array2d(dtype=float),
        geom_rgba: wp.array2d(dtype=float),
        light_xpos: wp.array2d(dtype=float),
        light_xdir: wp.array2d(dtype=float),
        light_ambient: wp.array2d(dtype=float),
        light_diffuse: wp.array2d(dtype=float),
        light_specular: wp.array2d(dtype=float),
        geom_ints: wp.array2d(dtype=int),
        geom_floats: wp.array2d(dtype=float),
        light_floats: wp.array2d(dtype=float),
        texture_ints: wp.array2d(dtype=int),
        texels: wp.array2d(dtype=wp.uint8),
        triangles: wp.array2d(dtype=float),
        cluster_floats: wp.array2d(dtype=float),
        cluster_ints: wp.array2d(dtype=int),
        rgb_out: wp.array2d(dtype=wp.uint8),
        depth_out: wp.array2d(dtype=depth),
        distance_out: wp.array2d(dtype=depth),
        segmentation_out: wp.array2d(dtype=int),
        classes_out: wp.array2d(dtype=wp.uint8),
        normals_out: wp.array2d(dtype=depth),
    ): ...

    @wp.kernel(module="unique", enable_backward=False)
    def render_tiles(
        due: wp.array2d(dtype=bool),
        cam_xpos: wp.array2d(dtype=float),
        cam_xmat: wp.array2d(dtype=float),
        geom_xpos: wp.array2d(dtype=float),
        geom_xmat: wp.array2d(dtype=float),
        fovy: wp.array2d(dtype=float),
        geom_size: wp.array2d(dtype=float),
        geom_rgba: wp.array2d(dtype=float),
        light_xpos: wp.array2d(dtype=float),
        light_xdir: wp.array2d(dtype=float),
        light_ambient: wp.array2d(dtype=float),
        light_diffuse: wp.array2d(dtype=float),
        light_specular: wp.array2d(dtype=float),
        geom_ints: wp.array2d(dtype=int),
        geom_floats: wp.array2d(dtype=float),
        light_floats: wp.array2d(dtype=float),
        texture_ints: wp.array2d(dtype=int),
        texels: wp.array2d(dtype=wp.uint8),
        triangles: wp.array2d(dtype=float),
        cluster_floats: wp.array2d(dtype=float),
        cluster_ints: wp.array2d(dtype=int),
        rgb_out: wp.array2d(dtype=wp.uint8),
        depth_out: wp.array2d(dtype=depth),
        distance_out: wp.array2d(dtype=depth),
        segmentation_out: wp.array2d(dtype=int),
        classes_out: wp.array2d(dtype=wp.uint8),
        normals_out: wp.array2d(dtype=depth),
    ):
        block = wp.tid()
        draw(
            block, due, cam_xpos, cam_xmat, geom_xpos, geom_xmat, fovy, geom_size, geom_rgba, light_xpos, light_xdir,
            light_ambient, light_diffuse, light_specular, geom_ints, geom_floats, light_floats, texture_ints, texels,
            triangles, cluster_floats, cluster_ints, rgb_out, depth_out, distance_out, segmentation_out, classes_out,
            normals_out,
        )  # fmt: skip

    return render_tiles
