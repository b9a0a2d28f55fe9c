"""Files are transferred by a separate process, so that training does not wait for Python's interpreter lock."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from paceline.errors import UserError
from paceline.run.storage import StorageError
from paceline.run.storage_process import FolderProcess
from tests.launch.workflows import wait_for


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[FolderProcess]:
    folder = FolderProcess(f"file://{tmp_path}/store/")
    yield folder
    folder.close()


def _process() -> psutil.Process:
    return next(each for each in psutil.Process().children() if "paceline.run.storage_process" in each.cmdline())


def test_files_are_transferred_at_the_lowest_priority(folder: FolderProcess, tmp_path: Path):
    (tmp_path / "file").write_bytes(b"content")
    checksum = folder.upload(tmp_path / "file", "sub/name")
    assert checksum
    assert folder.read("sub/name") == b"content"
    assert (_process().nice(), os.sched_getscheduler(_process().pid)) == (19, os.SCHED_BATCH)
    # Linux compares the priorities of processes of the same session.
    assert os.getsid(_process().pid) == os.getsid(0)
    assert os.getpgid(_process().pid) != os.getpgid(0)
    folder.write("sub/name", b"other")
    assert (tmp_path / "store/sub/name").read_bytes() == b"other"
    folder.delete("sub/name")
    assert folder.read("sub/name") is None
    assert folder.close() == 0


def test_stop_requests_to_all_processes_of_a_run_do_not_end_the_transfers(folder: FolderProcess):
    folder.write("name", b"before")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        _process().send_signal(number)
    folder.write("name", b"after")
    assert folder.read("name") == b"after"


def test_a_killed_process_is_an_error_and_the_next_call_starts_another(folder: FolderProcess):
    folder.write("name", b"content")
    _process().kill()
    with pytest.raises(StorageError, match=r"transfers to file://.* has ended with exit code -9"):
        folder.read("name")
    assert folder.read("name") == b"content"


def test_errors_of_the_store_and_of_the_url_are_raised():
    message = r"cannot write file:///sys/paceline/name: "
    with closing(FolderProcess("file:///sys/paceline")) as folder, pytest.raises(StorageError, match=message):
        folder.write("name", b"")
    with closing(FolderProcess("gs://bucket/run")) as folder, pytest.raises(UserError, match="pip install gcsfs"):
        folder.read("name")
    with pytest.raises(UserError, match="environment variables"):
        FolderProcess("s3://KEY:secret@bucket/run")


def test_the_process_ends_when_the_training_process_is_killed(tmp_path: Path):
    script = f"""
import os, signal
from paceline.run.storage_process import FolderProcess
folder = FolderProcess("file://{tmp_path}/store")
folder.write("name", b"")
print(folder.read("name"), flush=True)
# A process that was forked keeps the pipe open.
if os.fork():
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True) as run:
        try:
            assert run.stdout
            assert run.stdout.readline()
            wait_for(lambda: not _serving(tmp_path))
        finally:
            os.killpg(run.pid, signal.SIGKILL)


def _serving(folder: Path) -> list[psutil.Process]:
    """Return the processes that transfer to a store below a folder."""
    return [
        each for each in psutil.process_iter(["cmdline"]) if f"file://{folder}/store" in (each.info["cmdline"] or [])
    ]
