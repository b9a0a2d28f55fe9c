"""Robots and their surroundings in the browser, several envs in a grid."""

import math
from typing import TYPE_CHECKING, cast

import mujoco
import numpy as np

from paceline.env.robot_env import RobotEnv
from paceline.env.vec_env import RenderableEnv, VecEnv
from paceline.view.overlay import VelocityArrows, command_of
from paceline.view.play import image_renderer
from paceline.view.robot import base_body, bounds, copy_state
from paceline.view.scene_meshes import scene_meshes

if TYPE_CHECKING:
    from viser import SceneApi, ViserServer

# Distance between two envs, m, in addition to the size of an env.
_GAP, _GAP_OF_MOVING_ROBOTS = 0.3, 1.5
# Fraction of the distance to the robot by which the view moves in every frame, horizontally and vertically.
_FOLLOW = np.array((1.0, 1.0, 0.1))
# Distance from which on the view jumps to the robot, m.
_JUMP = 2.0
_SKY_TOP, _SKY_BOTTOM = (150, 190, 228), (240, 244, 248)


def make_scene(server: "ViserServer", env: VecEnv) -> "RobotScene | ImageScene":
    """Return a scene of MuJoCo's bodies, or for an env of another simulator the images that it renders."""
    if isinstance(env, RobotEnv):
        return RobotScene(server.scene, env)
    return ImageScene(server, cast("RenderableEnv", env))


class ImageScene:
    """Shows the images that env 0 renders, centered in the scene of each client."""

    num_envs = 1
    """Number of envs to choose from."""
    can_follow = False

    def __init__(self, server: "ViserServer", env: RenderableEnv):
        self._server, self._render = server, image_renderer(env)

    def initial_camera(self) -> tuple[np.ndarray, np.ndarray]:
        return np.ones(3), np.zeros(3)

    def update(self, _selected: int, _follow: bool) -> None:
        image = self._render()
        for client in self._server.get_clients().values():
            client.scene.set_background_image(_with_aspect(image, client.camera.aspect), format="jpeg")


def _with_aspect(image: np.ndarray, aspect: float) -> np.ndarray:
    """Return an image [height, width, 3] with margins, so that its width is `aspect` times its height. A page stretches
    the background image to its scene."""
    aspect = min(max(aspect, 0.1), 10.0)
    height, width = image.shape[:2]
    full_height, full_width = max(height, round(width / aspect)), max(width, round(height * aspect))
    full = np.full((full_height, full_width, 3), _SKY_BOTTOM, np.uint8)
    top, left = (full_height - height) // 2, (full_width - width) // 2
    full[top : top + height, left : left + width] = image
    return full


class RobotScene:
    """Shows the states of all envs. Bodies of all envs are one batch, so one message moves a body in all envs."""

    def __init__(self, scene: "SceneApi", env: RobotEnv):
        self._env, self.num_envs, model = env, env.num_envs, env.sim.model
        self._data, self._arrows_of = mujoco.MjData(model), VelocityArrows(model)
        self._base = base_body(model)
        self.can_follow = self._base > 0
        """True if the robot can leave its place, so that the view has to follow it."""
        extent = bounds(model)
        self._center, self._size = extent.mean(0), np.ptp(extent, axis=0)
        shares_world = bool((model.geom_bodyid[model.geom_type == mujoco.mjtGeom.mjGEOM_HFIELD] == 0).any())
        self._offsets = np.zeros((env.num_envs, 3))
        if not shares_world:
            gap = _GAP_OF_MOVING_ROBOTS if self.can_follow else _GAP
            self._offsets[:, :2] = _grid(env.num_envs, self._size[:2] + gap)
        self._world = scene.add_frame("/world", show_axes=False)
        self._batches = []
        identity = np.tile((1.0, 0.0, 0.0, 0.0), (env.num_envs, 1))
        for number, mesh in enumerate(scene_meshes(model)):
            once = mesh.is_floor or (shares_world and not mesh.body)
            places = slice(0, 1) if once else slice(None)
            offsets = np.zeros((1, 3)) if mesh.is_floor else self._offsets[places]
            name = f"/world/{number}_{model.body(mesh.body).name.replace('/', '_')}"
            handle = scene.add_batched_glb(name, mesh.glb, identity[places], offsets, lod="off", cast_shadow=not once)
            if mesh.body:
                self._batches.append((mesh.body, handle))
        self._arrows = scene.add_arrows(
            "/world/velocities",
            np.zeros((0, 2, 3)),
            np.zeros((0, 3), np.uint8),
            shaft_radius=0.012,
            head_radius=0.03,
            head_length=0.07,
        )
        self._focus = np.zeros(3)
        sky = np.linspace(_SKY_TOP, _SKY_BOTTOM, 64).astype(np.uint8)
        scene.set_background_image(sky[:, None].repeat(2, axis=1), format="png")
        scene.configure_fog(25.0, 70.0, color=_SKY_BOTTOM)
        # With the default, colors are brighter than in MuJoCo's renderer.
        scene.configure_environment_map(environment_intensity=0.35)

    def initial_camera(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the position of the camera and the point that it looks at, in meters."""
        # A robot that moves is in the middle of the view, otherwise the whole grid is visible.
        width = 2.7 * self._size if self.can_follow else self._size + np.ptp(self._offsets, axis=0)
        distance = 1.1 * float(np.linalg.norm(width))
        target = np.array((0.0, 0.0, 0.4 * self._size[2])) if self.can_follow else self._center
        return target + distance * np.array((0.5, -0.75, 0.42)), target

    def update(self, selected: int, follow: bool) -> None:
        """Show the current state. With `follow`, the robot of the env `selected` stays in the middle."""
        env, model, data = self._env, self._env.sim.model, self._data
        command = command_of(env)
        positions, rotations = np.zeros((env.num_envs, model.nbody, 3)), np.zeros((env.num_envs, model.nbody, 4))
        arrows = []
        for index in range(env.num_envs):
            copy_state(env, command, data, index)
            mujoco.mj_kinematics(model, data)
            positions[index], rotations[index] = data.xpos + self._offsets[index], data.xquat
            for arrow in self._arrows_of.make(command, data, index):
                arrows.append((np.stack((arrow.start, arrow.end)) + self._offsets[index], arrow.color))
        for body, handle in self._batches:
            handle.batched_positions, handle.batched_wxyzs = positions[:, body], rotations[:, body]
        self._arrows.points = np.array([points for points, _ in arrows]).reshape(-1, 2, 3)
        self._arrows.colors = np.array([color for _, color in arrows], np.uint8).reshape(-1, 3)
        if follow and self.can_follow:
            target = positions[selected, self._base] - (0.0, 0.0, 0.5 * self._size[2])
            step = target - self._focus
            self._focus += step if np.linalg.norm(step) > _JUMP else _FOLLOW * step
        elif not follow:
            self._focus[:] = 0.0
        self._world.position = -self._focus


def _grid(count: int, spacing: np.ndarray) -> np.ndarray:
    """Return places in a grid around the origin that is about as wide as deep, in meters, [count, 2]."""
    columns = min(count, max(1, round(math.sqrt(count * spacing[1] / spacing[0]))))
    rows = math.ceil(count / columns)
    index = np.arange(count)
    places = np.stack((index % columns - 0.5 * (columns - 1), index // columns - 0.5 * (rows - 1)), axis=1)
    return places * spacing
