"""The controls and the plots of the viewer's page."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from paceline.env.task import CommandDisplay
from paceline.env.vec_env import Step, VecEnv
from paceline.view.overlay import command_table

if TYPE_CHECKING:
    from viser import GuiApi

PLOT_SECONDS = 5.0
"""Simulated time that the plots show, s."""
_SPEEDS = 0.1, 4.0
# Keys that increase and decrease the numbers of the command.
_KEYS: Any = (("I", "K"), ("J", "L"), ("U", "O"))
# Fraction of the range by which a key changes a number of the command.
_KEY_STEP = 0.05
_ARROWS = "Arrows: target velocity (green) and actual velocity (blue)"
_BUTTONS_HINT = "Keys: P to run or pause, N for a step."
# Colors of Okabe and Ito, which color-blind readers can tell apart.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#A6A000")
# Styles of the lines by what the legend adds to the name, because it shows only colors.
_DASHES = {"": (), " (dashed)": (6.0, 3.0), " (dotted)": (2.0, 3.0)}
# Width to which pictures are enlarged, pixels.
_IMAGE_WIDTH = 320
_SCALES: Any = {"x": {"time": False}}
_TICKS = {"ticks": {"show": False}}
# Sizes in pixels. Numbers such as -0.025 need the width of the second axis.
_AXES: Any = (
    {"label": "time, s", "labelSize": 20, "labelFont": "12px sans-serif", "size": 30, **_TICKS},
    {"size": 62, **_TICKS},
)
# Space above, right of, below and left of a plot, pixels. The numbers at its edges need it.
_PLOT_PADDING = (10, 10, 0, 0)


class RewardHistory:
    """Reward terms of all envs in the latest `PLOT_SECONDS`."""

    def __init__(self, env: VecEnv):
        self._columns = [i for i, name in enumerate(env.log_names) if name == "return" or name.startswith("reward/")]
        self.names = tuple(env.log_names[i].removeprefix("reward/") for i in self._columns)
        """Names of the terms. The first one, "return", is the sum."""
        self._step_seconds = env.step_seconds
        self._steps = max(2, round(PLOT_SECONDS / env.step_seconds))
        self._before = np.zeros((env.num_envs, len(self._columns)))
        self._terms = np.zeros((0, *self._before.shape))

    def add(self, step: Step) -> None:
        """Add the rewards of a step, which are the changes of the sums in its log."""
        sums = step.log[:, self._columns].double().numpy()
        self._terms = np.concatenate((self._terms[1 - self._steps :], (sums - self._before)[None]))
        self._before = np.where((step.terminated | step.truncated).numpy()[:, None], 0.0, sums)

    def clear(self) -> None:
        self._before[:], self._terms = 0.0, self._terms[:0]

    def of_env(self, env: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the time of each step, which is 0 for the latest one, s, [step], and the terms, [term, step]."""
        terms = self._terms[:, env].T
        return self._step_seconds * np.arange(1.0 - terms.shape[1], 1.0), terms


class CommandInput(NamedTuple):
    """A number of the command that a user can set."""

    entry: str
    """Entry of the task state that holds the number."""
    column: int
    low: float
    high: float


class CommandPanel:
    """Sliders and keys for the command of the robots."""

    def __init__(self, gui: "GuiApi", inputs: dict[str, CommandInput]):
        self.inputs = tuple(inputs.values())
        if not inputs:
            return
        with gui.add_folder("Command"):
            self._drive = gui.add_checkbox("Drive all envs", False, hint="Use the sliders instead of sampled commands.")
            self._sliders = [
                gui.add_slider(name, each.low, each.high, 0.01 * (each.high - each.low), _neutral(each))
                for name, each in inputs.items()
            ]
            gui.add_button("Stop").on_click(lambda _: self._stop())
            keys = [f"{up} / {down}: {name}" for (up, down), name in zip(_KEYS, inputs, strict=False)]
            gui.add_markdown(f"<small>Keys: {', '.join(keys)}, M: stop</small>")
        gui.add_command("Stop", hotkey="M").on_trigger(lambda _: self._stop())
        for number, ((up, down), name) in enumerate(zip(_KEYS, inputs, strict=False)):
            for key, sign, verb in ((up, 1.0, "Increase"), (down, -1.0, "Decrease")):
                command = gui.add_command(f"{verb} {name}", hotkey=key)
                command.on_trigger(lambda _, number=number, sign=sign: self._change(number, sign))

        for slider in self._sliders:
            slider.on_update(self._start_driving)

    def values(self) -> list[float] | None:
        """Return the values that the user has set, or None if the task samples the commands."""
        return [slider.value for slider in self._sliders] if self.inputs and self._drive.value else None

    def _start_driving(self, event: object) -> None:
        # Sliders are also updated by this class, which has no client.
        if getattr(event, "client", None) is not None:
            self._drive.value = True

    def _change(self, number: int, sign: float) -> None:
        slider, (_, _, low, high) = self._sliders[number], self.inputs[number]
        self._drive.value = True
        slider.value = float(np.clip(slider.value + sign * _KEY_STEP * (high - low), low, high))

    def _stop(self) -> None:
        self._drive.value = True
        for slider, each in zip(self._sliders, self.inputs, strict=True):
            slider.value = _neutral(each)


