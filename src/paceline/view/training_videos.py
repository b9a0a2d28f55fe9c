"""Videos of the policy while it is trained. Another process records them, with its own env on the CPU."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.errors import UserError
from paceline.run import checkpoint
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.tasks import registry
from paceline.training.session import Session

SECONDS = 5.0
# Small, because OpenGL may render on the cores of the training.
_SIZE = ("--width", "480", "--height", "360")
_LAST_VIDEO_SECONDS = 120.0
# One thread, so that the recording leaves the other cores to the training, and no memory of a GPU.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def check_renderable(config: TrainConfig) -> None:
    """Raise UserError if videos of a task are to be recorded that cannot be rendered."""
    if config.video_every and not registry.is_renderable(config.task):
        raise UserError(
            f"--video-every {config.video_every}: the task {config.task!r} cannot be rendered: its EnvEntry has no "
            "`make_renderable`; leave the option out"
        )


class TrainingVideos:
    """Records a video of one env every few iterations, one at a time: if the previous one is not complete, the video is
    left out. Implements `Callback`."""

    def __init__(self) -> None:
        self._recording: _Recording | None = None

    def begin(self, session: Session) -> None:
        self._session = session

    def after_iteration(self, session: Session) -> None:
        if self._recording and self._recording.has_ended:
            self._log()
        if session.learner.iteration % session.config.video_every == 0 and not self._recording:
            self._recording = _Recording(session)

    def close(self) -> None:
        """Wait for the last video if training is complete, otherwise stop the recording."""
        if self._recording and self._session.learner.iteration >= self._session.config.max_iterations:
            self._recording.wait(_LAST_VIDEO_SECONDS)
            self._log()
        elif self._recording:
            self._recording.stop()

    def _log(self) -> None:
        recording, self._recording = self._recording, None
        if recording:
            self._session.loggers.log_video(recording.iteration, "video", recording.result())


class _Recording:
    """A process of `paceline play` with the current policy, which is a separate run in a temporary directory."""

    def __init__(self, session: Session):
        self.iteration = session.learner.iteration
        self._file = session.run.videos.absolute() / f"iteration_{self.iteration:04d}.mp4"
        self._folder = tempfile.TemporaryDirectory(prefix="paceline_video_")
        run = RunDir(Path(self._folder.name))
        run.checkpoints.mkdir()
        run.write_config(session.config)
        policy = {name: part for name, part in session.learner.state().items() if name != "envs"}
        checkpoint.save(run.checkpoints, self.iteration, {"learner": policy}, keep=1, best=False)
        self._errors = run.path / "stderr"
        play = ["play", str(run.path), "--video", str(self._file), "--seconds", str(SECONDS), *_SIZE]
        with self._errors.open("wb") as errors:
            # Ctrl-C on a terminal signals all processes of the session of the training process.
            self._process = subprocess.Popen(
                ["nice", "-n", "10", sys.executable, "-P", "-m", "paceline", *play],
                env=os.environ | _ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, seconds: float) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.stop()
            raise TimeoutError(f"the last video was not complete after {seconds:.0f} s") from None

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def result(self) -> Path:
        """Return the video. Raise RuntimeError with the message of the process if there is none."""
        message = self._errors.read_text(errors="replace").strip().removeprefix("paceline: ")
        self._folder.cleanup()
        if self._process.returncode:
            raise RuntimeError(message or f"the recording ended with {self._process.returncode}")
        return self._file
