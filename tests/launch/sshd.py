"""SSH hosts on one machine: OpenSSH's server in one network namespace per host, and another host to call them from."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.distributed.namespaces import Node, network
from tests.waiting import until

PORT = 2222


@dataclass(frozen=True)
class SshHosts:
    nodes: list[Node]
    """Hosts with a server. Their names are the names to connect to."""
    caller: Node
    """Host without a server, which is not one of `nodes`."""
    home: Path
    """Home directory of the caller, with .ssh/config and .ssh/known_hosts."""

    @property
    def config(self) -> Path:
        """Configuration file of the client, for `ssh -F`: OpenSSH's client does not read the environment variable
        HOME. The client refuses a host whose key is not in known_hosts, and never asks."""
        return self.home / ".ssh" / "config"


@contextmanager
def ssh_hosts(folder: Path, count: int, **environment: str) -> Iterator[SshHosts]:
    """Start `count` hosts, whose commands get the variables of `environment`. Keys, settings and logs are written to
    `folder`. At the end all processes on the hosts are killed."""
    keys = folder / "home" / ".ssh"
    keys.mkdir(parents=True)
    _make_key(keys / "user")
    # The server does not start without its directory, also where it does not use it.
    Path("/run/sshd").mkdir(exist_ok=True)
    with network(count + 1) as nodes:
        *servers, caller = nodes
        known = []
        for node in servers:
            _make_key(keys / node.name)
            known.append(f"[{node.name}]:{PORT},[{node.address}]:{PORT} {(keys / f'{node.name}.pub').read_text()}")
            _start(node, folder, keys, environment)
        (keys / "known_hosts").write_text("".join(known))
        (keys / "config").write_text(
            f"Host *\n  User root\n  Port {PORT}\n  IdentityFile {keys / 'user'}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {keys / 'known_hosts'}\n  StrictHostKeyChecking yes\n  BatchMode yes\n"
        )
        yield SshHosts(servers, caller, folder / "home")


def _make_key(file: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)], check=True)


def _start(node: Node, folder: Path, keys: Path, environment: dict[str, str]) -> None:
    settings, log = folder / f"{node.name}.sshd_config", folder / f"{node.name}.log"
    variables = " ".join(f"{name}={value}" for name, value in environment.items())
    settings.write_text(
        f"Port {PORT}\nHostKey {keys / node.name}\nAuthorizedKeysFile {keys / 'user.pub'}\n"
        f"PermitRootLogin yes\nStrictModes no\nUsePAM no\nPidFile none\n{variables and f'SetEnv {variables}'}\n"
    )
    node.start("/usr/sbin/sshd", "-D", "-e", "-f", str(settings), output=log)
    until(lambda: "listening" in log.read_text(), 10.0, log.read_text)