def _neutral(each: CommandInput) -> float:
    """Return zero, or the middle of a range that does not contain it."""
    return 0.0 if each.low <= 0.0 <= each.high else 0.5 * (each.low + each.high)


class Panel:
    """Everything on the page beside the scene. The viewer reads the values of the controls in every step."""

    def __init__(
        self,
        gui: "GuiApi",
        num_envs: int,
        can_follow: bool,
        inputs: dict[str, CommandInput],
        checkpoint: str,
        images: Iterable[str],
    ):
        gui.configure_theme(show_logo=False, show_share_button=False, control_width="large")
        gui.main_panel.dock_right()
        self._gui, self.paused, self.steps, self.resets = gui, False, 0, 0
        self._actions = {"Run": self._run, "Pause": self._pause, "Step": self._step, "Reset": self._reset}
        self._status = gui.add_markdown("")
        with gui.add_folder("Simulation"):
            buttons = gui.add_button_group("", tuple(self._actions), hint=_BUTTONS_HINT)
            buttons.on_click(lambda event: self._actions[event.target.value]())
            self._speed = gui.add_slider("Speed", *_SPEEDS, 0.1, 1.0, hint="Simulated seconds per second.")
            self._checkpoint = gui.add_dropdown("Checkpoint", (checkpoint,))
            options = tuple(map(str, range(num_envs)))
            self._env = gui.add_dropdown("Env", options, hint="The env of the numbers and the plots.")
            self._follow = gui.add_checkbox("Follow", can_follow, visible=can_follow, hint="Keep the robot in view.")
        gui.add_command("Run or pause", hotkey="P").on_trigger(lambda _: self._run() if self.paused else self._pause())
        gui.add_command("Step", hotkey="N").on_trigger(lambda _: self._step())
        self.command = CommandPanel(gui, inputs)
        self._plots = gui.add_folder("Rewards per step")
        with gui.add_folder("Cameras", visible=bool(images)):
            self._images = {name: gui.add_image(np.zeros((1, 1, 3), np.uint8), label=name) for name in images}
        self._curves = None

    @property
    def env(self) -> int:
        """Selected env."""
        return int(self._env.value)

    @property
    def speed(self) -> float:
        """Simulated seconds per second."""
        return float(self._speed.value)

    @property
    def follow(self) -> bool:
        return self._follow.value

    @property
    def checkpoint(self) -> str:
        """Name of the selected checkpoint."""
        return self._checkpoint.value

    def set_checkpoints(self, names: tuple[str, ...]) -> None:
        """Set the names of the checkpoints to choose from. The selected one stays selected."""
        selected = self._checkpoint.value
        names = names if selected in names else (*names, selected)
        if names != self._checkpoint.options:
            self._checkpoint.options, self._checkpoint.value = names, selected

    def _run(self) -> None:
        self.paused, self.steps = False, 0

    def _pause(self) -> None:
        self.paused = True

    def _step(self) -> None:
        self.paused = True
        self.steps += 1

    def _reset(self) -> None:
        self.resets += 1

    def show_rewards(self, history: RewardHistory) -> None:
        """Plot the sum and the terms of the rewards of the selected env."""
        time, terms = history.of_env(self.env)
        if len(time) < 2:
            return
        # A single term is the sum; envs of other simulators have no terms.
        groups = (terms[:1], terms[1:]) if len(history.names) > 2 else (terms[:1],)
        data = [(time, *group) for group in groups]
        if self._curves is None:
            styles: tuple[Any, ...] = (
                {"series": _series(("sum",)), "title": "sum", "height": 140, "legend": {"show": False}},
                {"series": _series(history.names[1:]), "title": "terms", "height": 240},
            )
            with self._plots:
                self._curves = [
                    self._gui.add_uplot(each, scales=_SCALES, axes=_AXES, padding=_PLOT_PADDING, **style)
                    for each, style in zip(data, styles, strict=False)
                ]
        for curve, each in zip(self._curves, data, strict=True):
            curve.data = each

    def show_images(self, pictures: dict[str, Tensor]) -> None:
        """Show pictures of the cameras by name, uint8 RGB [3, height, width]. Small pictures are enlarged."""
        for name, picture in pictures.items():
            factor = max(1, _IMAGE_WIDTH // picture.shape[2])
            self._images[name].image = picture.permute(1, 2, 0).numpy().repeat(factor, axis=0).repeat(factor, axis=1)

    def show_status(self, lines: list[str], command: CommandDisplay | None) -> None:
        """Show lines of text and the command of the selected env."""
        text = "  \n".join(lines)
        if command and command.numbers:
            heading, *rows = (f"| {' | '.join(row)} |" for row in command_table(command, self.env))
            text = "\n".join((text, "", heading, "|---|---|---|", *rows))
        if command and command.velocity:
            text += f"\n\n<small>{_ARROWS}</small>"
        self._status.content = text


def _series(names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the labels and styles of curves, which are unique for up to 24 of them."""
    styles, curves = tuple(_DASHES.items()), []
    for index, name in enumerate(names):
        suffix, dash = styles[index // len(_COLORS) % len(styles)]
        color = _COLORS[index % len(_COLORS)]
        curves.append({"label": f"{name}{suffix}", "stroke": color, "width": 1.5, "dash": dash})
    return ({"label": "time, s"}, *curves)
