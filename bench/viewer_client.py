"""Client for bench/viewer.py, which reads the page as a browser does.

The arguments are the WebSocket address and the version of viser. A line on standard input connects, the next one
disconnects and prints the number of messages per second.
"""

import sys
import threading
import time

import msgspec
from websockets.sync.client import connect
from websockets.typing import Subprotocol

# A browser counts as connected when it has sent its camera.
CAMERA = {
    "type": "ViewerCameraMessage",
    "wxyz": (1.0, 0.0, 0.0, 0.0),
    "position": (3.0, 3.0, 3.0),
    "fov": 1.0,
    "near": 0.01,
    "far": 1000.0,
    "image_height": 480,
    "image_width": 640,
    "look_at": (0.0, 0.0, 0.0),
    "up_direction": (0.0, 0.0, 1.0),
}


def read_page(url: str, version: str) -> float:
    """Read messages until a line arrives on standard input; return their number per second."""
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), ended.set()), daemon=True).start()
    with connect(url, subprotocols=[Subprotocol(f"viser-v{version}")], max_size=None) as socket:
        socket.send(msgspec.msgpack.encode(CAMERA))
        began, count = time.monotonic(), 0
        while not ended.is_set():
            try:
                socket.recv(timeout=0.5)
                count += 1
            except TimeoutError:
                pass
        return count / (time.monotonic() - began)


while sys.stdin.readline():
    print(read_page(*sys.argv[1:]), flush=True)
