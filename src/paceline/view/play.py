"""A trained policy at work, as a video; drawn without a screen."""

import copy
import importlib
import io
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import av
import mujoco
import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from paceline.build import OURS, Elsewhere, playable
from paceline.device.gpus import gpu_uuid
from paceline.env.robot_env import RobotEnv
from paceline.env.task import CommandDisplay
from paceline.env.vec_env import RenderableEnv, VecEnv
from paceline.errors import UserError
from paceline.run.directory import RunDir, write_atomically
from paceline.view.opengl import egl_index
from paceline.view.overlay import REFRESH_SECONDS, SMALLEST_HEIGHT, Arrow, Arrows, Episode, Panel, Scores, command_of

MOST_FRAMES_PER_SECOND = 60
LONGEST_SECONDS = 3600.0
SIZES = range(16, 4097, 2)
"""Pixels; H.264 with halved colour resolution needs even numbers."""

# scripts/system_packages installs the same.
RENDERING_PACKAGES = "libegl1 libegl-mesa0 libgl1-mesa-dri libopengl0"


@dataclass(frozen=True)
class Shown:
    """What a video shows."""

    file: Path
    seconds: float
    """Of the robot's time, which is also the video's."""
    episodes: int
    """That ended in it."""
    mean_reward: float
    """Per step."""
    log: tuple[Episode, ...]
    """Those that ended, and the one that was running at the end."""


def record(
    run: str,
    video: Path | None,
    seconds: float,
    width: int,
    height: int,
    seed: int,
    elsewhere: Elsewhere = OURS,
    overlay: bool = True,
) -> Shown:
    """Let the policy act without noise in one world, on the CPU whatever it was trained on, and write an mp4; with the
    command and the rewards, if `overlay`."""
    _check(video, seconds, width, height)
    found = playable(run, elsewhere, seed, drawn=True)
    env, file = found.env, video or RunDir(found.folder).videos / f"iteration_{found.iteration:04d}.mp4"
    _check_place(file)

    steps = max(1, round(seconds / env.step_seconds))
    act = _Act(env, found.policy, steps)
    stride, rate = frame_rate(env.step_seconds)
    with _painter(env, width, height, arrows=overlay) as picture:
        pictures = (picture() for _ in act.play(stride))
        if overlay and height >= SMALLEST_HEIGHT:
            pictures = _with_panel(pictures, env, act.scores, height, float(rate))
        content = _encode(pictures, width, height, rate)
    _write(file, content)
    ended, all_of_them = len(act.scores.ended), act.scores.all()
    return Shown(file, steps * env.step_seconds, ended, act.total_reward / steps, all_of_them)


def frame_rate(step_seconds: float) -> tuple[int, Fraction]:
    """Show every so many-th control step, at so many frames a second, so that the video runs in real time."""
    rate = 1.0 / step_seconds
    # A rate of 60 that rounding has made slightly larger still gives a frame for every step.
    stride = max(1, math.ceil(rate / MOST_FRAMES_PER_SECOND - 1e-6))
    return stride, Fraction(rate / stride).limit_denominator(1001)


class _Act:
    """The policy in world 0, one control step after another."""

    def __init__(self, env: VecEnv, policy: torch.nn.Module, steps: int):
        self._env, self._policy, self._steps = env, policy, steps
        self.scores, self.total_reward = Scores(env), 0.0

    @torch.inference_mode()
    def play(self, stride: int) -> Iterator[None]:
        """Pauses before every `stride`-th step; where an episode ends, the next begins."""
        env = self._env
        obs = env.reset()
        console = Console(stderr=True)
        for step in track(
            range(self._steps), "drawing", console=console, transient=True, disable=not console.is_terminal
        ):
            if step % stride == 0:
                yield
            result = env.step(self._policy(obs["policy"]))
            obs = result.obs
            self.total_reward += result.reward.item()
            self.scores.add(result)


