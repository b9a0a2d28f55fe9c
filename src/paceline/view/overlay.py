"""What a video tells beside its picture: the command, the rewards and the measures, as text and as arrows."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import mujoco
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from paceline.env.robot_env import RobotEnv
from paceline.env.task import CommandDisplay
from paceline.env.vec_env import Step, VecEnv

SMALLEST_HEIGHT = 240
"""Pixels; in lower pictures text would be too small to read, or hide the robot."""
REFRESH_SECONDS = 0.2
"""Text that changes with every frame cannot be read."""
METRES_PER_SPEED = 0.5
"""An arrow's length for 1 m/s."""
_ARROW_WIDTH = 0.014

_Colour = tuple[int, int, int]
_ASKED, _DONE = (80, 205, 105), (90, 165, 255)
_GAIN, _LOSS = (120, 190, 130), (225, 120, 105)
_BRIGHT, _DIM = (245, 246, 248), (186, 192, 200)
_SHADE = (22, 26, 32, 165)
_MOST_TERMS = 6
_COLUMNS = 80
_PREFIXES = "reward/", "measure/"


@dataclass(frozen=True)
class Episode:
    """What one has come to, so far or in all."""

    seconds: float = 0.0
    total: float = 0.0
    """The sum of its rewards."""
    terms: dict[str, float] = field(default_factory=dict)
    """The same, for each named term; the largest, whatever its sign, first."""
    measures: dict[str, float] = field(default_factory=dict)
    """Means over its steps."""
    end: Literal["running", "terminated", "time limit"] = "running"

    def lines(self, number: int) -> list[str]:
        """For a console, each of at most 80 columns where names are not too long: the return; what was measured; and
        the largest terms."""
        lasted = {"running": "{} so far", "terminated": "ended after {}", "time limit": "{}, its time limit"}[self.end]
        told = [f"episode {number}: {lasted.format(f'{self.seconds:.1f} s')}", f"return {self.total:.2f}"]
        measures = [f"{_plain(name)} {value:.3g}" for name, value in self.measures.items()]
        terms = [f"{_plain(name)} {value:.3g}" for name, value in self.terms.items()]
        below = [", ".join(measures), _fitting(terms, _COLUMNS - 2) if terms else ""]
        return [", ".join(told), *(f"  {line}" for line in below if line)]


def _fitting(parts: list[str], columns: int) -> str:
    """As many of the parts as there is room for."""
    for count in range(len(parts), 0, -1):
        text = ", ".join(parts[:count]) + (", ..." if count < len(parts) else "")
        if len(text) <= columns:
            return text
    return parts[0][:columns]


class Scores:
    """World 0's episodes, from what the env logs."""

    def __init__(self, env: VecEnv):
        self._names, self._control_seconds = env.log_names, env.step_seconds
        self._stretch = max(1, round(REFRESH_SECONDS / env.step_seconds))
        self._row = self._marked = np.zeros(len(self._names))
        self.running, self.ended = Episode(), list[Episode]()
        self.lately: dict[str, float] = {}
        """Each term's mean per step over the latest stretch of `REFRESH_SECONDS`; in the order of `running.terms`."""

    def add(self, step: Step) -> None:
        self._row = step.log[0].double().cpu().numpy()
        terminated, truncated = bool(step.terminated[0]), bool(step.truncated[0])
        self.running = self._episode("terminated" if terminated else "time limit" if truncated else "running")
        length = self._row[0] - self._marked[0]
        if length >= self._stretch or terminated or truncated:
            means = dict(zip(self._names, (self._row - self._marked) / length, strict=True))
            self.lately = {name: float(means[f"reward/{name}"]) for name in self.running.terms}
            self._marked = self._row
        if terminated or truncated:
            self.ended.append(self.running)
            self.running, self._marked = Episode(), np.zeros(len(self._names))

    def all(self) -> tuple[Episode, ...]:
        """The one that is running too, if it has begun."""
        return (*self.ended, self.running) if self.running.seconds else tuple(self.ended)

    def _episode(self, end: Literal["running", "terminated", "time limit"]) -> Episode:
        values = dict(zip(self._names, self._row.tolist(), strict=True))
        terms, measures = ({n.removeprefix(p): v for n, v in values.items() if n.startswith(p)} for p in _PREFIXES)
        largest_first = dict(sorted(terms.items(), key=lambda term: -abs(term[1])))
        seconds = values["length"] * self._control_seconds
        return Episode(seconds, values["return"], largest_first, measures, end)


