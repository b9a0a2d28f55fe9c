"""The command `paceline play`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.markup import escape
from tyro.conf import Positional

from paceline.cli.options import option, parse_options
from paceline.process import interrupts


@dataclass(frozen=True)
class PlayArguments:
    """Record a video of a trained policy in one env. No display is needed."""

    run: Annotated[Positional[str], option("RUN")]
    """Directory of the run, one of its checkpoint files, or auto for the newest run under runs/."""
    task: Annotated[str | None, option("TASK")] = None
    """Task of a policy that RSL-RL trained outside of Paceline. RUN is then its file model_N.pt."""
    activation: Annotated[str | None, option("NAME")] = None
    """Activation function of such a policy, because the file does not contain it. The default is that of the task."""
    video: Annotated[Path | None, option("FILE")] = None
    """Output file, which ends in .mp4. The default is videos/iteration_N.mp4 in the run's directory."""
    seconds: float = 10.0
    """Length of the video in seconds of simulated time; above 0, at most 3600."""
    width: int = 640
    """Width of the video in pixels; even, from 16 to 4096."""
    height: int = 480
    """Height of the video in pixels; even, from 16 to 4096."""
    overlay: bool = True
    """Show the command and the rewards as text, if the height is at least 240 pixels, and velocities as arrows."""
    seed: int = 0
    """Seed of the initial states and commands, from 0 to 2^63 - 1."""


def run(argv: list[str], console: Console) -> int:
    arguments = parse_options(PlayArguments, argv, "play")
    from paceline.view.play import record

    interrupts.raise_keyboard_interrupt()
    recording = record(**vars(arguments))
    console.print(
        f"{escape(str(recording.file))}: {recording.seconds:.1f} s, {recording.num_ended} episodes ended, "
        f"mean reward {recording.mean_reward:.3f} per step"
    )
    for number, episode in enumerate(recording.episodes, 1):
        for line in episode.lines(number):
            console.print(escape(line))
    return 0
