"""The web server of the viewer."""

import errno
import io
import logging
import os
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from getpass import getuser
from importlib.util import find_spec
from typing import TYPE_CHECKING

from paceline.errors import UserError

if TYPE_CHECKING:
    from viser import ViserServer

DEFAULT_PORT = 8080
# Number of ports that are tried if none is given.
_MAX_PORTS = 100


@dataclass(frozen=True)
class Address:
    """Address at which the server of the viewer listens."""

    host: str
    port: int

    def lines(self) -> list[str]:
        """Return lines for a console that say how to open the page."""
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        if self.host not in ("127.0.0.1", "localhost", "::1"):
            return [f"viewer: {url} (without a password: everyone who can reach this address can use it)"]
        # The fields are the addresses and ports of the client and of this host.
        connection = os.environ.get("SSH_CONNECTION", "").split()
        host = connection[2] if len(connection) == 4 else socket.gethostname()
        tunnel = f"ssh -L {self.port}:localhost:{self.port} {shlex.quote(f'{getuser()}@{host}')}"
        return [f"viewer: {url}", f"  from another computer: {tunnel}, then open http://localhost:{self.port}"]


def choose_address(host: str, port: int | None) -> Address:
    """Return an address that is free. Raise UserError if viser is not installed, or if the address is not free. If
    `port` is None, it is the first free port from `DEFAULT_PORT` on."""
    if find_spec("viser") is None:
        raise UserError("--viewer needs the package viser, which is not installed: pip install 'paceline[viewer]'")
    for candidate in (port,) if port else range(DEFAULT_PORT, DEFAULT_PORT + _MAX_PORTS):
        try:
            with socket.create_server((host, candidate), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
                return Address(host, candidate)
        except PermissionError:
            raise UserError(f"--viewer-port {candidate}: no permission; choose a port from 1024 on") from None
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                reason = str(error.strerror).partition(" (")[0]
                raise UserError(f"--viewer-host {host}: {reason}; choose an address of this host") from None
    if port:
        raise UserError(f"--viewer-port {port} is in use on {host}: choose another port, or leave the option out")
    last = DEFAULT_PORT + _MAX_PORTS - 1
    raise UserError(f"all ports from {DEFAULT_PORT} to {last} are in use on {host}: choose a --viewer-port")


@contextmanager
def serve(address: Address, title: str) -> "Iterator[ViserServer]":
    """Run the server inside the context."""
    from viser import ViserServer

    # A connection that ends before its request, such as a check of the port, would print a traceback.
    logging.getLogger("websockets.server").setLevel(logging.CRITICAL)
    # viser prints its own messages when it starts and when it stops.
    with redirect_stdout(io.StringIO()):
        server = ViserServer(address.host, address.port, label=title, verbose=False)
    try:
        if server.get_port() != address.port:
            raise UserError(f"--viewer-port {address.port} is in use on {address.host}: choose another port")
        yield server
    finally:
        with redirect_stdout(io.StringIO()):
            server.stop()
