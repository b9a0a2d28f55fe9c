"""Render a MuJoCo scene to an image in memory."""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import mujoco
import numpy as np

from paceline.view.opengl import cannot_render, choose_opengl_library

Color = tuple[int, int, int]
_ARROW_WIDTH = 0.014


class Arrow(NamedTuple):
    """An arrow in the scene; coordinates in meters."""

    start: np.ndarray
    end: np.ndarray
    color: Color

    def add_to(self, scene: mujoco.MjvScene) -> None:
        kind, zeros = mujoco.mjtGeom.mjGEOM_ARROW.value, np.zeros(3)
        geom, rgba = scene.geoms[scene.ngeom], np.append(np.array(self.color) / 255.0, 1.0).astype(np.float32)
        mujoco.mjv_initGeom(geom, kind, zeros, zeros, np.eye(3).ravel(), rgba)
        mujoco.mjv_connector(geom, kind, _ARROW_WIDTH, self.start, self.end)
        # With emission, the color also matches the numbers of the panel on the shaded side.
        geom.category, geom.emission = mujoco.mjtCatBit.mjCAT_DECOR.value, 0.2
        scene.ngeom += 1


class Camera:
    """Renders from the model's camera "track", or from its first camera, or a view of the whole scene."""

    def __init__(self, model: mujoco.MjModel, width: int, height: int):
        model = copy.copy(model)
        model.vis.global_.offwidth, model.vis.global_.offheight = width, height
        # With shadow maps of MuJoCo's default size, 4096, a software driver spends most of its time on shadows.
        model.vis.quality.shadowsize = min(model.vis.quality.shadowsize, 2048)
        track = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA.value, "track")
        # -1 is the view of the whole scene.
        self._view = max(0, track) if model.ncam else -1
        choose_opengl_library()
        try:
            self._renderer = mujoco.Renderer(model, height, width)
        except Exception as error:
            # Every OpenGL library raises its own exceptions, among them AttributeError for a missing library.
            raise cannot_render(f"MuJoCo reports: {error}") from None

    def render(self, data: mujoco.MjData, arrows: Sequence[Arrow] = ()) -> np.ndarray:
        """Return the image, uint8 RGB [height, width, 3]."""
        self._renderer.update_scene(data, self._view)
        for arrow in arrows:
            arrow.add_to(self._renderer.scene)
        return self._renderer.render()

    def __enter__(self) -> "Camera":
        return self

    def __exit__(self, *_: object) -> None:
        # OSMesa fails if this is left to the end of the interpreter.
        self._renderer.close()
