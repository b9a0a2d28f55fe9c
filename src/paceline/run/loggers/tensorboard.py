"""The logger of TensorBoard."""

import io
import re
import threading
import time
from pathlib import Path
from typing import Any

from PIL import Image
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue] (generated code)
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

# The page "Custom Scalars": regular expressions of the full names of the metrics of each chart, by category and title.
_LAYOUT = {
    "episode": {
        "return": ["episode/return", "eval/return"],
        "length, steps": ["episode/length", "eval/length"],
        "success": ["measure/success", "eval/success"],
        "metrics of the task": ["measure/(?!success$).*"],
    },
    "rewards": {"reward terms, sums over an episode": ["reward/.*"]},
    "losses": {"losses": ["loss/.*"], "KL divergence": [".*/kl"], "learning rate": [".*/learning_rate"]},
    "speed": {
        "env steps per second": ["speed/steps_per_second"],
        "seconds per iteration": ["seconds/[a-z]*", "seconds/.*/mean"],
        "slowest rank, seconds per iteration": ["seconds/.*/max"],
        "memory, MiB": ["memory/used_mib", "memory/.*/max"],
    },
}
_GIF_WIDTH, _GIF_FRAMES_PER_SECOND = 320, 10


class TensorBoard:
    """Writes an event file for one session. After a resume, TensorBoard hides the values that an earlier session wrote
    after the checkpoint. Implements `Logger`."""

    def __init__(self, directory: Path, first_iteration: int, options: dict[str, Any]):
        """`options` are shown on the page "HParams", with the last values of the metrics."""
        # TensorBoard reads files in the order of their names, which begin with the time in seconds. The clock may have
        # been set back since: files that would not sort before the new one are renamed.
        prefix, now = "events.out.tfevents.", int(time.time())
        later = [file for file in sorted(directory.glob(f"{prefix}*")) if file.name >= f"{prefix}{now:010d}"]
        for index, file in enumerate(later):
            file.rename(file.with_name(f"{prefix}{now - 1:010d}.~{index:04d}.{file.name.removeprefix(prefix)}"))
        self._writer = SummaryWriter(str(directory), purge_step=first_iteration)
        plain = {name: value if isinstance(value, (int, float)) else str(value) for name, value in options.items()}
        # Without the experiment, TensorBoard shows the options and metrics of all runs, not those of the first one.
        _, session_start, self._session_end = hparams(plain, {})
        self._add(session_start, 0)
        self._names: set[str] = set()
        self._has_layout = False
        self._videos: list[threading.Thread] = []

    def log(self, iteration: int, values: dict[str, float]) -> None:
        # One event for all values takes a tenth of the time of one event for each.
        self._add(
            Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]), iteration
        )
        self._names |= values.keys()
        if not self._has_layout and {"episode", "seconds"} <= {name.partition("/")[0] for name in self._names}:
            self._has_layout = True
            self._writer.add_custom_scalars(_charts_with(self._names))

    def log_image(self, iteration: int, name: str, picture: Tensor) -> None:
        self._writer.add_image(name, picture, iteration)

    def log_video(self, iteration: int, name: str, file: Path) -> None:
        """Show the video as an animated image. A thread converts it."""

        def convert() -> None:
            picture = Summary.Image(encoded_image_string=_gif(file))
            self._add(Summary(value=[Summary.Value(tag=name, image=picture)]), iteration)

        self._videos.append(threading.Thread(target=convert, daemon=True, name="gif"))
        self._videos[-1].start()

    def flush(self) -> None:
        self._writer.flush()

    def close(self, status: str) -> None:
        for thread in self._videos:
            thread.join()
        if status == "completed":
            self._add(self._session_end, 0)
        self._writer.close()

    def _add(self, summary: Any, iteration: int) -> None:
        assert self._writer.file_writer
        self._writer.file_writer.add_summary(summary, iteration)


def _charts_with(names: set[str]) -> dict[str, dict[str, list[Any]]]:
    """Return the charts of `_LAYOUT` that show at least one of the metrics."""
    return {
        category: shown
        for category, charts in _LAYOUT.items()
        if (
            shown := {
                # TensorBoard matches the beginning of a name.
                title: ["Multiline", [f"{pattern}$" for pattern in patterns]]
                for title, patterns in charts.items()
                if any(re.fullmatch(pattern, name) for pattern in patterns for name in names)
            }
        )
    }


def _gif(file: Path) -> bytes:
    """Return an mp4 file as an animated GIF with fewer and smaller frames."""
    import av

    with av.open(str(file)) as container:
        stream = container.streams.video[0]
        every = max(1, round(float(stream.average_rate or 1) / _GIF_FRAMES_PER_SECOND))
        height = round(_GIF_WIDTH * stream.height / stream.width)
        frames = [
            Image.fromarray(frame.to_ndarray(format="rgb24")).resize((_GIF_WIDTH, height))
            for index, frame in enumerate(container.decode(stream))
            if index % every == 0
        ]
    buffer = io.BytesIO()
    milliseconds = 1000 // _GIF_FRAMES_PER_SECOND
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=milliseconds, loop=0)
    return buffer.getvalue()
