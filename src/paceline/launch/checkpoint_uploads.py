"""Upload the files that the key `checkpoint` of a task names, while the task runs and at its end."""

import sys
import threading
from pathlib import Path

from paceline.errors import UserError
from paceline.launch.spec import Checkpoint
from paceline.run.storage import (
    Folder,
    StorageError,
    Uploads,
    check_installed,
    check_url,
    lower_priority,
    matching_files,
)

_SHORTEST_SECONDS = 1.0
"""Time between two uploads if the frequency is 0, s."""


class CheckpointUpload:
    """Uploads new and changed files of one `checkpoint` in a thread of low priority."""

    def __init__(self, checkpoint: Checkpoint, path: Path, url: str):
        """`path` and `url` are those of the checkpoint, with the values of their tokens. Raise UserError."""
        check_installed(check_url(url))
        self._checkpoint, self._path, self._url = checkpoint, path, url
        self._uploads: Uploads | None = None
        self._ending, self._error = threading.Event(), ""
        self._thread = threading.Thread(target=self._upload_until_end, daemon=True, name="checkpoint")

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """Upload what has changed and end the thread. Raise StorageError if that fails."""
        self._ending.set()
        self._thread.join()
        if self._error:
            raise StorageError(self._error)

    def _upload_until_end(self) -> None:
        # This comes before the library of the store starts its threads.
        lower_priority()
        while not self._ending.wait(max(self._checkpoint.frequency, _SHORTEST_SECONDS)):
            self._upload()
        self._upload()

    def _upload(self) -> None:
        try:
            self._uploads = self._uploads or Uploads(Folder(self._url).upload)
            for file, name in matching_files(self._path, self._checkpoint.regex):
                self._uploads.upload(file, name)
        except (StorageError, UserError, OSError) as error:
            if not self._error:
                line = f"paceline: the checkpoint is not complete: {error}. The task continues."
                print(line, file=sys.stderr, flush=True)
            self._error = str(error)
        else:
            self._error = ""
