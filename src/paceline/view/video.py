"""Encode rendered frames as an mp4 file (H.264)."""

import io
import math
import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from paceline.errors import UserError
from paceline.run.directory import write_atomically

MAX_FRAMES_PER_SECOND = 60
MAX_SECONDS = 3600.0
SIZES = range(16, 4097, 2)
"""Widths and heights in pixels. H.264 halves the color resolution, so they must be even."""


def frame_rate(step_seconds: float) -> tuple[int, Fraction]:
    """Return the number of control steps per frame and the frames per second of a video in real time."""
    rate = 1.0 / step_seconds
    # The tolerance keeps one frame per step at a rate of 60 that rounding has made slightly larger.
    steps_per_frame = max(1, math.ceil(rate / MAX_FRAMES_PER_SECOND - 1e-6))
    return steps_per_frame, Fraction(rate / steps_per_frame).limit_denominator(1001)


def check_format(video: Path | None, seconds: float, width: int, height: int) -> None:
    """Raise UserError for a length, a size or a file name that a video cannot have."""
    if not 0.0 < seconds <= MAX_SECONDS:
        raise UserError(f"--seconds {seconds:g} must be above 0 and at most {MAX_SECONDS:g}: try --seconds 10")
    for flag, size in (("--width", width), ("--height", height)):
        if size not in SIZES:
            near = SIZES[0] if size < SIZES[0] else min(size - size % 2, SIZES[-1])
            raise UserError(f"{flag} {size} must be even and from {SIZES[0]} to {SIZES[-1]}: try {flag} {near}")
    if video is not None and video.suffix.lower() != ".mp4":
        raise UserError(f"--video {video}: videos are mp4, so give a name that ends in .mp4")


def check_writable(file: Path) -> None:
    """Raise UserError for a file that cannot be written, before minutes are spent on rendering."""
    if os.path.exists(file) and not os.path.isfile(file):
        raise _cannot_write(file, "it exists and is not a file")
    nearest = next(parent for parent in file.absolute().parents if os.path.exists(parent))
    if not nearest.is_dir():
        raise _cannot_write(file, f"{nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise _cannot_write(file, f"no permission in {nearest}")


def write_video(file: Path, frames: Iterator[np.ndarray], width: int, height: int, rate: Fraction) -> None:
    """Encode frames, uint8 RGB [height, width, 3], and write the file when all of them are encoded."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate, options={"crf": "20"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, buffer.getvalue())
    except OSError as error:
        raise _cannot_write(file, str(error.strerror)) from None


def _cannot_write(file: Path, reason: str) -> UserError:
    return UserError(f"cannot write the video {file}: {reason}; choose another --video")
