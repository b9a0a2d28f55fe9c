"""Workflows on a real Slurm, submitted by `paceline launch --on slurm`."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.run import checkpoint
from tests.launch.slurm_cluster import SlurmCluster, slurm_cluster

pytestmark = pytest.mark.root

WORKFLOWS = Path(__file__).parents[2] / "workflows"
SECONDS = 90.0
ITERATIONS = 30
OPTIONS = "train_options=--num-envs 8 --checkpoint-every 10 --timeout 5 --ppo.hidden 16 16 --logger none"
SECRET = "value-of-the-credential"

TASKS = """\
workflow:
  name: tasks
  groups:
  - name: first
    tasks:
    - name: master
      lead: true
      image: image
      command: [bash, -euc]
      args: ["until grep -q again {{output}}/../../worker.log; do sleep 0.1; done; cat given.txt; exit 3"]
      exitActions: {RESCHEDULE: "3"}
      files: [{path: given.txt, localpath: local.txt}]
    - name: worker
      image: image
      command: [bash, -euc]
      args: ['[ "$TOKEN" = value-of-the-credential ]; echo again >{{output}}/log; exit 3']
      exitActions: {RESCHEDULE: "3"}
      credentials: {storage: {TOKEN: token}}
  - name: second
    tasks:
    - {name: after, image: image, command: ["true"], inputs: [{task: master}]}
"""
"""The first time"""


@dataclass(frozen=True)
class Launch:
    """A launch in a folder of its own, whose command runs where slurmctld runs."""

    cluster: SlurmCluster
    folder: Path
    process: subprocess.Popen[bytes]

    def wait(self) -> int:
        return self.process.wait(SECONDS)
