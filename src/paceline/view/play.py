"""Record a video of a trained policy, rendered without a display."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import mujoco
import numpy as np
import torch
from PIL import Image, ImageOps
from rich.console import Console
from rich.progress import track

from paceline.cameras.mosaic import mosaic
from paceline.env.robot_env import RobotEnv
from paceline.env.vec_env import RenderableEnv, VecEnv
from paceline.errors import UserError, one_line
from paceline.learners.encoders import images_of
from paceline.learners.networks import Policy, PolicyRunner
from paceline.run.directory import RunDir
from paceline.training.build import playable
from paceline.training.pictures import pictures_of
from paceline.view.camera import Camera
from paceline.view.opengl import choose_opengl_library
from paceline.view.overlay import MIN_HEIGHT, REFRESH_SECONDS, Episode, Panel, Scores, VelocityArrows, command_of
from paceline.view.robot import copy_state
from paceline.view.video import check_format, check_writable, frame_rate, write_video


@dataclass(frozen=True)
class Recording:
    """Content of a recorded video."""

    file: Path
    seconds: float
    """Length of the video, which is also the simulated time."""
    num_ended: int
    """Number of episodes that ended."""
    mean_reward: float
    """Mean reward per step."""
    episodes: tuple[Episode, ...]
    """All episodes, including the unfinished one at the end."""


def record(
    run: str,
    video: Path | None,
    seconds: float,
    width: int,
    height: int,
    seed: int,
    task: str | None = None,
    activation: str | None = None,
    overlay: bool = True,
    cameras: bool = False,
) -> Recording:
    """Run the policy without exploration noise in one env on the CPU, and write an mp4. The arguments `run`, `task` and
    `activation` are those of `playable`. With `overlay`, the video shows the command and the rewards. With `cameras` it
    shows the images of the task's cameras."""
    check_format(video, seconds, width, height)
    trained = playable(run, task, activation, seed, renderable=True)
    env, file = trained.env, video or RunDir(trained.folder).videos / f"iteration_{trained.iteration:04d}.mp4"
    check_writable(file)

    steps = max(1, round(seconds / env.step_seconds))
    steps_per_frame, rate = frame_rate(env.step_seconds)
    scores = Scores(env)
    if cameras and not images_of(env):
        raise UserError(f"--cameras: the task {trained.config.task} has no cameras; leave it out")
    view = _renderer(env, width, height, show_arrows=overlay)
    if cameras:
        view = nullcontext(partial(_camera_view, env, width, height))
    with view as render:
        frames = (render() for _ in _run_policy(env, trained.policy, scores, steps, steps_per_frame))
        if overlay and height >= MIN_HEIGHT:
            frames = _with_panel(frames, env, scores, height, float(rate))
        write_video(file, frames, width, height, rate)
    episodes = scores.all_episodes()
    mean_reward = sum(episode.total for episode in episodes) / steps
    return Recording(file, steps * env.step_seconds, len(scores.ended), mean_reward, episodes)


@torch.inference_mode()
def _run_policy(env: VecEnv, policy: Policy, scores: Scores, steps: int, steps_per_frame: int) -> Iterator[None]:
    """Run a policy and yield before every `steps_per_frame`-th step. After the end of an episode, the next one
    starts."""
    runner, obs, console = PolicyRunner(policy, env.num_envs), env.reset(), Console(stderr=True)
    bar = {"console": console, "transient": True, "disable": not console.is_terminal}
    for index in track(range(steps), "rendering", **bar):
        if index % steps_per_frame == 0:
            yield
        step = env.step(runner.act(obs))
        obs = step.obs
        runner.reset(step.terminated | step.truncated)
        scores.add(step)


def _with_panel(
    frames: Iterator[np.ndarray], env: VecEnv, scores: Scores, height: int, rate: float
) -> Iterator[np.ndarray]:
    panel, frames_per_update, num_ended = Panel(height), max(1, round(REFRESH_SECONDS * rate)), 0
    for number, frame in enumerate(frames):
        if number % frames_per_update == 0 or len(scores.ended) > num_ended:
            num_ended = len(scores.ended)
            panel.update(scores, command_of(env))
        yield panel.blend(frame)


@contextmanager
def _renderer(env: VecEnv, width: int, height: int, show_arrows: bool) -> Iterator[Callable[[], np.ndarray]]:
    """Provide a function that renders the current state of env 0 as an image, uint8 RGB [height, width, 3]."""
    if not isinstance(env, RobotEnv):
        # `playable` returns no other kind of env if it is to be rendered.
        image = image_renderer(cast("RenderableEnv", env))
        yield lambda: _fit(image(), width, height)
        return
    data, arrows = mujoco.MjData(env.sim.model), VelocityArrows(env.sim.model)
    with Camera(env.sim.model, width, height) as camera:

        def render() -> np.ndarray:
            command = command_of(env)
            copy_state(env, command, data)
            mujoco.mj_forward(env.sim.model, data)
            return camera.render(data, arrows.make(command, data) if show_arrows else ())

        yield render


def _camera_view(env: VecEnv, width: int, height: int) -> np.ndarray:
    """Return the images of all cameras of env 0 side by side, uint8 RGB [height, width, 3]."""
    images = list(pictures_of(env, num_envs=1).values())
    size = tuple(max(image.shape[axis] for image in images) for axis in (1, 2))
    images = [torch.nn.functional.interpolate(image[None], size, mode="nearest")[0] for image in images]
    picture = mosaic(torch.stack(images)).permute(1, 2, 0).numpy()
    return _fit(picture, width, height, Image.Resampling.NEAREST)


def _fit(image: np.ndarray, width: int, height: int, filter: int = Image.Resampling.BICUBIC) -> np.ndarray:
    """Return an image scaled to fit into width x height and centered on black."""
    return np.asarray(ImageOps.pad(Image.fromarray(image), (width, height), filter))


def image_renderer(env: RenderableEnv) -> Callable[[], np.ndarray]:
    """Return a function that renders an env of another simulator as an image, uint8 RGB [height, width, 3]."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    # The env may render without OpenGL.
    with suppress(UserError):
        choose_opengl_library()

    def render() -> np.ndarray:
        try:
            return env.render()
        except Exception as error:
            # Every simulator raises its own exceptions; their messages name what is missing.
            raise UserError(f"the environment cannot be rendered: {one_line(error)}") from error

    return render
