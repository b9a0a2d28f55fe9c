"""Open a tunnel to a port of a host, by OpenSSH's client."""

import socket
import subprocess
import time
from contextlib import suppress

from paceline.errors import UserError
from paceline.process.interrupts import cleanup_on_exit


def open_tensorboard(ssh: list[str], host: str, port: int, job: str) -> None:
    """Open a tunnel to the TensorBoard of a job and print its address. `ssh` is a command that ends with the address of
    the host. The tunnel is open until Ctrl-C; raise UserError if it cannot be opened or ends earlier."""
    *command, address = ssh
    local_port = _free_port(port)
    tunnel = ["-N", "-o", "ExitOnForwardFailure=yes", "-L", f"127.0.0.1:{local_port}:127.0.0.1:{port}", address]
    process = subprocess.Popen([*command, *tunnel], stdin=subprocess.DEVNULL)
    with cleanup_on_exit(process.kill):
        while process.poll() is None and not _answers(local_port, b""):
            time.sleep(0.1)
        if process.poll() is not None:
            raise UserError(f"cannot open a tunnel to port {port} of {host}: see the message of ssh above")
        if not _answers(local_port, b"HEAD / HTTP/1.0\r\n\r\n"):
            raise UserError(f"TensorBoard of {job} does not answer on port {port} of {host}")
        print(f"http://127.0.0.1:{local_port} shows TensorBoard of {job}. Ctrl-C closes it.", flush=True)
        process.wait()
    raise UserError(f"lost the host {host}: the tunnel has ended")


def _free_port(wanted: int) -> int:
    """Return a free port of this machine: the one that is wanted, or any other."""
    for port in (wanted, 0):
        with socket.socket() as listener, suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            return listener.getsockname()[1]
    raise UserError("this machine has no free port")


def _answers(port: int, request: bytes) -> bool:
    """Return whether a port of this machine accepts a connection, and whether an answer follows a request."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(request)
            return not request or bool(connection.recv(1))
    except OSError:
        return False