def command_of(env: VecEnv) -> CommandDisplay | None:
    """Return the command of the envs: what the task displays, or the entry "command" of its task state."""
    if not isinstance(env, RobotEnv):
        return None
    state = env.env_state
    display, command = env.task.command_display(state), state.task_state.get("command")
    if display is not None or command is None:
        return display
    return CommandDisplay({str(column): (value,) for column, value in enumerate(command.unbind(1))})


class Arrow(NamedTuple):
    """In the scene, metres."""

    start: np.ndarray
    end: np.ndarray
    colour: _Colour

    def add_to(self, scene: mujoco.MjvScene) -> None:
        kind, nothing = mujoco.mjtGeom.mjGEOM_ARROW.value, np.zeros(3)
        geom, rgba = scene.geoms[scene.ngeom], np.append(np.array(self.colour) / 255.0, 1.0).astype(np.float32)
        mujoco.mjv_initGeom(geom, kind, nothing, nothing, np.eye(3).ravel(), rgba)
        mujoco.mjv_connector(geom, kind, _ARROW_WIDTH, self.start, self.end)
        # Lit by itself as well, so that its colour is that of the panel's numbers also on the side in shade.
        geom.category, geom.emission = mujoco.mjtCatBit.mjCAT_DECOR.value, 0.2
        scene.ngeom += 1


class Arrows:
    """The velocity that is asked of a robot, and its own, above it."""

    def __init__(self, model: mujoco.MjModel):
        free = np.flatnonzero(model.jnt_type == mujoco.mjtJoint.mjJNT_FREE.value)
        self._body = int(model.jnt_bodyid[free[0]]) if len(free) else 0
        self._height = _height_above(model, self._body)

    def of(self, command: CommandDisplay | None, world: mujoco.MjData) -> list[Arrow]:
        if command is None or command.velocity is None or not self._body:
            return []
        forward = world.xmat[self._body].reshape(3, 3)[:2, 0]
        forward = forward / max(1e-6, float(np.linalg.norm(forward)))
        left = np.array((-forward[1], forward[0]))
        arrows = []
        for level, (velocity, colour) in enumerate(zip(command.velocity, (_ASKED, _DONE), strict=True)):
            ahead, aside = velocity[0].tolist()
            # One above the other, so that none is hidden.
            start = world.xpos[self._body] + (0.0, 0.0, self._height + 0.09 - 0.05 * level)
            along = METRES_PER_SPEED * np.append(ahead * forward + aside * left, 0.0)
            if np.linalg.norm(along) > 0.01:
                arrows.append(Arrow(start, start + along, colour))
        return arrows


def _height_above(model: mujoco.MjModel, body: int) -> float:
    """From a body to the top of its robot, metres, in the pose that the model starts in."""
    world = mujoco.MjData(model)
    if model.nkey:
        mujoco.mj_resetDataKeyframe(model, world, 0)
    mujoco.mj_kinematics(model, world)
    geoms = np.flatnonzero(model.body_rootid[model.geom_bodyid] == model.body_rootid[body])
    turns = world.geom_xmat[geoms].reshape(-1, 3, 3)[:, 2]
    centre, half = model.geom_aabb[geoms, :3], model.geom_aabb[geoms, 3:]
    tops = world.geom_xpos[geoms, 2] + (turns * centre).sum(1) + (np.abs(turns) * half).sum(1)
    return float(tops.max(initial=0.0) - world.xpos[body, 2])


@dataclass(frozen=True)
class _Row:
    """A line of the panel: a label, and two numbers or a number and a bar."""

    label: str
    first: str = ""
    second: str = ""
    bar: float = 0.0
    """Its part of the column's width; below zero for a loss."""
    colours: tuple[_Colour, _Colour, _Colour] = (_DIM, _BRIGHT, _BRIGHT)


_HEAD = (_BRIGHT, _ASKED, _DONE)


