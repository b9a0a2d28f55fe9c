"""Run the command of a task in a container of its image, by podman, docker or apptainer."""

import hashlib
import os
import subprocess
from pathlib import Path

from paceline.launch.profile import ContainerSettings

_GPUS = "CUDA_VISIBLE_DEVICES"


def wrap(
    settings: ContainerSettings, image: str, command: list[str], directory: Path, variables: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs a task in a container, and the environment variables of that command.

    `directory` is that of the task; its job's directory is mounted at the same path. Variables are passed by name, so
    that the list of processes does not show their values.
    """
    gpus = [gpu for gpu in variables.get(_GPUS, "").split(",") if gpu]
    if settings.tool == "apptainer":
        return _apptainer(settings, image, command, directory, variables, bool(gpus))
    if gpus:
        # The container has only these GPUs, and numbers them from 0.
        variables = variables | {_GPUS: ",".join(str(index) for index in range(len(gpus)))}
    wrapped = [settings.tool, "run", "--rm", f"--name={container_name(directory)}", "--network=host", "--ipc=host"]
    if settings.tool == "docker":
        wrapped += [f"--user={os.getuid()}:{os.getgid()}"]
        wrapped += [f'--gpus="device={",".join(gpus)}"'] if gpus else []
    else:
        wrapped += [f"--user={os.getuid()}:{os.getgid()}"] if os.getuid() == 0 else ["--userns=keep-id"]
        wrapped += ["--security-opt=label=disable", *(f"--device=nvidia.com/gpu={gpu}" for gpu in gpus)]
    wrapped += [f"--volume={directory.parent}:{directory.parent}", f"--workdir={directory / 'work'}"]
    wrapped += [f"--env={name}" for name in variables]
    return [*wrapped, *settings.options, f"--entrypoint={command[0]}", image, *command[1:]], variables


def _apptainer(
    settings: ContainerSettings, image: str, command: list[str], directory: Path, variables: dict[str, str], gpus: bool
) -> tuple[list[str], dict[str, str]]:
    source = image if "://" in image or Path(image).is_absolute() else f"docker://{image}"
    wrapped = ["apptainer", "exec", "--cleanenv", "--no-home", "--writable-tmpfs", *(["--nv"] if gpus else [])]
    wrapped += [f"--bind={directory.parent}", f"--pwd={directory / 'work'}"]
    return [*wrapped, *settings.options, source, *command], {
        f"APPTAINERENV_{name}": variables[name] for name in variables
    }


def container_name(directory: Path) -> str:
    """Return the name of the container of a task, given the directory of the task."""
    return f"paceline-{hashlib.sha256(str(directory).encode()).hexdigest()[:16]}"


def remove(settings: ContainerSettings, directory: Path) -> None:
    """End and remove the container of a task, if there is one, also if the tool that has started it was killed."""
    if settings.tool != "apptainer":
        at_once = ["--time=0"] if settings.tool == "podman" else []
        command = [settings.tool, "rm", "--force", *at_once, container_name(directory)]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
