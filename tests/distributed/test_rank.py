"""The rank from the variables that a launcher or a platform sets, and commands that ignore them."""

import socket
import sys
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.distributed.group import Group
from paceline.distributed.rank import Rank, this_rank
from paceline.errors import UserError
from tests.distributed.ranks import RankCommand, free_port, paceline_on_ranks, variables
from tests.forked import paceline

LAUNCHED = variables(0, 2, 29500)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Set the variables of rank 0 of 2."""
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_launcher_makes_a_launched_rank(launcher: pytest.MonkeyPatch):
    launcher.setenv("RANK", "1")
    launcher.setenv("LOCAL_RANK", "1")
    rank = this_rank(())
    assert (rank.index, rank.world_size, rank.local_index, rank.local_size) == (1, 2, 1, 2)
    assert rank.launched


def test_a_rank_that_no_launcher_made_joins_nobody(launcher: pytest.MonkeyPatch):
    launcher.setenv("MASTER_PORT", str(free_port()))
    group = Group(Rank())
    assert not group.is_distributed
    assert group.all_gather("a") == ["a"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2"),
        ({"WORLD_SIZE": "0"}, "RANK is 0, but WORLD_SIZE is 0"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is 2, but LOCAL_WORLD_SIZE is 2"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_RANK is 0, but LOCAL_WORLD_SIZE is 0"),
        ({"LOCAL_WORLD_SIZE": "3"}, "3 ranks on this host .* but WORLD_SIZE is 2"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"RANK": ""}, "RANK is ''"),
        ({"RANK": "1.0"}, "RANK is '1.0'"),
        ({"RANK": "²"}, "RANK is '²'"),
        ({"RANK": "1" * 5000}, "RANK is '111"),
        ({"WORLD_SIZE": "1000000000000"}, "WORLD_SIZE is '1000000000000'.*from 0 to"),
        ({"LOCAL_RANK": None}, "RANK and WORLD_SIZE are set, but not LOCAL_RANK"),
    ],
)
def test_variables_that_make_no_rank_are_refused(
    changes: dict[str, str | None], message: str, launcher: pytest.MonkeyPatch
):
    for name, value in changes.items():
        launcher.delenv(name) if value is None else launcher.setenv(name, value)
    with pytest.raises(UserError, match=message):
        this_rank(())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_PORT": "abc"}, "MASTER_PORT is 'abc'.* from 1 to 65535"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is '70000'"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is '0'"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT is '-1'"),
        ({"MASTER_PORT": None}, "MASTER_PORT not set"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR not set"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "MASTER_ADDR and MASTER_PORT not set"),
    ],
)
def test_ranks_that_cannot_meet_are_refused(changes: dict[str, str | None], message: str, launcher: pytest.MonkeyPatch):
    for name, value in changes.items():
        launcher.delenv(name) if value is None else launcher.setenv(name, value)
    with pytest.raises(UserError, match=message):
        Group(this_rank(()))


def test_a_port_that_is_no_number_is_one_line(tmp_path: Path):
    done = paceline("train", "cartpole", "--gpu-ids", "none", cwd=tmp_path, **LAUNCHED | {"MASTER_PORT": "abc"})
    assert done.returncode == 2
    assert "MASTER_PORT is 'abc'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_a_port_that_is_in_use_is_named_with_the_remedy(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = paceline("train", "cartpole", "--gpu-ids", "none", cwd=tmp_path, **variables(0, 2, port))
    assert done.returncode == 1
    assert f"port: {port}" in done.stderr
    assert "address already in use; choose another MASTER_PORT" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_policy_is_exported_also_where_a_platform_sets_rank(tiny_run: Path, tmp_path: Path):
    output = ["--format", "torchscript", "--output", "policy.pt"]
    done = paceline("export", str(tiny_run), *output, cwd=tmp_path, **variables(1, 2, free_port()))
    assert (done.returncode, done.stdout, done.stderr) == (0, "policy.pt\n", "")


def error_of(argv: list[str], patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the command prints in this process when it exits with 2."""
    patch.setattr(sys, "argv", ["paceline", *argv])
    assert main() == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [["trian"], ["tasks", "--colour"], ["play", "nowhere"], ["export", "nowhere"], ["doctor", "--timeout", "0"]],
)
def test_errors_are_printed_whatever_the_rank(
    argv: list[str], launcher: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    launcher.setenv("RANK", "1")
    assert len(error_of(argv, launcher, capsys).strip().splitlines()) == 1


def test_the_main_rank_of_a_training_run_prints_for_the_others(tmp_path: Path):
    rank: RankCommand = (["train", "cartpol"], {})
    main, other = paceline_on_ranks(tmp_path, rank, rank)
    assert (main.returncode, other.returncode) == (2, 2)
    assert main.stderr.count("did you mean 'cartpole'") == 1
    assert other.stderr == ""


def test_a_rank_that_meets_no_other_prints_its_own_error(
    launcher: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    launcher.setattr("paceline.cli.train.REPORT_SECONDS", 1.0)
    launcher.setenv("MASTER_PORT", str(free_port()))
    launcher.setenv("RANK", "1")
    assert "did you mean 'cartpole'" in error_of(["train", "cartpol"], launcher, capsys)


def test_variables_that_make_no_rank_do_not_silence_an_error(
    launcher: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    launcher.setenv("RANK", "2")
    assert "did you mean 'cartpole'" in error_of(["train", "cartpol"], launcher, capsys)
    launcher.setenv("RANK", "1")
    launcher.delenv("LOCAL_RANK")
    assert "did you mean 'cartpole'" in error_of(["train", "cartpol"], launcher, capsys)


def test_skrls_variables_for_jax_are_read_for_training_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("JAX_RANK", "1")
    assert "no run at nowhere" in error_of(["play", "nowhere"], monkeypatch, capsys)
    assert "JAX_RANK is set, but not JAX_WORLD_SIZE" in error_of(["train", "cartpole"], monkeypatch, capsys)
