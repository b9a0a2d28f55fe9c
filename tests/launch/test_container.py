"""Tasks in containers."""

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.launch.container import container_name, remove, wrap
from paceline.launch.engines import local
from paceline.launch.profile import ContainerSettings, Profile
from paceline.launch.workflow import parse_workflow
from tests.forked import paceline

DIRECTORY = Path("/storage/jobs/train-1/master")
VARIABLES = {"TOKEN": "secret-value", "CUDA_VISIBLE_DEVICES": "2,5"}
USER = f"--user={os.getuid()}:{os.getgid()}"


def wrapped(tool: str, variables: dict[str, str] = VARIABLES) -> tuple[list[str], dict[str, str]]:
    settings = ContainerSettings.model_validate({"tool": tool, "options": ["--volume=/data:/data"]})
    return wrap(settings, "image:1", ["bash", "train.sh"], DIRECTORY, variables)


def test_docker():
    command, variables = wrapped("docker")
    assert command == [
        *("docker", "run", "--rm", f"--name={container_name(DIRECTORY)}", "--network=host", "--ipc=host", USER),
        *('--gpus="device=2,5"', "--volume=/storage/jobs/train-1:/storage/jobs/train-1"),
        *("--workdir=/storage/jobs/train-1/master/work", "--env=TOKEN", "--env=CUDA_VISIBLE_DEVICES"),
        *("--volume=/data:/data", "--entrypoint=bash", "image:1", "train.sh"),
    ]
    # The container numbers its GPUs from 0.
    assert variables == {"TOKEN": "secret-value", "CUDA_VISIBLE_DEVICES": "0,1"}


def test_podman():
    command, _ = wrapped("podman")
    assert command[:2] == ["podman", "run"]
    assert {"--device=nvidia.com/gpu=2", "--device=nvidia.com/gpu=5", "--env=TOKEN"} <= set(command)
    assert (USER if os.getuid() == 0 else "--userns=keep-id") in command


def test_apptainer():
    command, variables = wrapped("apptainer")
    assert command == [
        *("apptainer", "exec", "--cleanenv", "--no-home", "--writable-tmpfs", "--nv", "--bind=/storage/jobs/train-1"),
        *("--pwd=/storage/jobs/train-1/master/work", "--volume=/data:/data", "docker://image:1", "bash", "train.sh"),
    ]
    assert variables["APPTAINERENV_CUDA_VISIBLE_DEVICES"] == "2,5"


@pytest.mark.parametrize("tool", ["podman", "docker", "apptainer"])
def test_no_value_is_on_the_command_line(tool: str):
    assert "secret-value" not in " ".join(wrapped(tool)[0])


@pytest.mark.parametrize("tool", ["podman", "docker", "apptainer"])
@pytest.mark.parametrize("variables", [{}, {"CUDA_VISIBLE_DEVICES": ""}])
def test_task_without_gpus_gets_none(tool: str, variables: dict[str, str]):
    command = " ".join(wrapped(tool, variables)[0])
    assert not any(option in command for option in ("--gpus", "--device", "--nv"))


def test_dry_run_shows_the_container():
    text = "workflow:\n  name: w\n  tasks:\n  - {name: t, image: paceline, command: [paceline, train]}\n"
    file = parse_workflow(text, Path("f.yaml"))
    with_tool = local.describe(file, Profile(container=ContainerSettings(tool="podman")))
    assert "podman run --rm" in with_tool
    assert "--entrypoint=paceline paceline train" in with_tool
    assert "podman" not in local.describe(file, Profile())


# The image of these tests has this machine's busybox only: image registries cannot be reached everywhere.
OPTIONS = ["--ulimit=nofile=1024:1024", "--ulimit=nproc=1000:1000"]
"""Limits below those of the tests, which podman cannot raise where it runs in a container itself."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a profile for podman, and the image localhost/paceline-test."""
    directory = tmp_path_factory.mktemp("site")
    busybox = shutil.which("busybox")
    assert busybox, "busybox is missing: run scripts/node_packages"
    with tarfile.open(directory / "image.tar", "w") as archive:
        archive.add(busybox, "bin/busybox")
        for name in ("sh", "cat", "sleep", "id", "env"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
    podman("import", directory / "image.tar", "localhost/paceline-test")
    runtime = ["--runtime=runc"] if shutil.which("runc") else []
    profile = {"storage_root": str(directory), "container": {"tool": "podman", "options": [*runtime, *OPTIONS]}}
    (directory / "profile.yaml").write_text(json.dumps(profile))
    yield directory
    podman("rmi", "--force", "localhost/paceline-test")


def podman(*arguments: object) -> str:
    command = ["podman", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def launch(site: Path, script: str, more: str = "") -> tuple[int, Path]:
    """Run a task in a container. Return the exit code of paceline launch, and the directory of the job."""
    jobs = set((site / "jobs").glob("*"))
    task = {"name": "t", "image": "localhost/paceline-test", "command": ["sh", "-c", script]}
    text = f"workflow:\n  name: w\n{more}  tasks:\n  - {json.dumps(task | {'environment': {'COLOR': 'red'}})}\n"
    (site / "w.yaml").write_text(text)
    done = paceline("launch", "w.yaml", "--profile", "profile.yaml", cwd=site)
    [job] = set((site / "jobs").glob("*")) - jobs
    return done.returncode, job


@pytest.mark.root
def test_task_runs_in_its_image(site: Path):
    code, job = launch(site, 'echo "$COLOR $(pwd)" > {{output}}/a; test ! -e /etc/passwd; cat {{output}}/a')
    assert code == 0
    assert (job / "t" / "output" / "a").read_text() == f"red {job}/t/work\n"
    assert (job / "t.log").read_text() == f"red {job}/t/work\n"


@pytest.mark.root
def test_exit_code_of_a_container_is_that_of_its_task(site: Path):
    code, job = launch(site, "exit 7")
    assert code == 1
    assert json.loads((job / "result.json").read_text())["tasks"]["t"]["exit_code"] == 7


@pytest.mark.root
def test_container_that_ignores_sigterm_is_removed(site: Path):
    """The first process of a container ignores SIGTERM by default."""
    profile = json.loads((site / "profile.yaml").read_text()) | {"local": {"grace_seconds": 1}}
    (site / "profile.yaml").write_text(json.dumps(profile))
    code, job = launch(site, "sleep 1000", "  timeout: {exec_timeout: 3s}\n")
    assert code == 1
    assert podman("ps", "--all", "--quiet", f"--filter=name={container_name(job / 't')}") == ""


@pytest.mark.root
def test_container_of_a_killed_tool_is_removed(site: Path):
    directory = site / "jobs" / "x" / "t"
    (directory / "work").mkdir(parents=True)
    settings = ContainerSettings.model_validate(json.loads((site / "profile.yaml").read_text())["container"])
    command, _ = wrap(settings, "localhost/paceline-test", ["sh", "-c", "echo ready; sleep 1000"], directory, {})
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        process.kill()
    assert podman("ps", "--quiet", f"--filter=name={container_name(directory)}")
    remove(settings, directory)
    assert podman("ps", "--all", "--quiet", f"--filter=name={container_name(directory)}") == ""
