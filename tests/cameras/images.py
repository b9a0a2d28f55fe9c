"""Images of both renderers and of MuJoCo's OpenGL renderer, and measures of their agreement."""

from collections.abc import Mapping

import mujoco
import numpy as np
import torch
from scipy.ndimage import gaussian_filter

from paceline.cameras.camera import Camera, stream_spec
from paceline.cameras.tiled_camera import Renderer
from paceline.sim.simulation import Sim
from paceline.view.opengl import choose_opengl_library


def render(
    renderer: Renderer, camera: Camera, num_envs: int, due: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Return the images of a renderer by stream, [env, channel, height, width]; those of other envs are zero."""
    images = {}
    for stream in camera.streams:
        spec = stream_spec(camera, stream)
        image = torch.zeros(num_envs, spec.channels, camera.height, camera.width, dtype=spec.dtype)
        images[stream] = image.contiguous(memory_format=torch.channels_last)
    renderer.render(images, torch.ones(num_envs, dtype=torch.bool) if due is None else due)
    return images


def opengl(model: mujoco.MjModel, sim: Sim, name: str, camera: Camera) -> Mapping[str, np.ndarray]:
    """Return the images of MuJoCo's own renderer of env 0, without shadows: rgb, depth and geom indices."""
    choose_opengl_library()
    data = mujoco.MjData(model)
    data.qpos[:] = sim.qpos[0].double().numpy()
    mujoco.mj_forward(model, data)
    option = mujoco.MjvOption()
    option.geomgroup[:] = np.isin(np.arange(len(option.geomgroup)), camera.geom_groups)
    for hidden in ("sitegroup", "jointgroup", "tendongroup", "actuatorgroup"):
        getattr(option, hidden)[:] = 0
    with mujoco.Renderer(model, camera.height, camera.width) as renderer:
        renderer.update_scene(data, name, option)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            renderer.scene.flags[flag] = 0
        rgb = renderer.render().copy()
        renderer.enable_depth_rendering()
        depth = renderer.render().copy()
        renderer.disable_depth_rendering()
        renderer.enable_segmentation_rendering()
        geom = renderer.render()[..., 0].copy()
    return {"rgb": rgb, "depth": depth, "geom": geom}


def similarity(one: np.ndarray, other: np.ndarray) -> float:
    """Return the structural similarity (Wang et al. 2004) of the brightness of two images [height, width, 3]."""
    x, y = (image.astype(float).mean(-1) for image in (one, other))
    mean_x, mean_y = gaussian_filter(x, 1.5), gaussian_filter(y, 1.5)
    var_x, var_y = gaussian_filter(x * x, 1.5) - mean_x**2, gaussian_filter(y * y, 1.5) - mean_y**2
    covariance = gaussian_filter(x * y, 1.5) - mean_x * mean_y
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    above = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    return float((above / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))).mean())


def fraction(condition: torch.Tensor | np.ndarray) -> float:
    return float(np.asarray(condition).mean())