class Panel:
    """A table in the upper left corner of pictures."""

    def __init__(self, height: int):
        size = max(11, round(height / 40))
        self._font = ImageFont.load_default(size)
        self._line, self._edge = round(1.3 * size), round(0.75 * size)
        self._most_rows = (height - 7 * self._edge) // self._line
        self._drawn = np.zeros((0, 0, 4), np.float32)

    def show(self, scores: Scores, command: CommandDisplay | None) -> None:
        """What is on the pictures from now on."""
        self._drawn = self._table(_parts(scores, command, self._most_rows))

    def on(self, picture: np.ndarray) -> np.ndarray:
        """A copy of the picture, uint8 [height, width, 3], with the panel."""
        edge, picture = self._edge, picture.copy()
        place = picture[edge : edge + self._drawn.shape[0], edge : edge + self._drawn.shape[1]]
        colour, opacity = np.split(self._drawn[: place.shape[0], : place.shape[1]], [3], axis=2)
        place[:] = place + (colour - place) * opacity
        return picture

    def _table(self, parts: list[list[_Row]]) -> np.ndarray:
        """RGB and opacity, float32 [height, width, 4]."""
        rows, edge = [row for part in parts for row in part], self._edge
        label, column = max(self._width(row.label) for row in rows), self._width("+0.0000")
        first = edge + label + edge + column
        width, height = first + 2 * edge + column, self._line * len(rows) + edge * (len(parts) + 1)
        image = Image.new("RGBA", (width, height))
        draw = ImageDraw.Draw(image)
        draw.rounded_rectangle((0, 0, width - 1, height - 1), radius=edge, fill=_SHADE)
        middle = edge + self._line // 2
        for part in parts:
            for row in part:
                self._row(draw, row, middle, first, column)
                middle += self._line
            middle += edge
        return np.asarray(image, np.float32) / np.array((1.0, 1.0, 1.0, 255.0), np.float32)

    def _row(self, draw: ImageDraw.ImageDraw, row: _Row, middle: int, first: int, column: int) -> None:
        """Its first number ends at `first`, and what is in the next column begins an edge further on."""
        start, thick = first + self._edge, self._line // 5
        label, of_first, of_second = row.colours
        draw.text((self._edge, middle), row.label, label, self._font, anchor="lm")
        draw.text((first, middle), row.first, of_first, self._font, anchor="rm")
        draw.text((start + column, middle), row.second, of_second, self._font, anchor="rm")
        if row.bar:
            end = start + max(1, round(column * abs(row.bar)))
            draw.rectangle((start, middle - thick, end, middle + thick), fill=_GAIN if row.bar > 0.0 else _LOSS)

    def _width(self, text: str) -> int:
        return round(self._font.getlength(text))


def _parts(scores: Scores, command: CommandDisplay | None, most: int) -> list[list[_Row]]:
    """Of the panel. Of the terms there are the largest, as many as there is room for."""
    episode = scores.running
    parts = [
        [_Row(f"{episode.seconds:.1f} s", second=f"return {episode.total:.2f}", colours=(_BRIGHT, _BRIGHT, _BRIGHT))]
    ]
    if command and command.numbers:
        rows = [_Row(name, *_two(numbers)) for name, numbers in command.numbers.items()]
        parts.append([_Row("command", "asked", "done", colours=_HEAD), *rows])
    if scores.lately:
        largest = max(map(abs, scores.lately.values())) or 1.0
        rounded = {_plain(name): round(term, 4) for name, term in scores.lately.items()}
        terms = [_Row(name, f"{term:+.4f}" if term else "0", bar=term / largest) for name, term in rounded.items()]
        room = min(_MOST_TERMS, most - sum(map(len, parts)) - len(episode.measures) - 2)
        if len(terms) > room:
            terms = [*terms[: max(0, room)], _Row(f"and {len(terms) - max(0, room)} more")]
        parts.append([_Row("reward per step", colours=_HEAD), *terms])
    if episode.measures:
        rows = [_Row(_plain(name), f"{value:.3f}") for name, value in episode.measures.items()]
        parts.append([_Row("episode's mean", colours=_HEAD), *rows])
    return parts


def _two(numbers: tuple[Tensor, ...]) -> tuple[str, str]:
    # Zero is added so that it does not say -0.00.
    texts = [f"{round(number[0].item(), 2) + 0.0:.2f}" for number in numbers]
    return texts[0], texts[1] if len(texts) > 1 else ""


def _plain(name: str) -> str:
    return name.replace("_", " ")
