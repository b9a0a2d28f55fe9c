"""A package with cartpole tasks, one with a camera, that fail on request: the environment variable FAULT says how, on
which rank and when."""

import os
import subprocess
import sys
from pathlib import Path

from tests.signals import DEFAULT_SIGNALS

TASK = '''"""Cartpole that fails once: FAULT=KIND:RANK:STEP:FILE, where FILE is made when it has happened.
Or while it is built: BUILD=KIND:RANK."""

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline.cameras.camera import Camera
from paceline.errors import UserError
from paceline.run import checkpoint_writer
from paceline.env.training_settings import TrainingSettings
from paceline.tasks.cartpole import Cartpole
from paceline.tasks.cartpole_camera import CartpoleCamera
from paceline.tasks.registry import TaskEntry

# Each process calls reward twice before the first step, to check the task.
steps = -2
checkpoint_writer.SHARD_BYTES = int(os.environ.get("SHARD_BYTES", checkpoint_writer.SHARD_BYTES))


@dataclass(frozen=True)
class Faulty(Cartpole):
    def model(self):
        kind, rank = os.environ.get("BUILD", ":").split(":")
        if rank == os.environ.get("RANK", "0"):
            if kind == "refuse":
                raise UserError("no robot file here")
            if kind == "raise":
                raise ArithmeticError("the axle broke")
            print("the model is built", flush=True)
        return super().model()

    def reward(self, state, terminated):
        terms = super().reward(state, terminated)
        global steps
        steps += 1
        if "FAULT" in os.environ:
            kind, rank, step, file = os.environ["FAULT"].split(":")
            if int(rank) == int(os.environ.get("RANK", "0")) and int(step) == steps and not Path(file).exists():
                Path(file).write_text(str(time.time()))
                if kind == "nan":
                    terms["alive"] = terms["alive"] * torch.nan
                elif kind == "raise":
                    raise ArithmeticError("the wheel came off")
                elif kind == "lines":
                    raise ArithmeticError("the wheel\\n  came off:\\n\\n" + 99 * "rust " + "\\nlast line")
                elif kind == "memory":
                    torch.empty(2**60)
                else:
                    os.kill(os.getpid(), getattr(signal, kind))
        return terms


@dataclass(frozen=True)
class FaultyCamera(Faulty, CartpoleCamera):
    camera: Camera = replace(CartpoleCamera().camera, width=24, height=16)


ENTRY = TaskEntry(
    Faulty,
    summary="goes wrong",
    training=TrainingSettings(horizon=8, epochs=2, minibatches=2, hidden_layers=(16,)),
    max_iterations=40,
    cpu_envs=6,
)
layers = dict(image_channels=(4, 8), image_kernels=(4, 3), image_strides=(2, 2), image_features=16)
CAMERA = replace(ENTRY, task=FaultyCamera, training=replace(ENTRY.training, **layers))
'''


def install(site: Path, task: str = TASK) -> Path:
    """Install the package into a directory, as pip does."""
    info = site / "faulty-1.dist-info"
    info.mkdir(parents=True)
    (site / "faulty.py").write_text(task)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[paceline.tasks]\nfaulty = faulty:ENTRY\nfaulty-camera = faulty:CAMERA\n")
    return site


def start(cwd: Path, site: Path, *argv: str, **variables: str) -> subprocess.Popen[str]:
    """Start `paceline ARGV` in a new process group."""
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"} | variables
    return subprocess.Popen(
        [*DEFAULT_SIGNALS, sys.executable, "-m", "paceline", *argv],
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def children(pid: int) -> list[int]:
    """Return the process IDs of a process's children."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


def left_behind(mark: str) -> dict[int, str]:
    """Return the processes whose command line contains `mark`: command lines by process ID."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command_line = file.read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if mark in command_line:
            found[int(file.parent.name)] = command_line
    return found


def process_of_rank(mark: str, index: int) -> int:
    """Return the process ID of a rank, among the processes whose command line contains `mark`."""
    for pid in left_behind(mark):
        if f"RANK={index}" in Path(f"/proc/{pid}/environ").read_text().split("\0"):
            return pid
    raise AssertionError(f"no process of rank {index}")
