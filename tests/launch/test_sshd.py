"""The SSH hosts of the tests, with OpenSSH's client."""

from pathlib import Path

import pytest

from tests.launch.sshd import ssh_hosts
from tests.waiting import until

pytestmark = pytest.mark.root


def test_each_host_runs_commands_under_its_own_name(tmp_path: Path):
    with ssh_hosts(tmp_path, 2, GREETING="hello") as hosts:
        for node in hosts.nodes:
            printed = hosts.caller.call("ssh", "-F", str(hosts.config), node.name, "echo $GREETING from $(hostname)")
            assert printed == f"hello from {node.name}\n"


def test_a_host_with_another_key_is_refused(tmp_path: Path):
    with ssh_hosts(tmp_path, 2) as hosts:
        known = hosts.config.with_name("known_hosts")
        keys = known.read_text().splitlines()
        known.write_text(f"{keys[0].split()[0]} {' '.join(keys[1].split()[1:])}\n")
        with pytest.raises(AssertionError, match="Host key verification failed"):
            hosts.caller.call("ssh", "-F", str(hosts.config), hosts.nodes[0].name, "true")


def test_a_host_that_is_cut_off_can_be_called_again_after_it_is_reconnected(tmp_path: Path):
    with ssh_hosts(tmp_path, 1) as hosts:
        command = ["ssh", "-F", str(hosts.config), "-o", "ConnectTimeout=1", hosts.nodes[0].name]
        hosts.nodes[0].cut()
        with pytest.raises(AssertionError, match=r"timed out|No route to host"):
            hosts.caller.call(*command, "true")
        hosts.nodes[0].reconnect()

        def answers() -> bool:
            try:
                return hosts.caller.call(*command, "hostname") == "node1\n"
            except AssertionError:
                return False

        until(answers, 10.0)
