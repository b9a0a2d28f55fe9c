"""A real S3 server on a free port of this host, as a process."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from tests.distributed.ranks import free_port

SECRET = "not-to-be-found-in-any-file"
BUCKET = "robots"


class S3Server:
    def __init__(self, command_prefix: tuple[str, ...] = ()) -> None:
        """`command_prefix` is put before the command, for example to set its priority."""
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "AKIA-NOT-TO-BE-FOUND",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        argv = [*command_prefix, sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        self._process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._wait()
        urlopen(Request(f"{self.address}/{BUCKET}", method="PUT")).close()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                urlopen(self.address).close()
                return
            except URLError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.1)


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run a server whose address and credentials are in the environment."""
    server = S3Server()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environment.items():
                patch.setenv(name, value)
            yield server
    finally:
        server.stop()
