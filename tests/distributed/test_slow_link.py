"""The link with a latency that benchmarks use."""

import sys
from pathlib import Path

import pytest

from bench.slow_link import slow_link

pytestmark = pytest.mark.root

_ECHO = """
import socket
with socket.create_server(("0.0.0.0", 5000)) as server:
    connection, _ = server.accept()
    with connection:
        while received := connection.recv(1 << 16):
            connection.sendall(received)
"""
_MEASURE = """
import socket, sys, threading, time
deadline = time.monotonic() + 20.0
while True:
    try:
        connection = socket.create_connection((sys.argv[1], 5000), timeout=20.0)
        break
    except ConnectionRefusedError:
        assert time.monotonic() < deadline
        time.sleep(0.01)
began = time.perf_counter()
connection.sendall(b"x")
connection.recv(1)
print(time.perf_counter() - began)
sent = bytes(range(256)) * 4096
threading.Thread(target=connection.sendall, args=(sent,)).start()
received = b""
while len(received) < len(sent):
    received += connection.recv(1 << 20)
print(received == sent)
"""


def test_packets_are_delayed_in_both_directions_and_complete(tmp_path: Path):
    with slow_link(latency_ms=20.0) as (first, second):
        first.start(sys.executable, "-c", _ECHO, output=tmp_path / "echo.log")
        round_trip_seconds, is_complete = second.call(sys.executable, "-c", _MEASURE, first.address).split()
    assert float(round_trip_seconds) >= 0.04
    assert is_complete == "True"
