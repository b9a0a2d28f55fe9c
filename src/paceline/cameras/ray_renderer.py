"""Renderer on the CPU: MuJoCo casts one ray per pixel in all envs, on all cores. It needs neither OpenGL nor Warp."""

import copy
from collections.abc import Mapping
from typing import NamedTuple

import mujoco
import numpy as np
import torch
from torch import Tensor

from paceline.cameras.camera import Camera
from paceline.cameras.heightfield_rays import HeightfieldRays
from paceline.cameras.scene import DIRECTIONAL, HFIELD, MESH, Scene, make_scene
from paceline.cameras.shading import EnvAppearance, Hits, Shader
from paceline.cameras.smooth_normals import SmoothMesh
from paceline.sim.mujoco_sim import MujocoSim

# Number of rays that are cast at once, which bounds the memory.
_RAYS_PER_CALL = 2**18
# A ray that starts inside a geom hits its surface from inside, which is not drawn. The ray continues behind the hit.
_MOST_SURFACES = 4
_CONTINUE = 1e-5
# Fields that change where or how geoms are drawn.
_GEOM_FIELDS = ("geom_pos", "geom_quat", "geom_size", "geom_rgba", "body_pos", "body_quat")
# Distance by which a shadow ray starts above the surface, m.
_SHADOW_OFFSET = 1e-4


