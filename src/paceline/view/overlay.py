"""Show the command, the rewards and the metrics in a video, as text in a panel and as arrows."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import mujoco
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from paceline.cameras.level_of_detail import initial_pose
from paceline.env.robot_env import RobotEnv
from paceline.env.task import CommandDisplay
from paceline.env.vec_env import Step, VecEnv
from paceline.view.camera import Arrow, Color
from paceline.view.robot import base_body, bounds

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
        columns unless the names of the metrics are very long."""
        times = {"running": "{} s so far", "terminated": "ended after {} s", "time limit": "{} s, its time limit"}
        seconds = times[self.end].format(f"{self.seconds:.1f}")
        measures, terms = (
            [f"{_plain(name)} {value:.3g}" for name, value in values.items()] for values in (self.measures, self.terms)
        )
        largest_terms = ", ".join(terms)
        while len(largest_terms) > _COLUMNS - 2:
            terms.pop()
            largest_terms = ", ".join((*terms, "..."))
        below = (f"  {line}" for line in (", ".join(measures), largest_terms) if line)
        return [f"episode {number}: {seconds}, return {self.total:.2f}", *below]


class Scores:
    """Collects the episodes of env 0 from the log of the env."""

    def __init__(self, env: VecEnv):
        self._names, self._step_seconds = env.log_names, env.step_seconds
        self._interval_steps = max(1, round(REFRESH_SECONDS / env.step_seconds))
        self._interval_start = np.zeros(len(self._names))
        self.running, self.ended = Episode(), list[Episode]()
        self.recent_terms: dict[str, float] = {}
        """Mean of each reward term per step over the latest `REFRESH_SECONDS`, ordered as `running.terms`."""

    def add(self, step: Step) -> None:
        row = step.log[0].double().cpu().numpy()
        end = "terminated" if step.terminated[0] else "time limit" if step.truncated[0] else "running"
        values = dict(zip(self._names, row.tolist(), strict=True))
        terms = sorted(_with_prefix("reward/", values).items(), key=lambda term: -abs(term[1]))
        seconds, measures = values["length"] * self._step_seconds, _with_prefix("measure/", values)
        self.running = Episode(seconds, values["return"], dict(terms), measures, end)
        length = row[0] - self._interval_start[0]
        if length >= self._interval_steps or end != "running":
            means = dict(zip(self._names, ((row - self._interval_start) / length).tolist(), strict=True))
            self.recent_terms = {name: means[f"reward/{name}"] for name in self.running.terms}
            self._interval_start = row
        if end != "running":
            self.ended.append(self.running)
            self.running, self._interval_start = Episode(), np.zeros(len(self._names))

    def all_episodes(self) -> tuple[Episode, ...]:
        """Return the episodes that ended and the running one, if it has started."""
        return (*self.ended, self.running) if self.running.seconds else tuple(self.ended)


