"""Show the command, the rewards and the metrics in a video, as text in a panel and as arrows."""

from dataclasses import dataclass, field
from typing import Literal

import mujoco
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from paceline.env.robot_env import RobotEnv
from paceline.env.task import CommandDisplay
from paceline.env.vec_env import Step, VecEnv
from paceline.view.camera import Arrow, Color

MIN_HEIGHT = 240
"""Minimum height of a frame with a panel, pixels. In smaller frames, the text is illegible or hides the robot."""
REFRESH_SECONDS = 0.2
"""Time between two updates of the panel, because text that changes with every frame is illegible."""
ARROW_SECONDS = 0.5
"""Length of an arrow in meters per m/s."""

_COMMANDED, _ACTUAL = (80, 205, 105), (90, 165, 255)
_GAIN, _LOSS = (120, 190, 130), (225, 120, 105)
_BRIGHT, _DIM = (245, 246, 248), (186, 192, 200)
_BACKGROUND = (22, 26, 32, 165)
_MAX_TERMS = 6
_COLUMNS = 80
_PREFIXES = "reward/", "measure/"


@dataclass(frozen=True)
class Episode:
    """Totals of one episode, which may still be running."""

    seconds: float = 0.0
    total: float = 0.0
    """Sum of the rewards."""
    terms: dict[str, float] = field(default_factory=dict)
    """Sum of each reward term, in descending order of the absolute value."""
    measures: dict[str, float] = field(default_factory=dict)
    """Mean of each metric over the steps."""
    end: Literal["running", "terminated", "time limit"] = "running"

    def lines(self, number: int) -> list[str]:
        """Return lines for a console with the return, the metrics and the largest reward terms. They have at most 80
        columns unless the names are very long."""
        duration = {"running": "{} so far", "terminated": "ended after {}", "time limit": "{}, its time limit"}[
            self.end
        ]
        summary = [f"episode {number}: {duration.format(f'{self.seconds:.1f} s')}", f"return {self.total:.2f}"]
        measures = [f"{_plain(name)} {value:.3g}" for name, value in self.measures.items()]
        terms = [f"{_plain(name)} {value:.3g}" for name, value in self.terms.items()]
        below = [", ".join(measures), _fitting(terms, _COLUMNS - 2) if terms else ""]
        return [", ".join(summary), *(f"  {line}" for line in below if line)]


def _fitting(parts: list[str], columns: int) -> str:
    """Join as many of the parts as fit into a number of columns."""
    for count in range(len(parts), 0, -1):
        text = ", ".join(parts[:count]) + (", ..." if count < len(parts) else "")
        if len(text) <= columns:
            return text
    return parts[0][:columns]


class Scores:
    """Collects the episodes of env 0 from the log of the env."""

    def __init__(self, env: VecEnv):
        self._names, self._control_seconds = env.log_names, env.step_seconds
        self._interval_steps = max(1, round(REFRESH_SECONDS / env.step_seconds))
        self._row = self._interval_start = np.zeros(len(self._names))
        self.running, self.ended = Episode(), list[Episode]()
        self.recent_terms: dict[str, float] = {}
        """Mean of each reward term per step over the latest `REFRESH_SECONDS`, ordered as `running.terms`."""

    def add(self, step: Step) -> None:
        self._row = step.log[0].double().cpu().numpy()
        terminated, truncated = bool(step.terminated[0]), bool(step.truncated[0])
        self.running = self._episode("terminated" if terminated else "time limit" if truncated else "running")
        length = self._row[0] - self._interval_start[0]
        if length >= self._interval_steps or terminated or truncated:
            means = dict(zip(self._names, (self._row - self._interval_start) / length, strict=True))
            self.recent_terms = {name: float(means[f"reward/{name}"]) for name in self.running.terms}
            self._interval_start = self._row
        if terminated or truncated:
            self.ended.append(self.running)
            self.running, self._interval_start = Episode(), np.zeros(len(self._names))

    def all_episodes(self) -> tuple[Episode, ...]:
        """Return the episodes that ended and the running one, if it has started."""
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


class VelocityArrows:
    """Arrows above a robot that show its commanded and its actual velocity."""

    def __init__(self, model: mujoco.MjModel):
        free = np.flatnonzero(model.jnt_type == mujoco.mjtJoint.mjJNT_FREE.value)
        self._body = int(model.jnt_bodyid[free[0]]) if len(free) else 0
        self._height = _height_above(model, self._body)

    def of(self, command: CommandDisplay | None, data: mujoco.MjData) -> list[Arrow]:
        if command is None or command.velocity is None or not self._body:
            return []
        forward = data.xmat[self._body].reshape(3, 3)[:2, 0]
        forward = forward / max(1e-6, float(np.linalg.norm(forward)))
        left = np.array((-forward[1], forward[0]))
        arrows = []
        for level, (velocity, color) in enumerate(zip(command.velocity, (_COMMANDED, _ACTUAL), strict=True)):
            forward_speed, left_speed = velocity[0].tolist()
            # One arrow is above the other, so that none is hidden.
            start = data.xpos[self._body] + (0.0, 0.0, self._height + 0.09 - 0.05 * level)
            vector = ARROW_SECONDS * np.append(forward_speed * forward + left_speed * left, 0.0)
            if np.linalg.norm(vector) > 0.01:
                arrows.append(Arrow(start, start + vector, color))
        return arrows


