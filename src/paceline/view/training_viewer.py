"""The viewer of `paceline train`: a process with its own envs, which gets the newest policy while someone watches.

The process shares nothing with the training but a folder, so training does not wait for it, and its random numbers stay
the same. The training writes the policy to the folder; the process creates the file `_WATCHED` while a browser is
connected. Without a browser neither does anything.
"""

import os
import shutil
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from paceline.distributed.sharding import copy_to_host
from paceline.process.background import Background
from paceline.run import checkpoint
from paceline.view.side_process import SideProcess
from paceline.view.viewer_server import Address

if TYPE_CHECKING:
    from paceline.training.session import Session

_WATCHED = "watched"
# Minimum time between two copies of the policy, s.
_COPY_SECONDS = 3.0
# Time for the process to end, s.
_END_SECONDS = 5.0


class TrainingViewer:
    """Starts and ends the process. Implements `Callback`."""

    name = "viewer"

    def __init__(self, address: Address, num_envs: int):
        self._address, self._num_envs = address, num_envs

    def begin(self, session: "Session") -> Self:
        self._process = SideProcess()
        self._copy_policy(session)
        self._copy.result()
        address, folder = self._address, self._process.folder
        self._process.start(__name__, session.run.path.absolute(), folder, address.host, address.port, self._num_envs)
        for line in address.lines():
            session.warn(line)
        return self

    def after_iteration(self, session: "Session") -> None:
        if self._process.exit_code is not None:
            reason = self._process.last_line()
            self._process.stop()
            raise RuntimeError(f"its process has ended: {reason}")
        is_due = time.monotonic() >= self._copied_at + _COPY_SECONDS and self._copy.done()
        if is_due and (self._process.folder / _WATCHED).exists():
            try:
                self._copy.result()
            except OSError:
                self._process.stop()
                raise
            self._copy_policy(session)

    def close(self, status: str) -> None:
        self._process.stop(_END_SECONDS)

    def _copy_policy(self, session: "Session") -> None:
        """Begin to write the policy. A thread waits for the disk."""
        iteration, state = session.learner.iteration, copy_to_host({"learner": session.learner.policy_state()})
        self._copy = Background(partial(checkpoint.save, self._process.folder, iteration, state, keep=1, best=False))
        self._copied_at = time.monotonic()


def _end_with_parent(folder: Path) -> None:
    """End this process when the training closes its standard input or ends."""
    sys.stdin.buffer.read()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def main(run: str, folder: str, host: str, port: str, num_envs: str) -> None:
    """Show the policies in `folder`, which the training of `run` writes."""
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
        viewer = Viewer(server, found, list_checkpoints(found, live))
        # From now on the training has precedence: all threads run only where a core would be idle.
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
        viewer.loop()


if __name__ == "__main__":
    main(*sys.argv[1:])