class RayRenderer:
    """Renders one camera of a `MujocoSim`.

    If neither the camera nor the lights move, geoms that cannot move are rendered once. With `background` False, they
    are rendered in every image.
    """

    def __init__(self, name: str, camera: Camera, sim: MujocoSim, classes: Mapping[str, int], background: bool = True):
        self._camera, self._sim = camera, sim
        self.scene: Scene = make_scene(sim.model, camera, classes)
        self._index = sim.model.camera(name).id
        self._shader = Shader(self.scene)
        groups = np.isin(np.arange(mujoco.mjNGROUP), camera.geom_groups)
        self._groups = groups.astype(np.uint8)
        self._poses = {
            name: sim.kinematics(name)
            for name in ("cam_xpos", "cam_xmat", "light_xpos", "light_xdir", "geom_xpos", "geom_xmat")
        }
        # Directions for a field of view with a tangent of 1, [ray, 3].
        self._samples = camera.samples
        columns, rows = (np.arange(size * self._samples) + 0.5 for size in (camera.width, camera.height))
        x = (columns - 0.5 * len(columns)) / (0.5 * len(rows))
        y = (0.5 * len(rows) - rows) / (0.5 * len(rows))
        self._grid = np.stack((*np.meshgrid(x, y), np.full((len(rows), len(columns)), -1.0)), axis=-1).reshape(-1, 3)
        self._terrain = _find_terrain(sim, self.scene)
        self._smooth_meshes = self._make_smooth_meshes() if camera.smooth_normals else {}
        self._background: _Pixels | None = None
        if background and not camera.shadows and _is_fixed(sim, self._index):
            self._background = self._render_background(name, classes)

    def _make_smooth_meshes(self) -> dict[int, SmoothMesh]:
        """Return the meshes of the drawn geoms, by geom."""
        model, drawn = self._sim.model, self.scene.drawn
        meshes = {geom: int(model.geom_dataid[geom]) for geom in drawn.tolist() if model.geom_type[geom] == MESH}
        made = {mesh: SmoothMesh(model, mesh) for mesh in set(meshes.values())}
        return {geom: made[mesh] for geom, mesh in meshes.items()}

    def _render_background(self, name: str, classes: Mapping[str, int]) -> "_Pixels":
        """Render the geoms that cannot move, which are the same in all envs."""
        model = self._sim.model
        fixed = _without(model, model.body_weldid[model.geom_bodyid] != 0)
        renderer = RayRenderer(name, self._camera, MujocoSim(fixed, 1), classes, background=False)
        return renderer._pixels(renderer._view(torch.zeros(1, dtype=torch.int64)))

    def render(self, images: dict[str, Tensor], due: Tensor) -> None:
        """Render the envs of `due`, bool [env], into `images`, each [env, channel, height, width]."""
        envs = due.nonzero()[:, 0]
        for chunk in envs.split(max(1, _RAYS_PER_CALL // len(self._grid))):
            self._render_envs(images, chunk)

    def _render_envs(self, images: dict[str, Tensor], envs: Tensor) -> None:
        view, far = self._view(envs), self._camera.far
        pixels = self._pixels(view)
        shape = (len(envs), self._camera.height * self._samples, self._camera.width * self._samples)
        # Streams other than rgb have one sample per pixel, the first of four.
        first = (slice(None), slice(None, None, self._samples), slice(None, None, self._samples))
        for stream in self._camera.streams:
            if stream == "rgb":
                image = pixels.color.reshape(*shape, 3)
            elif stream == "depth":
                image = np.where(pixels.geom >= 0, np.minimum(pixels.depth, far), far).reshape(shape)[first]
            elif stream == "distance":
                distance = pixels.depth * np.linalg.norm(view.rays, axis=-1)
                image = np.where(pixels.geom >= 0, np.minimum(distance, far), far).reshape(shape)[first]
            elif stream == "segmentation":
                image = pixels.geom.reshape(shape)[first]
            elif stream == "classes":
                image = np.where(pixels.geom >= 0, self.scene.classes[pixels.geom], 0).reshape(shape)[first]
            else:
                image = pixels.normal.reshape(*shape, 3)[first]
            image = torch.from_numpy(image)
            image = image.permute(0, 3, 1, 2) if image.dim() == 4 else image.unsqueeze(1)
            if stream == "rgb" and self._samples > 1:
                image = torch.nn.functional.avg_pool2d(image, self._samples)
            if stream == "rgb":
                image = image.mul(255.0).add_(0.5)
            images[stream][envs] = image.to(images[stream].dtype)

    def _pixels(self, view: "_View") -> "_Pixels":
        """Cast the rays of a view and compute their colors, if the camera has the stream rgb."""
        depth, geom, normal = self._cast(view)
        self._smooth(view, depth, geom, normal)
        behind, back = np.zeros(geom.shape, dtype=bool), self._background
        if back:
            # The rays have ignored geoms that cannot move.
            behind = (geom < 0) | ((back.geom >= 0) & (back.depth < depth))
            depth, geom = np.where(behind, back.depth, depth), np.where(behind, back.geom, geom)
            normal = np.where(behind[..., None], back.normal, normal)
        color = np.zeros((*geom.shape, 3), np.float32)
        if "rgb" in self._camera.streams:
            if back:
                color[...] = back.color
            else:
                self._add_sky(color, view, geom < 0)
            self._add_colors(color, view, depth, geom, normal, (geom >= 0) & ~behind)
        return _Pixels(depth, geom, normal, color)

    def _view(self, envs: Tensor) -> "_View":
        index, ids = self._index, envs.numpy()
        fovy = self._sim.model_field("cam_fovy").expand(self._sim.num_envs, -1)[envs, index].double().numpy()
        tangent, directions = np.tan(0.5 * np.radians(fovy)), self._grid[None].repeat(len(ids), 0)
        directions[..., :2] *= tangent[:, None, None]
        matrix = self._poses["cam_xmat"][envs, index].double().numpy()
        origin = self._poses["cam_xpos"][envs, index].double().numpy()
        return _View(ids, origin[:, None], directions @ matrix.transpose(0, 2, 1), -matrix[:, :, 2], tangent)

    def _cast(self, view: "_View") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the depth, the geom (-1 for none) and the normal of the first surface that each ray hits from outside,
        beyond the near plane."""
        start = np.full(view.rays.shape[:2], self._camera.near)
        terrain = self._cast_at_terrain(view)
        depth, geom, normal = self._ray(view, slice(None), start, terrain)
        for _ in range(_MOST_SURFACES):
            inside = (geom >= 0) & ((normal * view.rays).sum(-1) > 0.0)
            rows = np.flatnonzero(inside.any(1))
            if not len(rows):
                break
            start = np.where(inside, depth + _CONTINUE, start)
            depth[rows], geom[rows], normal[rows] = self._ray(view, rows, start[rows], terrain)
        return depth, geom, normal

    def _cast_at_terrain(self, view: "_View") -> tuple[np.ndarray, np.ndarray] | None:
        """Return depths, infinite for none, and normals of the heightfield, or None if MuJoCo has to cast the rays."""
        if self._terrain is None or self._background is not None or not self._terrain.rays.are_above(view.origin[:, 0]):
            return None
        only_depth = {"depth", "distance"}.issuperset(self._camera.streams)
        return self._terrain.rays.cast(view.origin, view.rays, self._camera.far if only_depth else np.inf)

    def _smooth(self, view: "_View", depth: np.ndarray, geom: np.ndarray, normal: np.ndarray) -> None:
        """Replace the normals of meshes by smooth ones."""
        for index, mesh in self._smooth_meshes.items():
            rows, columns = (geom == index).nonzero()
            if not len(rows):
                continue
            envs = view.envs[rows]
            pos, mat = (self._poses[name].numpy()[envs, index].astype(float) for name in ("geom_xpos", "geom_xmat"))
            point = view.origin[rows, 0] + depth[rows, columns, None] * view.rays[rows, columns] - pos
            local = (np.einsum("nji,nj->ni", mat, vector) for vector in (point, normal[rows, columns]))
            normal[rows, columns] = np.einsum("nij,nj->ni", mat, mesh.normals(*local))

    def _ray(
        self,
        view: "_View",
        rows: slice | np.ndarray,
        start: np.ndarray,
        terrain: tuple[np.ndarray, np.ndarray] | None,
    ) -> tuple[np.ndarray, ...]:
        rays = view.rays[rows]
        points = view.origin[rows] + start[..., None] * rays
        # Distances are in units of the length of a ray, which is 1 along the axis of the camera.
        distance, geom, normal = self._sim.batch.ray(
            points,
            rays,
            geomgroup=self._groups,
            flg_static=self._background is None,
            bodyexclude=self._terrain.body if self._terrain and terrain else -1,
            ids=view.envs[rows],
            normal=True,
        )
        distance += start
        if self._terrain and terrain:
            depth, terrain_normal = (part[rows] for part in terrain)
            on_terrain = np.where((depth >= start) & np.isfinite(depth), self._terrain.geom, -1)
            _keep_nearer((distance, geom, normal), (depth, on_terrain, terrain_normal))
            if self._terrain.others:
                one = (1, -1, 3)
                found = self._terrain.others.batch.ray(
                    points.reshape(one), rays.reshape(one), geomgroup=self._groups, normal=True
                )
                depth, other, other_normal = (part.reshape(*start.shape, *part.shape[2:]) for part in found)
                _keep_nearer((distance, geom, normal), (depth + start, other, other_normal))
        return distance, geom, normal

    def _add_sky(self, color: np.ndarray, view: "_View", missed: np.ndarray) -> None:
        """Write the colors of the background for the rays of `missed`, bool [env, ray]."""
        if missed.any():
            color[missed] = self._shader.sky(torch.from_numpy(view.rays[missed]).float()).numpy()

    def _add_colors(
        self,
        color: np.ndarray,
        view: "_View",
        depth: np.ndarray,
        geom: np.ndarray,
        normal: np.ndarray,
        shaded: np.ndarray,
    ) -> None:
        """Write the colors from 0 to 1 of the rays of `shaded`, bool [env, ray]."""
        rows, columns = shaded.nonzero()
        if not len(rows):
            return
        rays, hit_depth = view.rays[rows, columns], depth[rows, columns]
        pixel = 2.0 * view.tangent / (self._camera.height * self._samples)
        hits = Hits(
            env=torch.from_numpy(view.envs[rows]),
            geom=torch.from_numpy(geom[rows, columns]).long(),
            point=torch.from_numpy(view.origin[rows, 0] + hit_depth[:, None] * rays).float(),
            normal=torch.from_numpy(normal[rows, columns]).float(),
            ray=torch.from_numpy(rays).float(),
            depth=torch.from_numpy(hit_depth).float(),
            axis=torch.from_numpy(view.axis[rows]).float(),
            pixel=torch.from_numpy(pixel[rows]).float(),
        )
        lit = self._lit(view, hits, rows, columns) if self._camera.shadows else {}
        poses = self._poses["geom_xpos"], self._poses["geom_xmat"]
        color[rows, columns] = self._shader.shade(hits, self._appearance(), *poses, lit).numpy()

    def _lit(self, view: "_View", hits: Hits, rows: np.ndarray, columns: np.ndarray) -> dict[int, Tensor]:
        """Return for each light that casts shadows which hits it reaches, bool [hit]."""
        found = {}
        for light in np.flatnonzero(self.scene.lights.castshadow).tolist():
            points, toward = (np.zeros((*view.rays.shape[:2], 3)) for _ in range(2))
            points[rows, columns] = (hits.point + _SHADOW_OFFSET * hits.normal).numpy()
            direction = self._poses["light_xdir"][hits.env, light].numpy()
            toward[...] = (0.0, 0.0, 1.0)
            is_directional = self.scene.lights.kind[light] == DIRECTIONAL
            position = self._poses["light_xpos"][hits.env, light].numpy()
            toward[rows, columns] = -direction if is_directional else position - points[rows, columns]
            distance, geom = self._sim.batch.ray(points, toward, geomgroup=self._groups, ids=view.envs)
            blocked = (geom >= 0) & (is_directional | (distance < 1.0))
            found[light] = torch.from_numpy(~blocked[rows, columns])
        return found

    def _appearance(self) -> EnvAppearance:
        lights, colors = self.scene.lights, {}
        for name in ("ambient", "diffuse", "specular"):
            per_env = self._sim.model_field(f"light_{name}")
            headlight = torch.from_numpy(getattr(lights, name)[-1:]).expand(len(per_env), -1, -1)
            active = torch.from_numpy(self._sim.model.light_active)[:, None]
            colors[name] = torch.cat((per_env * active, headlight), dim=1)
        rgba = self._sim.model_field("geom_rgba")
        return EnvAppearance(rgba, self._poses["light_xpos"], self._poses["light_xdir"], **colors)


class _View(NamedTuple):
    """Rays of the camera in some envs, in the world frame."""

    envs: np.ndarray
    """Indices of the envs."""
    origin: np.ndarray
    """Position of the camera, [env, 1, 3]."""
    rays: np.ndarray
    """Directions, [env, ray, 3], with a length of 1 along the axis of the camera."""
    axis: np.ndarray
    """Direction in which the camera looks, [env, 3]."""
    tangent: np.ndarray
    """Tangent of half the vertical field of view, [env]."""


class _Pixels(NamedTuple):
    """Result of the rays of a view."""

    depth: np.ndarray
    """Distance along the axis of the camera, m, [env, ray]."""
    geom: np.ndarray
    """Index of the geom, -1 for none, [env, ray]."""
    normal: np.ndarray
    """Unit normal in the world frame, zero for none, [env, ray, 3]."""
    color: np.ndarray
    """Color from 0 to 1, float32 [env, ray, 3]; zero without the stream rgb."""


class _Terrain(NamedTuple):
    """A body that does not move and has a heightfield."""

    body: int
    geom: int
    rays: HeightfieldRays
    others: MujocoSim | None
    """The other geoms of the body, if there are any."""


def _find_terrain(sim: MujocoSim, scene: Scene) -> _Terrain | None:
    """Return the terrain if there is one heightfield, which has the same pose in all envs at all times."""
    model, drawn = sim.model, scene.drawn
    fields = drawn[model.geom_type[drawn] == HFIELD]
    if len(fields) != 1 or any(name.startswith(_GEOM_FIELDS) for name in sim.per_env_fields):
        return None
    geom, body = int(fields[0]), int(model.geom_bodyid[fields[0]])
    if model.body_weldid[body] != 0:
        return None
    hidden = model.geom_bodyid != body
    hidden[geom] = True
    others = None if hidden[drawn].all() else MujocoSim(_without(model, hidden), 1)
    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    return _Terrain(body, geom, HeightfieldRays(model, data, geom), others)


def _without(model: mujoco.MjModel, hidden: np.ndarray) -> mujoco.MjModel:
    """Return a copy of a model in which rays ignore the geoms of `hidden`, bool [geom]."""
    model = copy.copy(model)
    # Rays ignore geoms without opacity.
    model.geom_rgba[hidden, 3], model.geom_matid[hidden] = 0.0, -1
    return model


def _keep_nearer(hits: tuple[np.ndarray, ...], others: tuple[np.ndarray, ...]) -> None:
    """Replace hits by others that are nearer, in place. Both are depths, geoms (-1 for none) and normals."""
    nearer = (others[1] >= 0) & ((hits[1] < 0) | (others[0] < hits[0]))
    for part, other in zip(hits, others, strict=True):
        part[nearer] = other[nearer]


def _is_fixed(sim: MujocoSim, camera: int) -> bool:
    """Return whether the camera and all lights have the same pose in all envs at all times, and no field that changes
    the appearance differs between envs."""
    model, fixed = sim.model, mujoco.mjtCamLight.mjCAMLIGHT_FIXED
    bodies = [model.cam_bodyid[camera], *model.light_bodyid]
    modes = [model.cam_mode[camera], *model.light_mode]
    prefixes = ("cam_", "light_", "mat_", *_GEOM_FIELDS)
    varied = any(name.startswith(prefixes) for name in sim.per_env_fields)
    return not varied and all(model.body_weldid[body] == 0 for body in bodies) and all(mode == fixed for mode in modes)