def _height_above(model: mujoco.MjModel, body: int) -> float:
    """Return the height of a robot above one of its bodies in the initial pose, meters."""
    data = mujoco.MjData(model)
    if model.nkey:
        mujoco.mj_resetDataKeyframe(model, data, 0)
    mujoco.mj_kinematics(model, data)
    geoms = np.flatnonzero(model.body_rootid[model.geom_bodyid] == model.body_rootid[body])
    z_rows = data.geom_xmat[geoms].reshape(-1, 3, 3)[:, 2]
    center, half = model.geom_aabb[geoms, :3], model.geom_aabb[geoms, 3:]
    tops = data.geom_xpos[geoms, 2] + (z_rows * center).sum(1) + (np.abs(z_rows) * half).sum(1)
    return float(tops.max(initial=0.0) - data.xpos[body, 2])


@dataclass(frozen=True)
class _Row:
    """A row of the panel: a label with two numbers, or with a number and a bar."""

    label: str
    first: str = ""
    second: str = ""
    bar: float = 0.0
    """Length as a fraction of the column's width; negative for a negative reward."""
    colors: tuple[Color, Color, Color] = (_DIM, _BRIGHT, _BRIGHT)


_HEADING = (_BRIGHT, _COMMANDED, _ACTUAL)


class Panel:
    """A table in the upper left corner of the frames."""

    def __init__(self, height: int):
        size = max(11, round(height / 40))
        self._font = ImageFont.load_default(size)
        self._row_height, self._margin = round(1.3 * size), round(0.75 * size)
        self._max_rows = (height - 7 * self._margin) // self._row_height
        self._image = np.zeros((0, 0, 4), np.float32)

    def update(self, scores: Scores, command: CommandDisplay | None) -> None:
        """Replace the content of the panel."""
        self._image = self._table(_parts(scores, command, self._max_rows))

    def blend(self, frame: np.ndarray) -> np.ndarray:
        """Return a copy of a frame, uint8 [height, width, 3], with the panel."""
        margin, frame = self._margin, frame.copy()
        region = frame[margin : margin + self._image.shape[0], margin : margin + self._image.shape[1]]
        color, opacity = np.split(self._image[: region.shape[0], : region.shape[1]], [3], axis=2)
        region[:] = region + (color - region) * opacity
        return frame

    def _table(self, parts: list[list[_Row]]) -> np.ndarray:
        """Return RGB and opacity, float32 [height, width, 4]."""
        rows, margin = [row for part in parts for row in part], self._margin
        label, column = max(self._width(row.label) for row in rows), self._width("+0.0000")
        first = margin + label + margin + column
        width, height = first + 2 * margin + column, self._row_height * len(rows) + margin * (len(parts) + 1)
        image = Image.new("RGBA", (width, height))
        draw = ImageDraw.Draw(image)
        draw.rounded_rectangle((0, 0, width - 1, height - 1), radius=margin, fill=_BACKGROUND)
        middle = margin + self._row_height // 2
        for part in parts:
            for row in part:
                self._row(draw, row, middle, first, column)
                middle += self._row_height
            middle += margin
        return np.asarray(image, np.float32) / np.array((1.0, 1.0, 1.0, 255.0), np.float32)

    def _row(self, draw: ImageDraw.ImageDraw, row: _Row, middle: int, first: int, column: int) -> None:
        """Draw a row. The first number ends at x = `first`; the next column starts one margin further right."""
        start, thick = first + self._margin, self._row_height // 5
        label_color, first_color, second_color = row.colors
        draw.text((self._margin, middle), row.label, label_color, self._font, anchor="lm")
        draw.text((first, middle), row.first, first_color, self._font, anchor="rm")
        draw.text((start + column, middle), row.second, second_color, self._font, anchor="rm")
        if row.bar:
            end = start + max(1, round(column * abs(row.bar)))
            draw.rectangle((start, middle - thick, end, middle + thick), fill=_GAIN if row.bar > 0.0 else _LOSS)

    def _width(self, text: str) -> int:
        return round(self._font.getlength(text))


def _parts(scores: Scores, command: CommandDisplay | None, max_rows: int) -> list[list[_Row]]:
    """Return the parts of the panel, with as many of the largest reward terms as fit into `max_rows`."""
    episode = scores.running
    parts = [
        [_Row(f"{episode.seconds:.1f} s", second=f"return {episode.total:.2f}", colors=(_BRIGHT, _BRIGHT, _BRIGHT))]
    ]
    if command and command.numbers:
        rows = [_Row(name, *_two(numbers)) for name, numbers in command.numbers.items()]
        parts.append([_Row("command", "target", "actual", colors=_HEADING), *rows])
    if scores.recent_terms:
        largest = max(map(abs, scores.recent_terms.values())) or 1.0
        rounded = {_plain(name): round(term, 4) for name, term in scores.recent_terms.items()}
        terms = [_Row(name, f"{term:+.4f}" if term else "0", bar=term / largest) for name, term in rounded.items()]
        room = min(_MAX_TERMS, max_rows - sum(map(len, parts)) - len(episode.measures) - 2)
        if len(terms) > room:
            terms = [*terms[: max(0, room)], _Row(f"and {len(terms) - max(0, room)} more")]
        parts.append([_Row("reward per step", colors=_HEADING), *terms])
    if episode.measures:
        rows = [_Row(_plain(name), f"{value:.3f}") for name, value in episode.measures.items()]
        parts.append([_Row("episode mean", colors=_HEADING), *rows])
    return parts


def _two(numbers: tuple[Tensor, ...]) -> tuple[str, str]:
    # Adding zero turns -0.0 into 0.0.
    texts = [f"{round(number[0].item(), 2) + 0.0:.2f}" for number in numbers]
    return texts[0], texts[1] if len(texts) > 1 else ""


def _plain(name: str) -> str:
    return name.replace("_", " ")