def _with_panel(
    pictures: Iterator[np.ndarray], env: VecEnv, scores: Scores, height: int, rate: float
) -> Iterator[np.ndarray]:
    panel, refresh, episodes = Panel(height), max(1, round(REFRESH_SECONDS * rate)), 0
    for number, picture in enumerate(pictures):
        if number % refresh == 0 or len(scores.ended) > episodes:
            episodes = len(scores.ended)
            panel.show(scores, command_of(env))
        yield panel.on(picture)


@contextmanager
def _painter(env: VecEnv, width: int, height: int, arrows: bool) -> Iterator[Callable[[], np.ndarray]]:
    """Draws world 0 as it is when called; RGB, uint8 [height, width, 3]."""
    if not isinstance(env, RobotEnv):
        # By `trained`, where an env is to be drawn.
        with _told_what_draws():
            yield partial(_own_picture, cast("RenderableEnv", env), width, height)
        return
    world, velocities = mujoco.MjData(env.sim.model), Arrows(env.sim.model)
    with Camera(env.sim.model, width, height) as camera:

        def picture() -> np.ndarray:
            command = command_of(env)
            _copy_state(env, command, world)
            return camera.render(world, velocities.of(command, world) if arrows else ())

        yield picture


def _own_picture(env: RenderableEnv, width: int, height: int) -> np.ndarray:
    """As large as fits, on black."""
    try:
        drawn = env.render()
    except Exception as error:
        # Each simulator fails in its own way; what it needs, it says itself.
        raise UserError(f"the environment cannot be drawn: {' '.join(str(error).split())}") from error
    scale = min(width / drawn.shape[1], height / drawn.shape[0])
    rows, columns = (max(1, round(scale * size)) for size in drawn.shape[:2])
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(drawn), format="rgb24")
    small = frame.reformat(width=columns, height=rows).to_ndarray()
    canvas = np.zeros((height, width, 3), np.uint8)
    top, left = (height - rows) // 2, (width - columns) // 2
    canvas[top : top + rows, left : left + columns] = small
    return canvas


@contextmanager
def _told_what_draws() -> Iterator[None]:
    """Inside, the process's environment says which GL library MuJoCo has: others' envs ask nobody else."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    if sys.platform != "linux" or os.environ.get("MUJOCO_GL"):
        yield
        return
    # Not every env draws with MuJoCo.
    with suppress(UserError):
        os.environ["MUJOCO_GL"] = _working_gl_library()
    try:
        yield
    finally:
        os.environ.pop("MUJOCO_GL", None)


def _copy_state(env: RobotEnv, command: CommandDisplay | None, world: mujoco.MjData) -> None:
    for name in ("qpos", "qvel", "act", "mocap_pos", "mocap_quat"):
        getattr(world, name)[:] = getattr(env.sim, name)[0].numpy()
    if command and command.rotation is not None and len(world.mocap_quat):
        world.mocap_quat[0] = command.rotation[0].numpy()
    world.time = env.sim.time[0].item()
    mujoco.mj_forward(env.sim.model, world)


class Camera:
    """The model's camera "track", or its first one, or else a view of the whole scene."""

    # Not mujoco.Renderer: that one's GL library is chosen by an environment variable when mujoco is first imported.

    def __init__(self, model: mujoco.MjModel, width: int, height: int):
        model = copy.copy(model)
        model.vis.global_.offwidth, model.vis.global_.offheight = width, height
        # A software driver spends most of its time on shadow maps of MuJoCo's default size, 4096.
        model.vis.quality.shadowsize = min(model.vis.quality.shadowsize, 2048)
        self._model, self._view = model, _view(model)
        self._scene, self._option = mujoco.MjvScene(model, maxgeom=10_000), mujoco.MjvOption()
        self._rectangle = mujoco.MjrRect(0, 0, width, height)
        self._pixels = np.empty((height, width, 3), np.uint8)
        self._gl = self._context = None
        context_class = _gl_context_class()
        try:
            self._gl = context_class(width, height)
            self._gl.make_current()
            self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
        except Exception as error:
            # Each GL library fails in its own way, down to AttributeError from a library that is not there.
            self.close()
            raise _cannot_draw(f"{context_class.__module__} says: {error}") from None
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)

    def render(self, world: mujoco.MjData, arrows: Sequence[Arrow] = ()) -> np.ndarray:
        """RGB, uint8 [height, width, 3]."""
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(self._model, world, self._option, None, self._view, everything, self._scene)
        for arrow in arrows:
            arrow.add_to(self._scene)
        mujoco.mjr_render(self._rectangle, self._scene, self._context)
        mujoco.mjr_readPixels(self._pixels, None, self._rectangle, self._context)
        return np.flipud(self._pixels)

    def close(self) -> None:
        """While Python still runs: OSMesa cannot be left to the interpreter's end."""
        for held in (self._context, self._gl):
            if held is not None:
                held.free()
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


