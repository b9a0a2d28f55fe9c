"""Videos of the policy while it is trained. Another process records them, with its own env on the CPU."""

import os
from typing import Self

from paceline.errors import UserError
from paceline.run import checkpoint
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.tasks import registry
from paceline.training.session import Session
from paceline.view.side_process import SideProcess

SECONDS = 5.0
# Small, because OpenGL may render on the cores of the training.
_SIZE = ("--width", 480, "--height", 360)
_LAST_VIDEO_SECONDS = 120.0
_NICE = 10


def check_renderable(config: TrainConfig, with_viewer: bool = False) -> None:
    """Raise UserError if a task that cannot be rendered is to be recorded, or shown in the viewer."""
    option = f"--video-every {config.video_every}" if config.video_every else "--viewer" if with_viewer else ""
    if option and not registry.is_renderable(config.task):
        raise UserError(
            f"{option}: the task {config.task!r} cannot be rendered: its EnvEntry has no `make_renderable`; leave the "
            "option out"
        )


class TrainingVideos:
    """Records a video of one env every few iterations, one at a time: if the previous one is not complete, the video is
    left out. Implements `Callback`."""

    name = "recording of videos"

    def __init__(self) -> None:
        self._recording: SideProcess | None = None
        """Process of `paceline play` with a copy of the policy, which is a run in the temporary folder."""

    def begin(self, session: Session) -> Self:
        self._session = session
        return self

    def after_iteration(self, session: Session) -> None:
        if self._recording and self._recording.exit_code is not None:
            self._log()
        if session.learner.iteration % session.config.video_every == 0 and not self._recording:
            self._start()

    def close(self, status: str) -> None:
        """Wait for the last video if training is complete, otherwise stop the recording."""
        if self._recording and status == "completed" and self._recording.wait(_LAST_VIDEO_SECONDS):
            self._log()
        elif self._recording:
            self._recording.stop()
            if status == "completed":
                raise TimeoutError(f"the last video was not complete after {_LAST_VIDEO_SECONDS:.0f} s")

    def _start(self) -> None:
        learner, self._recording = self._session.learner, SideProcess()
        self._iteration = learner.iteration
        self._file = self._session.run.videos.absolute() / f"iteration_{self._iteration:04d}.mp4"
        try:
            run = RunDir(self._recording.folder)
            run.checkpoints.mkdir()
            run.write_config(self._session.config)
            state = {"learner": learner.policy_state()}
            checkpoint.save(run.checkpoints, self._iteration, state, keep=1, best=False)
        except OSError:
            self._recording.stop()
            raise
        play = ("play", run.path, "--video", self._file, "--seconds", SECONDS, *_SIZE)
        os.setpriority(os.PRIO_PROCESS, self._recording.start("paceline", *play), _NICE)

    def _log(self) -> None:
        """Log the video. Raise RuntimeError with the message of the process if there is none."""
        recording, self._recording = self._recording, None
        assert recording
        message = recording.last_line().removeprefix("paceline: ") if recording.exit_code else ""
        recording.stop()
        if message:
            raise RuntimeError(message)
        self._session.loggers.log_video(self._iteration, "video", self._file)
