"""torchrunx as the launcher: ranks on this host, and on two hosts over SSH."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import checkpoint
from tests.distributed.faults import install, left_behind, start
from tests.distributed.namespaces import Node, network

SECONDS = 60
WORDS = ["--gpu-ids", "none", "--launcher", "torchrunx", "--timeout", "5"]
SMALL = ["train", "cartpole", *WORDS, "--num-envs", "6", "--max-iterations", "3", "--ppo.hidden", "8"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("site"))


@pytest.fixture
def hosts(site: Path, tmp_path: Path) -> Iterator[list[Node]]:
    """Two nodes with a real sshd, and one to log in from; faults that are ordered in `tmp_path / "fault"` happen there."""
    keys = tmp_path / "home" / ".ssh"
    keys.mkdir(parents=True)
    for key in ("of_host", "of_user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / key)], check=True)
    (keys / "config").write_text(f"Host *\n  User root\n  Port 2222\n  IdentityFile {keys / 'of_user'}\n")
    server = tmp_path / "sshd_config"
    server.write_text(
        f"Port 2222\nHostKey {keys / 'of_host'}\nAuthorizedKeysFile {keys / 'of_user.pub'}\n"
        "PermitRootLogin yes\nStrictModes no\nUsePAM no\nPidFile none\n"
    )
    order = tmp_path / "fault"
    if order.exists():
        with server.open("a") as file:
            file.write(f"SetEnv FAULT={order.read_text()}\n")
    Path("/run/sshd").mkdir(exist_ok=True)
    with network(3) as nodes:
        for node in nodes[:2]:
            said = tmp_path / f"{node.name}.log"
            node.start("/usr/sbin/sshd", "-D", "-e", "-f", str(server), output=said)
            until(lambda said=said: "listening" in said.read_text())
        yield nodes


def until(condition: Callable[[], Any], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def result(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "run" / "result.json").read_text())
