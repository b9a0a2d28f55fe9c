"""The engine osmo. OSMO's command needs a server and is not a package, so a stand-in records how it is called."""

import json
import sys
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from paceline.errors import UserError
from paceline.launch.engines import osmo
from paceline.launch.engines.engine import LaunchOptions
from paceline.launch.job_record import JobRecord, find_job
from paceline.launch.profile import OsmoSettings, Profile
from paceline.launch.workflow import WorkflowFile, read_workflow
from tests.forked import paceline
from tests.launch.workflows import SECONDS, start, wait_for

TEXT = """\
# A comment, which the file keeps.
version: 2
workflow:
  name: train
  tasks:
  - name: master
    image: image
    command: [echo, "{{ greeting }} {{ number }} {{host:master}}"]
    environment: {TENSORBOARD_PORT: "6006"}
default-values: {greeting: hello, number: 1}
"""
_STAND_IN = """\
#!{python}
import json, pathlib, sys
calls = pathlib.Path(__file__).with_name("calls")
text = pathlib.Path(sys.argv[3]).read_text() if sys.argv[2] == "submit" else ""
with calls.open("a") as file:
    file.write(json.dumps([sys.argv[1:], text]) + "\\n")
print({answer!r} if sys.argv[2] == "submit" else "answer of " + sys.argv[2])
sys.exit({code})
"""


class StandIn:
    """A program `osmo` that records its arguments, and the file that is submitted."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch):
        self._directory = directory
        directory.mkdir()
        monkeypatch.setenv("PATH", str(directory), prepend=":")
        self.answers('{"name": "train-17"}')

    def answers(self, answer: str, code: int = 0) -> None:
        self.replace(_STAND_IN.format(python=sys.executable, answer=answer, code=code))

    def replace(self, script: str) -> None:
        program = self._directory / "osmo"
        program.write_text(script)
        program.chmod(0o755)

    @property
    def calls(self) -> list[tuple[list[str], str]]:
        return [tuple(json.loads(line)) for line in (self._directory / "calls").read_text().splitlines()]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(tmp_path / "bin", monkeypatch)


@pytest.fixture
def file(tmp_path: Path) -> WorkflowFile:
    (tmp_path / "train.yaml").write_text(TEXT)
    return read_workflow(tmp_path / "train.yaml", ["number=2"], ["greeting=3"])


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    return Profile(storage_root=tmp_path, osmo=OsmoSettings(pool="robots"))


@pytest.fixture
def job(stand_in: StandIn, file: WorkflowFile, profile: Profile) -> JobRecord:
    assert osmo.launch(file, profile, Console(), LaunchOptions()) == 0
    return find_job("train-1", profile)


def test_dry_run_prints_the_command_and_the_file(file: WorkflowFile, profile: Profile):
    values = "--pool robots --set number=2 --set-string greeting=3"
    command = f"# osmo workflow submit {file.path} --format-type json {values}"
    assert osmo.describe(file, profile) == f"{command}\n{TEXT.rstrip()}"


def test_file_is_submitted_unchanged_with_the_values(stand_in: StandIn, job: JobRecord, file: WorkflowFile):
    [(arguments, text)] = stand_in.calls
    options = ["--format-type", "json", "--pool", "robots", "--set", "number=2", "--set-string", "greeting=3"]
    assert arguments == ["workflow", "submit", str(file.path), *options]
    assert text == TEXT
    assert job.handles == {"workflow": "train-17"}


def test_commands_pass_through(stand_in: StandIn, job: JobRecord, capfd: pytest.CaptureFixture[str]):
    assert osmo.status(job, Console()) == 0
    assert osmo.logs(job, "master", False) == 0
    assert osmo.cancel(job) == 0
    assert osmo.tensorboard(job) == 0
    assert [arguments[1:] for arguments, _ in stand_in.calls[1:]] == [
        ["query", "train-17"],
        ["logs", "train-17", "--task", "master"],
        ["cancel", "train-17"],
        ["port-forward", "train-17", "master", "--port", "6006"],
    ]
    printed = capfd.readouterr().out
    assert "answer of query" in printed
    assert "http://127.0.0.1:6006" in printed


def test_a_tool_ends_when_a_signal_ends_the_command(stand_in: StandIn, job: JobRecord, tmp_path: Path):
    stand_in.replace("#!/bin/sh\necho $$ >pid.part; mv pid.part pid; exec sleep 1000\n")
    process = start(tmp_path, "tensorboard", "train-1")
    try:
        wait_for((tmp_path / "pid").exists)
        process.terminate()
        assert process.wait(SECONDS) == 130
        wait_for(lambda: not psutil.pid_exists(int((tmp_path / "pid").read_text())))
    finally:
        process.kill()
        process.communicate()


def test_refused_submission_leaves_no_job(stand_in: StandIn, file: WorkflowFile, profile: Profile):
    stand_in.answers("", code=3)
    with pytest.raises(UserError, match="osmo has failed with exit code 3"):
        osmo.launch(file, profile, Console(), LaunchOptions())
    assert not (profile.storage_root / "jobs").exists()


def test_answer_without_an_id_is_shown(stand_in: StandIn, file: WorkflowFile, profile: Profile):
    stand_in.answers("please log in")
    with pytest.raises(UserError, match="osmo has not printed the ID of the workflow: 'please log in'"):
        osmo.launch(file, profile, Console(), LaunchOptions())


def test_missing_osmo_is_named(file: WorkflowFile, profile: Profile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="cannot run osmo: No such file or directory; install it"):
        osmo.launch(file, profile, Console(), LaunchOptions())


def test_file_is_checked_first(tmp_path: Path, stand_in: StandIn):
    (tmp_path / "wrong.yaml").write_text(TEXT.replace("image: image", "imag: image"))
    done = paceline("launch", "wrong.yaml", "--on", "osmo", cwd=tmp_path)
    assert done.returncode == 2
    assert "wrong.yaml:7: unknown key of task 'imag'" in done.stderr
    (tmp_path / "old.yaml").write_text(
        TEXT.replace("image: image", "image: image\n    outputs: [{dataset: {name: old}}]")
    )
    done = paceline("launch", "old.yaml", "--on", "osmo", "--dry-run", cwd=tmp_path)
    assert done.returncode == 2
    assert "the engine osmo does not support outputs.dataset: use url: s3://BUCKET/PATH" in done.stderr
