"""Render a MuJoCo model with Newton's SensorTiledCamera, as a peer in bench/cameras.py. Needs `newton`, no extras.

Each drawn geom of the compiled model is one shape of the same type, size and pose, so both renderers draw the same
surfaces. Rays are traced in tiles of 8x8 pixels, which is Newton's fastest order for small images.
"""

import math
import warnings

import mujoco
import newton
import numpy as np
import torch
import warp as wp
from newton.sensors import SensorTiledCamera
from torch import Tensor

BLOCK = 64
GEOM = mujoco.mjtGeom


class NewtonScene:
    """A MuJoCo model in many envs.

    `xpos` and `xquat` are the poses of the bodies, [env, body, ...]. `drawn` are the geoms to draw.
    """

    def __init__(self, model: mujoco.MjModel, drawn: np.ndarray, xpos: Tensor, xquat: Tensor):
        self.mujoco_model, self.drawn, self.num_envs = model, drawn, len(xpos)
        builder = newton.ModelBuilder()
        builder.replicate(build_env(model, drawn), self.num_envs)
        self.model = builder.finalize(device=wp.device_from_torch(xpos.device))
        self.state = self.model.state()
        # A pose of Newton is a position and a quaternion with w last. The world is no body.
        poses = torch.cat((xpos, xquat[..., 1:], xquat[..., :1]), -1)[:, 1:].reshape(-1, 7).contiguous()
        wp.copy(self.state.body_q, wp.from_torch(poses, dtype=wp.transformf))
        # A refit keeps the tree, which was built with all bodies at the origin.
        self.model.bvh_build_shapes(self.state)


class NewtonCamera:
    """Renders color, depth along the axis and shape indices of the first camera of a scene, which is fixed."""

    def __init__(self, scene: NewtonScene, size: int):
        self._scene, model = scene, scene.mujoco_model
        config = SensorTiledCamera.RenderConfig(
            render_order=SensorTiledCamera.RenderOrder.TILED, tile_width=8, tile_height=8, enable_particles=False
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self._sensor = SensorTiledCamera(scene.model, default_render_config=config, load_textures=False)
        utils = self._sensor.utils
        utils.create_default_light(enable_shadows=False)
        self._rays = utils.compute_camera_rays_pinhole(size, size, camera_fovs=math.radians(model.cam_fovy[0]))
        w, *xyz = model.cam_quat[0]
        pose = wp.transformf(wp.vec3f(*model.cam_pos[0]), wp.quatf(*xyz, w))
        self._camera = wp.array([[pose] * scene.num_envs], dtype=wp.transformf, device=scene.model.device)
        self._images = {
            "color_image": utils.create_color_image_output(size, size),
            "forward_depth_image": utils.create_forward_depth_image_output(size, size),
            "shape_index_image": utils.create_shape_index_image_output(size, size),
        }

    def render(self) -> None:
        """Refit the bounding volumes and render all envs."""
        self._scene.model.bvh_refit_shapes(self._scene.state)
        self._sensor.update(self._scene.state, self._camera, self._rays, kernel_block_dim=BLOCK, **self._images)

    def images(self) -> dict[str, np.ndarray]:
        """Return depth and geom indices of env 0, [row, column]."""
        shape, drawn = self._images["shape_index_image"].numpy()[0, 0].astype(np.int64), self._scene.drawn
        hit = shape < len(drawn)
        geom = np.where(hit, drawn[np.where(hit, shape, 0)], -1)
        return {"depth": self._images["forward_depth_image"].numpy()[0, 0], "geom": geom}


def build_env(model: mujoco.MjModel, drawn: np.ndarray) -> newton.ModelBuilder:
    """Return one env: a body for each body of the model, and a shape for each drawn geom, in their order."""
    builder, meshes = newton.ModelBuilder(), {}
    builder.default_shape_cfg = newton.ModelBuilder.ShapeConfig(
        density=0.0, has_shape_collision=False, has_particle_collision=False
    )
    for _ in range(1, model.nbody):
        builder.add_body()
    for geom in drawn:
        w, *xyz = model.geom_quat[geom].tolist()
        common = {
            "body": int(model.geom_bodyid[geom]) - 1,
            "xform": wp.transformf(wp.vec3f(*model.geom_pos[geom].tolist()), wp.quatf(*xyz, w)),
            "color": tuple(model.geom_rgba[geom, :3].tolist()),
        }
        x, y, z = model.geom_size[geom].tolist()
        kind = model.geom_type[geom]
        if kind == GEOM.mjGEOM_PLANE:
            builder.add_shape_plane(width=2 * x, length=2 * y, **common)
        elif kind == GEOM.mjGEOM_SPHERE:
            builder.add_shape_sphere(radius=x, **common)
        elif kind == GEOM.mjGEOM_CAPSULE:
            builder.add_shape_capsule(radius=x, half_height=y, **common)
        elif kind == GEOM.mjGEOM_ELLIPSOID:
            builder.add_shape_ellipsoid(rx=x, ry=y, rz=z, **common)
        elif kind == GEOM.mjGEOM_CYLINDER:
            builder.add_shape_cylinder(radius=x, half_height=y, **common)
        elif kind == GEOM.mjGEOM_BOX:
            builder.add_shape_box(hx=x, hy=y, hz=z, **common)
        elif kind == GEOM.mjGEOM_MESH:
            index = int(model.geom_dataid[geom])
            meshes.setdefault(index, make_mesh(model, index))
            builder.add_shape_mesh(mesh=meshes[index], **common)
        else:
            raise ValueError(f"geom {geom} has type {kind}, which this benchmark does not draw with Newton")
    return builder


def make_mesh(model: mujoco.MjModel, index: int) -> newton.Mesh:
    """Return a mesh of the model, which Newton shades flat."""
    first, count = model.mesh_vertadr[index], model.mesh_vertnum[index]
    faces = model.mesh_face[model.mesh_faceadr[index] :][: model.mesh_facenum[index]]
    return newton.Mesh(model.mesh_vert[first : first + count], faces.flatten(), compute_inertia=False)
