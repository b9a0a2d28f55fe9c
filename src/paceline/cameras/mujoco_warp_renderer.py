"""MuJoCo Warp's own renderer, for scenes that the GPU renderer cannot draw."""

import copy
from collections.abc import Mapping

import mujoco
import mujoco_warp as mjw
import torch
import warp as wp
from torch import Tensor

from paceline.cameras.camera import Camera
from paceline.cameras.scene import make_scene
from paceline.errors import UserError
from paceline.sim.warp_sim import WarpSim, on_torch_stream

_GEOM = mujoco.mjtObj.mjOBJ_GEOM.value


class MujocoWarpRenderer:
    """Renders one camera of a `WarpSim`. It renders all envs, and keeps the images of those that are due.

    It draws all triangles of meshes, and has neither a near plane nor normals.
    """

    def __init__(self, name: str, camera: Camera, sim: WarpSim, classes: Mapping[str, int]):
        if "normals" in camera.streams:
            raise UserError(f"camera {name!r}: MuJoCo Warp's renderer has no stream 'normals': leave it out of streams")
        if camera.samples > 1 and "cam_fovy" in sim.per_env_fields:
            raise UserError(
                f"camera {name!r}: MuJoCo Warp's renderer has no antialias with a randomized cam_fovy: choose one"
            )
        self._camera, self._sim = camera, sim
        model = copy.copy(sim.model)
        # No limit: depths are limited to `far`, colors are not.
        model.vis.map.zfar = 0.0
        self._classes = torch.from_numpy(make_scene(model, camera, classes).classes).to(sim.device)
        wants_depth, wants_geom = (
            any(stream in camera.streams for stream in streams)
            for streams in (("depth", "distance"), ("segmentation", "classes"))
        )
        with on_torch_stream(sim.device):
            self._context = mjw.create_render_context(
                model,
                nworld=sim.num_envs,
                cam_res=[(camera.width, camera.height)],
                render_rgb=["rgb" in camera.streams],
                render_depth=[wants_depth],
                render_seg=[wants_geom],
                use_textures=camera.textures,
                use_shadows=camera.shadows,
                enabled_geom_groups=list(camera.geom_groups),
                cam_active=[name],
                use_precomputed_rays="cam_fovy" not in sim.per_env_fields,
                render_skybox=True,
                shadow_light_fraction=0.0,
                samples_per_pixel=camera.samples,
                enable_vertex_normals=camera.smooth_normals,
            )
        shape = (sim.num_envs, camera.height, camera.width, -1)
        # Bytes in the order blue, green, red, alpha.
        self._bgra = (
            wp.to_torch(self._context.rgb_data).view(torch.uint8).view(shape) if "rgb" in camera.streams else None
        )
        self._depth = wp.to_torch(self._context.depth_data).view(shape) if wants_depth else None
        # Index and type of the object.
        self._object = wp.to_torch(self._context.seg_data).view(shape) if wants_geom else None
        columns, rows = (torch.arange(size, device=sim.device) + 0.5 for size in (camera.width, camera.height))
        x, y = torch.meshgrid(2.0 * columns - camera.width, 2.0 * rows - camera.height, indexing="xy")
        # Squared offset of a ray from the axis at a depth of 1 and a tangent of 1, [height, width, 1].
        self._offset = ((x.square() + y.square()) / camera.height**2).unsqueeze(-1)
        self._index = model.camera(name).id

    def render(self, images: dict[str, Tensor], due: Tensor) -> None:
        """Render the envs of `due`, bool [env], into `images`, each [env, channel, height, width] in channels-last
        memory."""
        with on_torch_stream(self._sim.device):
            mjw.refit_bvh(self._sim.warp_model, self._sim.warp_data, self._context)
            mjw.render(self._sim.warp_model, self._sim.warp_data, self._context)
        due = due.view(-1, 1, 1, 1)
        for stream, image in images.items():
            image = image.permute(0, 2, 3, 1)
            image.copy_(torch.where(due, self._image(stream).to(image.dtype), image))

    def _image(self, stream: str) -> Tensor:
        """Return the latest images of a stream, [env, height, width, channel]."""
        if stream == "rgb":
            assert self._bgra is not None
            return self._bgra[..., :3].flip(-1)
        if stream in ("depth", "distance"):
            assert self._depth is not None
            far = self._camera.far
            # The depth of a miss is 0.
            depth = torch.where(self._depth > 0.0, self._depth, far)
            if stream == "distance":
                fovy = self._sim.model_field("cam_fovy")[:, self._index]
                tangent = torch.tan(0.5 * torch.deg2rad(fovy)).view(-1, 1, 1, 1)
                depth = depth * torch.sqrt(1.0 + self._offset * tangent.square())
            return depth.clamp(max=far)
        assert self._object is not None
        index, kind = self._object.split(1, dim=-1)
        is_geom = kind == _GEOM
        if stream == "segmentation":
            return torch.where(is_geom, index, -1)
        return torch.where(is_geom, self._classes[index.clamp(min=0).long()], 0)