def _with_prefix(prefix: str, values: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def command_of(env: VecEnv) -> CommandDisplay | None:
    """Return the command that the task displays, or else the entry "command" of its task state, or None."""
    if not isinstance(env, RobotEnv):
        return None
    state = env.env_state
    display, command = env.task.command_display(state), state.task_state.get("command")
    if display is not None or command is None:
        return display
    return CommandDisplay({str(column): (value,) for column, value in enumerate(command.unbind(1))})


def command_table(command: CommandDisplay, env: int = 0) -> list[tuple[str, ...]]:
    """Return a heading, and the name, the target and the actual value, if there is one, of each number of a command."""
    # Adding zero turns -0.0 into 0.0.
    texts = {n: [f"{round(v[env].item(), 2) + 0.0:.2f}" for v in values] for n, values in command.numbers.items()}
    return [("command", "target", "actual"), *((name, *numbers) for name, numbers in texts.items())]


class VelocityArrows:
    """Arrows above a robot that show its commanded and its actual velocity."""

    def __init__(self, model: mujoco.MjModel):
        self._body = base_body(model)
        # Height of the robot above its base, m.
        self._height = float(bounds(model)[1, 2] - initial_pose(model).xpos[self._body, 2])

    def make(self, command: CommandDisplay | None, data: mujoco.MjData, env: int = 0) -> list[Arrow]:
        if command is None or command.velocity is None or not self._body:
            return []
        forward = data.xmat[self._body].reshape(3, 3)[:2, 0]
        forward = forward / max(1e-6, float(np.linalg.norm(forward)))
        left = np.array((-forward[1], forward[0]))
        arrows = []
        for level, (velocity, color) in enumerate(zip(command.velocity, (_COMMANDED, _ACTUAL), strict=True)):
            forward_speed, left_speed = velocity[env].tolist()
            # One arrow is above the other, so that none is hidden.
            start = data.xpos[self._body] + (0.0, 0.0, self._height + 0.09 - 0.05 * level)
            vector = ARROW_SECONDS * np.append(forward_speed * forward + left_speed * left, 0.0)
            if np.linalg.norm(vector) > 0.01:
                arrows.append(Arrow(start, start + vector, color))
        return arrows


class _Row(NamedTuple):
    """A row of the panel."""

    texts: tuple[str, ...]
    """Label, and at most two numbers."""
    bar: float = 0.0
    """Length as a fraction of the column's width; negative for a negative reward."""
    colors: tuple[Color, ...] = (_DIM, _BRIGHT, _BRIGHT)


_HEADING = (_BRIGHT, _COMMANDED, _ACTUAL)


class Panel:
    """A table in the upper left corner of the frames."""

    def __init__(self, height: int):
        size = max(11, round(height / 40))
        self._font = ImageFont.load_default(size)
        self._row_height, self._margin = round(1.3 * size), round(0.75 * size)
        self._max_rows = (height - 7 * self._margin) // self._row_height

    def update(self, scores: Scores, command: CommandDisplay | None) -> None:
        """Replace the content of the panel."""
        parts, margin = _parts(scores, command, self._max_rows), self._margin
        rows = [row for part in parts for row in part]
        label = max(round(self._font.getlength(row.texts[0])) for row in rows)
        column = round(self._font.getlength("+0.0000"))
        # The first number ends at x = `first`; the next column starts one margin further right.
        first = margin + label + margin + column
        width, height = first + 2 * margin + column, self._row_height * len(rows) + margin * (len(parts) + 1)
        self._image = Image.new("RGBA", (width, height))
        draw = ImageDraw.Draw(self._image)
        draw.rounded_rectangle((0, 0, width - 1, height - 1), radius=margin, fill=_BACKGROUND)
        middle = margin + self._row_height // 2
        for part in parts:
            for row in part:
                self._draw_row(draw, row, middle, first, column)
                middle += self._row_height
            middle += margin

    def _draw_row(self, draw: ImageDraw.ImageDraw, row: _Row, middle: int, first: int, column: int) -> None:
        start, thick = first + self._margin, self._row_height // 5
        places = (self._margin, "lm"), (first, "rm"), (start + column, "rm")
        for text, color, (x, anchor) in zip(row.texts, row.colors, places, strict=False):
            draw.text((x, middle), text, color, self._font, anchor=anchor)
        if row.bar:
            end = start + max(1, round(column * abs(row.bar)))
            draw.rectangle((start, middle - thick, end, middle + thick), fill=_GAIN if row.bar > 0.0 else _LOSS)

    def blend(self, frame: np.ndarray) -> np.ndarray:
        """Return a copy of a frame, uint8 [height, width, 3], with the panel."""
        image = Image.fromarray(frame)
        image.paste(self._image, (self._margin, self._margin), self._image)
        return np.asarray(image)


def _parts(scores: Scores, command: CommandDisplay | None, max_rows: int) -> list[list[_Row]]:
    """Return the parts of the panel, with as many of the largest reward terms as fit into `max_rows`."""
    episode = scores.running
    title = f"{episode.seconds:.1f} s", "", f"return {episode.total:.2f}"
    parts = [[_Row(title, colors=(_BRIGHT,) * 3)]]
    if command and command.numbers:
        heading, *rows = map(_Row, command_table(command))
        parts.append([heading._replace(colors=_HEADING), *rows])
    if scores.recent_terms:
        largest = max(map(abs, scores.recent_terms.values())) or 1.0
        rounded = {_plain(name): round(term, 4) for name, term in scores.recent_terms.items()}
        terms = [_Row((name, f"{term:+.4f}" if term else "0"), term / largest) for name, term in rounded.items()]
        room = max(0, min(_MAX_TERMS, max_rows - sum(map(len, parts)) - len(episode.measures) - 2))
        if len(terms) > room:
            terms = [*terms[:room], _Row((f"and {len(terms) - room} more",))]
        parts.append([_Row(("reward per step",), colors=_HEADING), *terms])
    if episode.measures:
        rows = [_Row((_plain(name), f"{value:.3f}")) for name, value in episode.measures.items()]
        parts.append([_Row(("episode mean",), colors=_HEADING), *rows])
    return parts


def _plain(name: str) -> str:
    return name.replace("_", " ")
