"""Images of all cameras of all envs as observation groups."""

import time
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import mujoco
import torch
from torch import Tensor

from paceline.cameras.camera import Camera, group_name, stream_spec
from paceline.cameras.scene import bake_colors, undrawable
from paceline.errors import UserError, unknown
from paceline.sim.simulation import Sim
from paceline.tensors import graph, random


class ImageFormat(NamedTuple):
    """Properties of the images of an observation group that its tensors do not show."""

    scale: float
    """Largest value of an image of floats."""
    classes: int
    """Number of classes; 0 for images of other streams."""
    frames: int
    """Number of images that are stacked along the channels."""


class Renderer(Protocol):
    """Renders one camera in all envs."""

    def render(self, images: dict[str, Tensor], due: Tensor) -> None:
        """Render the envs of `due`, bool [env], into `images` by stream, each [env, channel, height, width] in
        channels-last memory. The images of other envs stay unchanged."""
        ...


class TiledCamera:
    """Renders the cameras of a task in all envs. `images` has one tensor for each camera and stream, by the name of its
    observation group, [env, channel, height, width] in channels-last memory.

    An env gets a new image if its camera is due or if its episode has just started. `messages` state how meshes are
    simplified and which cameras MuJoCo Warp renders. `seconds` is the time of the host in `render`.
    """

    def __init__(
        self,
        cameras: Mapping[str, Camera],
        classes_of_geoms: Mapping[str, int],
        sim: Sim,
        seed: int,
        env_index: Tensor,
        step_seconds: float,
    ):
        self._cameras, self._seed, self._env_index = dict(cameras), seed, env_index
        self._steps_per_image: dict[str, int] = {}
        self._renderers: dict[str, Renderer] = {}
        self._rendered: dict[str, dict[str, Tensor]] = {}
        self.messages: list[str] = []
        self.seconds = 0.0
        self.images: dict[str, Tensor] = {}
        self.formats: dict[str, ImageFormat] = {}
        for name, camera in self._cameras.items():
            camera.check(name)
            self._steps_per_image[name] = camera.steps_per_image(name, step_seconds)
            self._renderers[name], message = _make_renderer(name, camera, sim, classes_of_geoms)
            self.messages += [message] if message else []
            self._rendered[name] = {}
            for stream in camera.streams:
                spec = stream_spec(camera, stream)
                shape = (sim.num_envs, spec.channels, camera.height, camera.width)
                image = torch.full(shape, spec.miss, dtype=spec.dtype, device=sim.device)
                self._rendered[name][stream] = image.contiguous(memory_format=torch.channels_last)
                # Effects are applied to a copy, because an image that is not due keeps its noise.
                noisy = self._rendered[name][stream].clone() if _has_noise(camera, stream) else None
                classes = 1 + max(classes_of_geoms.values(), default=0) if stream == "classes" else 0
                scale = camera.far if stream in ("depth", "distance") else 1.0
                self.formats[group_name(name, stream)] = ImageFormat(scale, classes, camera.frames)
                self.images[group_name(name, stream)] = self._rendered[name][stream] if noisy is None else noisy
        self._add_noise = graph.fuse(self._apply_effects, sim.device)

    def render(self, episode_step: Tensor, step: Tensor) -> None:
        """Render the envs whose cameras are due. `episode_step` is the number of control steps since the reset, [env];
        `step` is the number of control steps of the run, which determines the noise."""
        began = time.perf_counter()
        for name, camera in self._cameras.items():
            due = episode_step % self._steps_per_image[name] == 0
            self._renderers[name].render(self._rendered[name], due)
            if any(_has_noise(camera, stream) for stream in camera.streams):
                self._add_noise(name, due, step)
        self.seconds += time.perf_counter() - began

    def state(self) -> dict[str, Tensor]:
        """Return the images that cannot be rendered again, because a camera does not render in every step."""
        return {
            f"camera/{group}": self.images[group]
            for name, camera in self._cameras.items()
            for group in (group_name(name, stream) for stream in camera.streams)
            if self._steps_per_image[name] > 1
        }

    def _apply_effects(self, name: str, due: Tensor, step: Tensor) -> None:
        camera, groups = self._cameras[name], list(self.images)
        for stream in filter(lambda each: _has_noise(camera, each), camera.streams):
            group = group_name(name, stream)
            clean, noisy = self._rendered[name][stream], self.images[group]
            # All groups share the random streams, each with its own steps.
            count, numbers = clean[0].numel(), (step * len(groups) + groups.index(group)).view(1)
            noise = self._normal(numbers, count, clean)
            if stream == "rgb":
                new = (clean.float() + camera.effects.rgb_noise * noise).round().clamp(0.0, 255.0).to(torch.uint8)
            else:
                depth = clean.float()
                new = (depth + camera.effects.depth_noise * depth.square() * noise).clamp(0.0, camera.far)
                dropped = self._uniform(numbers, count, clean) < camera.effects.depth_dropout
                # A miss stays a miss.
                new = torch.where(dropped | (depth >= camera.far), camera.far, new).to(clean.dtype)
            noisy.copy_(torch.where(due.view(-1, 1, 1, 1), new, noisy))

    def _normal(self, step: Tensor, count: int, like: Tensor) -> Tensor:
        return _image(random.normal(self._seed, self._env_index, step, random.Stream.CAMERA_NOISE, count), like)

    def _uniform(self, step: Tensor, count: int, like: Tensor) -> Tensor:
        return _image(random.uniform(self._seed, self._env_index, step, random.Stream.CAMERA_DROPOUT, count), like)


