"""Run a policy in several envs and show them on a web page."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

import numpy as np
import torch

from paceline.env.robot_env import RobotEnv
from paceline.env.vec_env import VecEnv
from paceline.errors import UserError
from paceline.learners.encoders import images_of
from paceline.learners.networks import PolicyRunner
from paceline.run import checkpoint
from paceline.run.directory import RunDir
from paceline.training.build import Playable, playable
from paceline.training.pictures import pictures_of
from paceline.view.overlay import command_of
from paceline.view.viewer_panel import CommandInput, Panel, RewardHistory
from paceline.view.viewer_scene import make_scene
from paceline.view.viewer_server import Address, serve

if TYPE_CHECKING:
    from viser import ViserServer

NEWEST = "newest"
# Frames per second of the scene, and of plots, images and text.
_SCENE_RATE, _PANEL_RATE = 30.0, 4.0
# Time between two searches for new checkpoints, s.
_SEARCH_SECONDS = 2.0
# Time after which the simulation is too slow for real time and no longer tries to catch up, s.
_MAX_DELAY = 0.1
# Time between two looks at the page while it is paused, and while no browser is connected, s.
_PAUSE_SECONDS, _IDLE_SECONDS = 0.02, 0.1


def view(
    run: str,
    address: Address,
    num_envs: int,
    seed: int,
    task: str | None,
    activation: str | None,
    announce: Callable[[str], object],
) -> None:
    """Show the policy of a run until KeyboardInterrupt. `run`, `task` and `activation` are as for `playable`.
    `announce` gets lines for the user when the page can be opened."""
    found = playable(run, task, activation, seed, renderable=True, num_envs=num_envs)
    with serve(address, f"Paceline: {found.config.task}") as server:
        viewer = Viewer(server, found, list_checkpoints(found))
        for line in address.lines():
            announce(line)
        viewer.loop()


def list_checkpoints(found: Playable, live: Path | None = None) -> Callable[[], dict[str, Path]]:
    """Return a function that returns the checkpoints of a run by name. `NEWEST` is that in the folder `live`, if it is
    given, otherwise the newest of the run. Policies of other libraries are listed by file name."""
    if found.file.suffix == ".pt":
        return lambda: {file.name: file for file in sorted(found.folder.glob("*.pt"))}
    folder = RunDir(found.folder).checkpoints

    def files() -> dict[str, Path]:
        numbered = checkpoint.listing(folder)[::-1]
        newest = checkpoint.listing(live)[-1:] if live else numbered[:1]
        best = [folder / checkpoint.BEST] if (folder / checkpoint.BEST).exists() else []
        names = {NEWEST: newest, "best": best} | {f"iteration {int(file.stem[10:])}": [file] for file in numbered}
        return {name: matches[0] for name, matches in names.items() if matches}

    return files


class Viewer:
    """Steps the envs and updates the page while a browser is connected."""

    def __init__(self, server: "ViserServer", found: Playable, files: Callable[[], dict[str, Path]]):
        self._server, self._env, self._read, self._files = server, found.env, found.read, files
        self._policy = PolicyRunner(found.policy, found.env.num_envs)
        self._iteration, self._loaded = found.iteration, found.file
        self._scene = make_scene(server, found.env)
        names = {file: name for name, file in reversed(files().items())}
        self._panel = Panel(
            server.gui,
            num_envs=self._scene.num_envs,
            can_follow=self._scene.can_follow,
            inputs=_command_inputs(found.env),
            checkpoint=names.get(found.file, found.file.name),
            images=images_of(found.env),
        )
        server.initial_camera.position, server.initial_camera.look_at = self._scene.initial_camera()
        self._history = RewardHistory(found.env)
        self._log = np.zeros((found.env.num_envs, len(found.env.log_names)))
        self._steps_at_panel, self._panel_time = 0, 0.0
        self._steps, self._name, self._problem = 0, "", ""

    @torch.no_grad()
    def loop(self) -> NoReturn:
        """Run until KeyboardInterrupt. Without a connected browser, nothing is simulated."""
        panel, env = self._panel, self._env
        obs, resets = env.reset(), 0
        due = search_at = scene_at = panel_at = 0.0
        while True:
            if not self._server.get_clients():
                time.sleep(_IDLE_SECONDS)
                continue
            now = time.monotonic()
            if now >= search_at or panel.checkpoint != self._name:
                self._load_selected()
                search_at = now + _SEARCH_SECONDS
            if panel.resets > resets:
                resets, obs = panel.resets, env.reset()
                self._policy.reset(torch.ones(env.num_envs, dtype=torch.bool))
                self._history.clear()
            if panel.paused and not panel.steps:
                due = now + _PAUSE_SECONDS
            else:
                panel.steps = max(0, panel.steps - 1)
                self._drive()
                step = env.step(self._policy.act(obs))
                self._policy.reset(step.terminated | step.truncated)
                obs, self._steps, self._log = step.obs, self._steps + 1, step.log.numpy()
                self._history.add(step)
                due = max(due, now - _MAX_DELAY) + env.step_seconds / panel.speed
            if now >= scene_at:
                with self._server.atomic():
                    self._scene.update(panel.env, panel.follow)
                scene_at = now + 1.0 / _SCENE_RATE
            if now >= panel_at:
                self._update_panel(now)
                panel_at = now + 1.0 / _PANEL_RATE
            time.sleep(max(0.0, due - time.monotonic()))

    def _load_selected(self) -> None:
        """Load the checkpoint that is selected on the page, if it is not loaded."""
        files, self._name = self._files(), self._panel.checkpoint
        self._panel.set_checkpoints(tuple(files))
        file = files.get(self._name)
        if file == self._loaded:
            self._problem = ""
        if file in (None, self._loaded):
            return
        try:
            policy, self._iteration = self._read(file)
            self._policy = PolicyRunner(policy, self._env.num_envs)
            self._loaded, self._problem = file, ""
        except UserError as error:
            # Training may have removed the file. The next search may find another one.
            self._problem = str(error)

    def _drive(self) -> None:
        """Set the command of all envs to the values of the page. The next observation has them."""
        values = self._panel.command.values()
        if values is not None:
            state = cast("RobotEnv", self._env).env_state.task_state
            for each, value in zip(self._panel.command.inputs, values, strict=True):
                state[each.entry][:, each.column] = value

    def _update_panel(self, now: float) -> None:
        panel, env = self._panel, self._env
        simulated = (self._steps - self._steps_at_panel) * env.step_seconds
        speed = simulated / max(1e-6, now - self._panel_time)
        self._steps_at_panel, self._panel_time = self._steps, now
        length, total = self._log[panel.env, :2]
        lines = [
            f"**iteration {self._iteration}**, {'paused' if panel.paused else f'{speed:.1f} x real time'}",
            f"env {panel.env}: {length * env.step_seconds:.1f} s, return {total:.2f}",
        ]
        if self._problem:
            lines.append(f"**{self._problem}**")
        panel.show_status(lines, command_of(env))
        panel.show_rewards(self._history)
        panel.show_images(pictures_of(env))


def _command_inputs(env: VecEnv) -> dict[str, CommandInput]:
    """Return the numbers of the commands that a user can set, by name and unit."""
    ranges = env.task.command_ranges().values() if isinstance(env, RobotEnv) else ()
    return {
        f"{label} {unit}": CommandInput(each.entry, column, low, high)
        for each in ranges
        if each.entry
        for column, (label, unit, low, high) in enumerate(zip(*each[:4], strict=True))
    }
