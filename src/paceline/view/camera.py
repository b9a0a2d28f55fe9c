"""Render a MuJoCo scene to an image in memory."""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import mujoco
import numpy as np

from paceline.view.opengl import cannot_render, gl_context_class

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
    """Renders from the model's camera "track", or from its first camera, or a view of the whole scene.

    mujoco.Renderer is not used, because its OpenGL library is fixed when mujoco is imported.
    """

    def __init__(self, model: mujoco.MjModel, width: int, height: int):
        model = copy.copy(model)
        model.vis.global_.offwidth, model.vis.global_.offheight = width, height
        # With shadow maps of MuJoCo's default size, 4096, a software driver spends most of its time on shadows.
        model.vis.quality.shadowsize = min(model.vis.quality.shadowsize, 2048)
        self._model, self._view = model, _view(model)
        self._scene, self._option = mujoco.MjvScene(model, maxgeom=10_000), mujoco.MjvOption()
        self._rectangle = mujoco.MjrRect(0, 0, width, height)
        self._pixels = np.empty((height, width, 3), np.uint8)
        self._gl = self._context = None
        context_class = gl_context_class()
        try:
            self._gl = context_class(width, height)
            self._gl.make_current()
            self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
        except Exception as error:
            # Every OpenGL library raises its own exceptions, among them AttributeError for a missing library.
            self.close()
            raise cannot_render(f"{context_class.__module__} reports: {error}") from None
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)

    def render(self, data: mujoco.MjData, arrows: Sequence[Arrow] = ()) -> np.ndarray:
        """Return the image, uint8 RGB [height, width, 3]. The next call overwrites it."""
        categories = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(self._model, data, self._option, None, self._view, categories, self._scene)
        for arrow in arrows:
            arrow.add_to(self._scene)
        mujoco.mjr_render(self._rectangle, self._scene, self._context)
        mujoco.mjr_readPixels(self._pixels, None, self._rectangle, self._context)
        return np.flipud(self._pixels)

    def close(self) -> None:
        """Free the OpenGL context. OSMesa fails if this is left to the end of the interpreter."""
        for resource in (self._context, self._gl):
            if resource is not None:
                resource.free()
        self._context = self._gl = None

    def __enter__(self) -> "Camera":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _view(model: mujoco.MjModel) -> mujoco.MjvCamera:
    view = mujoco.MjvCamera()
    if model.ncam:
        view.type = mujoco.mjtCamera.mjCAMERA_FIXED.value
        view.fixedcamid = max(0, mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA.value, "track"))
    else:
        mujoco.mjv_defaultFreeCamera(model, view)
    return view