def prepare_model(model: mujoco.MjModel, cameras: Mapping[str, Camera]) -> None:
    """Raise UserError if the model does not have a camera of each name, or if it cannot be rendered. Change the colors
    of the model's geoms to those that are drawn."""
    names = [model.camera(index).name for index in range(model.ncam)]
    for name in cameras:
        if name not in names:
            remedy = "add it to the model with paceline.cameras.camera.add_cameras"
            raise UserError(f"{unknown('camera', name, names)}; {remedy}")
        index = model.camera(name).id
        if model.cam_projection[index] or model.cam_sensorsize[index].any():
            raise UserError(f"camera {name!r} is orthographic or has a sensor size: use a field of view (fovy)")
    if cameras:
        bake_colors(model)


def _make_renderer(name: str, camera: Camera, sim: Sim, classes: Mapping[str, int]) -> tuple[Renderer, str]:
    """Return the renderer of a camera, and a message about it or an empty string."""
    from paceline.sim.mujoco_sim import MujocoSim

    if isinstance(sim, MujocoSim):
        from paceline.cameras.ray_renderer import RayRenderer

        return RayRenderer(name, camera, sim, classes), ""
    from paceline.cameras.gpu_renderer import GpuRenderer, TooManyGeomsError
    from paceline.cameras.mujoco_warp_renderer import MujocoWarpRenderer
    from paceline.sim.warp_sim import WarpSim

    assert isinstance(sim, WarpSim)
    reason = "the camera has renderer mujoco_warp" if camera.renderer == "mujoco_warp" else ""
    if camera.renderer == "auto":
        reason = undrawable(sim.model, camera)
    if not reason:
        try:
            renderer = GpuRenderer(name, camera, sim, classes)
            return renderer, renderer.message
        except TooManyGeomsError as error:
            if camera.renderer == "paceline":
                raise
            reason = str(error)
    try:
        renderer = MujocoWarpRenderer(name, camera, sim, classes)
    except UserError as error:
        raise UserError(f"{error}. This renderer is used because {reason}") from None
    return renderer, f"Camera {name}: MuJoCo Warp's renderer draws it, which is much slower, because {reason}."


def _has_noise(camera: Camera, stream: str) -> bool:
    effects = camera.effects
    if stream == "rgb":
        return effects.rgb_noise > 0.0
    return stream in ("depth", "distance") and (effects.depth_noise > 0.0 or effects.depth_dropout > 0.0)


def _image(samples: Tensor, like: Tensor) -> Tensor:
    """Return samples [env, n] as an image [env, channel, height, width], in the order of channels-last memory."""
    _, channels, height, width = like.shape
    return samples.unflatten(-1, (height, width, channels)).permute(0, 3, 1, 2)
