"""The viewer of `paceline train`: a process with its own envs, which gets the newest policy while someone watches.

The process shares nothing with the training but a folder, so training does not wait for it, and its random numbers stay
the same. The training writes the policy to the folder; the process creates the file `_WATCHED` while a browser is
connected. Without a browser neither does anything.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.run import checkpoint
from paceline.view.viewer_server import Address

if TYPE_CHECKING:
    from paceline.training.session import Session

_WATCHED, _LOG = "watched", "log"
# Minimum time between two copies of the policy, s.
_COPY_SECONDS = 3.0
# Time for the process to end, s.
_END_SECONDS = 5.0


class TrainingViewer:
    """A callback of the training, which starts and ends the process."""

    def __init__(self, address: Address, num_envs: int):
        self._address, self._num_envs = address, num_envs
        self._copied_at = 0.0

    def begin(self, session: "Session") -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-viewer-"))
        self._copy_policy(session)
        arguments = session.run.path.absolute(), self._folder, self._address.host, self._address.port, self._num_envs
        # The process uses one thread and no GPU.
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with (self._folder / _LOG).open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "paceline.view.training_viewer", *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                # Ctrl-C is for the training, which ends the process after it has stopped. In a session of its own,
                # the priority of the process would have no effect where Linux groups processes by session.
                process_group=0,
            )
        for line in self._address.lines():
            session.warn(line)

    def after_iteration(self, session: "Session") -> None:
        if self._process.poll() is not None:
            lines = (self._folder / _LOG).read_text(errors="replace").split("\n")
            reason = next((line for line in reversed(lines) if line), f"exit code {self._process.returncode}")
            self.close()
            raise RuntimeError(f"the process of the viewer has ended: {reason}")
        due = time.monotonic() >= self._copied_at + _COPY_SECONDS
        if due and (self._folder / _WATCHED).exists():
            self._copy_policy(session)

    def close(self) -> None:
        assert self._process.stdin
        # The process ends when its standard input is closed.
        self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _copy_policy(self, session: "Session") -> None:
        state = {"learner": session.learner.policy_state()}
        checkpoint.save(self._folder, session.learner.iteration, state, keep=1, best=False)
        self._copied_at = time.monotonic()


def _end_with_parent(folder: Path) -> None:
    """End this process when the training closes its standard input or ends."""
    sys.stdin.buffer.read()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def main(run: str, folder: str, host: str, port: str, num_envs: str) -> None:
    """Show the policies in `folder`, which the training of `run` writes."""
    # The training has precedence: this process runs only where a core would be idle.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    threading.Thread(target=_end_with_parent, args=(Path(folder),), daemon=True).start()
    # These modules import torch and viser, which takes seconds.
    from paceline.run.directory import RunDir
    from paceline.training.build import playable_file
    from paceline.view.viewer import Viewer, list_checkpoints
    from paceline.view.viewer_server import serve

    live, watched = Path(folder), Path(folder) / _WATCHED
    found = playable_file(RunDir(Path(run)), checkpoint.newest(live), renderable=True, num_envs=int(num_envs))
    with serve(Address(host, int(port)), f"Paceline: {found.config.task}, training") as server:
        server.on_client_connect(lambda _: watched.touch())
        server.on_client_disconnect(lambda _: None if server.get_clients() else watched.unlink(missing_ok=True))
        Viewer(server, found, list_checkpoints(found, live)).loop(lambda: False)


if __name__ == "__main__":
    main(*sys.argv[1:])
