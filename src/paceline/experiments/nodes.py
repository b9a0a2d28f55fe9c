"""Run a cell of a grid on the nodes of a launch engine, by the workflow file train_policy.yaml."""

import shlex
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from paceline.errors import UserError
from paceline.launch.engines import ENGINES, load_engine
from paceline.launch.job_record import read_record
from paceline.launch.profile import read_profile

_WORKFLOW = "train_policy.yaml"
_FIRST_PORT = 5555
"""Port of the rendezvous of the first cell. Each cell has its own, because several may run on one host."""
SHARING_ENGINES = tuple(name for name in ENGINES if name not in ("kubernetes", "osmo"))
"""Engines whose nodes can share the run directory with this machine."""
_CONTINUES_AFTER_CTRL_C = "slurm"


@dataclass(frozen=True)
class Nodes:
    """Nodes on which `engine` starts the ranks of a cell. They and this machine must share the run directory."""

    engine: str
    ranks_per_node: int
    profile: Path | None = None
    set_values: tuple[str, ...] = ()
    """Further values of the workflow file, each NAME=VALUE."""

    def check(self, ranks: int) -> None:
        """Raise UserError if a cell with this number of ranks cannot run on these nodes."""
        load_engine(self.engine)
        if self.engine not in SHARING_ENGINES:
            raise UserError(
                f"--on {self.engine}: its nodes do not share the run directory with this machine; choose from "
                f"{', '.join(SHARING_ENGINES)}, or submit scaling.yaml, whose last task makes the report; paceline "
                "launch --copy scaling.yaml writes the file"
            )
        read_profile(self.profile)
        if ranks > self.ranks_per_node and ranks % self.ranks_per_node:
            raise UserError(
                f"--ranks {ranks} with --ranks-per-node {self.ranks_per_node}: all nodes have the same number of "
                f"ranks; use a multiple of {self.ranks_per_node}"
            )

    def command(
        self, train_argv: list[str], run: Path, ranks: int, on_gpus: bool, max_iterations: int, index: int
    ) -> list[str]:
        """Return the arguments of `paceline` that run the cell number `index` and wait for its end."""
        per_node = min(ranks, self.ranks_per_node)
        values = {
            "num_nodes": ranks // per_node,
            "num_gpu": per_node if on_gpus else 0,
            "ranks_per_node": per_node,
            "max_iterations": max_iterations,
            "port": _FIRST_PORT + index,
            "tensorboard_port": 0,
        }
        # The options contain the name of the task.
        strings = {"task": "", "run_dir": run.absolute(), "train_options": shlex.join(train_argv)}
        file = str(resources.files("paceline") / "workflows" / _WORKFLOW)
        profile = ["--profile", str(self.profile)] if self.profile else []
        return [
            *("launch", file, "--on", self.engine, "--follow", *profile),
            *("--set", *(f"{name}={value}" for name, value in values.items()), *self.set_values),
            *("--set-string", *(f"{name}={value}" for name, value in strings.items())),
        ]

    def cancel(self, run: Path) -> None:
        """End the newest job of a cell if it continues after `paceline launch` has ended."""
        if self.engine != _CONTINUES_AFTER_CTRL_C:
            return
        files = read_profile(self.profile).storage_root.absolute().glob("jobs/*/workflow.yaml")
        own = [file for file in files if f'run="{run.absolute()}"' in file.read_text()]
        if own:
            record = read_record(max(own, key=lambda file: file.stat().st_mtime).parent)
            load_engine(record.engine).cancel(record)