def _gl_context_class() -> Any:
    """The user's choice by MUJOCO_GL, or else the first that works here."""
    if os.environ.get("MUJOCO_GL") or sys.platform != "linux":
        if not hasattr(mujoco, "GLContext"):
            raise UserError(f"MUJOCO_GL={os.environ['MUJOCO_GL']} turns rendering off: unset it to make videos")
        return mujoco.GLContext
    library = _working_gl_library()
    if library == "egl" and torch.cuda.is_available():
        # EGL counts GPUs in an order of its own, and knows nothing of CUDA_VISIBLE_DEVICES.
        index = egl_index(gpu_uuid(torch.device("cuda", 0)))
        if index is not None:
            os.environ.setdefault("MUJOCO_EGL_DEVICE_ID", str(index))
    return importlib.import_module(f"mujoco.{library}").GLContext


@cache
def _working_gl_library() -> str:
    # Tried in processes of their own: once one has failed, no other can be loaded beside it.
    trial = "import mujoco; mujoco.Renderer(mujoco.MjModel.from_xml_string('<mujoco/>'), 16, 16).close()"
    candidates = ["egl", "osmesa"] + ["glfw"] * ("DISPLAY" in os.environ)
    for library in candidates:
        environment = os.environ | {"MUJOCO_GL": library}
        if subprocess.run([sys.executable, "-P", "-c", trial], env=environment, capture_output=True).returncode == 0:
            return library
    raise _cannot_draw(f"none of {', '.join(candidates)} works here")


def _cannot_draw(why: str) -> UserError:
    why = " ".join(why.split()).rstrip(".")
    return UserError(
        f"cannot draw without a screen: {why}; on Debian and Ubuntu: apt-get install {RENDERING_PACKAGES} "
        "(or libosmesa6), elsewhere the packages for libEGL, libOpenGL and Mesa's software driver"
    )


def _encode(pictures: Iterator[np.ndarray], width: int, height: int, rate: Fraction) -> bytes:
    """An mp4, H.264; in memory, so that a half of it is never left on disk."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate, options={"crf": "20"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def _check(video: Path | None, seconds: float, width: int, height: int) -> None:
    if not 0.0 < seconds <= LONGEST_SECONDS:
        raise UserError(f"--seconds {seconds:g} must be above 0 and at most {LONGEST_SECONDS:g}: try --seconds 10")
    for flag, size in (("--width", width), ("--height", height)):
        if size not in SIZES:
            near = SIZES[0] if size < SIZES[0] else min(size - size % 2, SIZES[-1])
            raise UserError(f"{flag} {size} must be even and from {SIZES[0]} to {SIZES[-1]}: try {flag} {near}")
    if video is not None and video.suffix.lower() != ".mp4":
        raise UserError(f"--video {video}: videos are mp4, so give a name that ends in .mp4")


def _check_place(file: Path) -> None:
    """Refuse now what could not be written after minutes of drawing."""
    if os.path.exists(file) and not os.path.isfile(file):
        raise UserError(f"cannot write the video {file}: it is there and is not a file; choose another --video")
    nearest = next(p for p in file.absolute().parents if os.path.exists(p))
    if not nearest.is_dir():
        raise UserError(f"cannot write the video {file}: {nearest} is a file; choose another --video")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"cannot write the video {file}: no permission in {nearest}; choose another --video")


def _write(file: Path, content: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content)
    except OSError as error:
        raise UserError(f"cannot write the video {file}: {error.strerror}; choose another --video") from None
