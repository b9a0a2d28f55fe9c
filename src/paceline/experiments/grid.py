"""A scaling experiment: the cells of a grid and the file grid.json.

Each combination of a number of ranks and a seed is a cell, an ordinary run in the directory of the grid. A horizontal
grid has the same number of envs on every rank; a vertical grid distributes the same total over the ranks.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.errors import UserError, counted, one_line
from paceline.experiments.nodes import Nodes
from paceline.run.config import changes
from paceline.run.directory import RunDir, write_atomically
from paceline.validation import parse_json, read_text

GRID_FILE = "grid.json"


@dataclass(frozen=True)
class Cell:
    """A run of a grid."""

    ranks: int
    seed: int

    @property
    def name(self) -> str:
        return f"ranks_{self.ranks}_seed_{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A scaling experiment."""

    kind: Literal["horizontal", "vertical"]
    task: str
    ranks: tuple[int, ...]
    seeds: tuple[int, ...]
    envs: int
    """Number of envs per rank of a horizontal grid, in total of a vertical grid."""
    max_iterations: int
    train_argv: tuple[str, ...]
    """Arguments of `paceline train` that all cells share, with the name of the task."""
    settings: dict[str, Any] = field(default_factory=dict)
    """All settings of the training that the cells share, by name."""
    emulate_ranks: bool = False
    """Run a cell with k ranks as one rank with k times the envs."""
    gpu_ids: tuple[int, ...] = ()
    """GPUs of this machine, one rank each."""
    on_gpus: bool = False
    nodes: Nodes | None = None
    """Nodes of a launch engine; None runs all cells on this machine."""
    jobs: int = 1
    """Maximum number of cells that run at the same time."""

    @property
    def cells(self) -> list[Cell]:
        """All cells. Every number of ranks comes once before the second seed, so that an incomplete grid can be
        compared."""
        return [Cell(ranks, seed) for seed in self.seeds for ranks in self.ranks]

    def total_envs(self, cell: Cell) -> int:
        return self.envs * cell.ranks if self.kind == "horizontal" else self.envs

    def label(self, cell: Cell) -> str:
        """Return the name of all cells with the same number of ranks."""
        return counted(cell.ranks, "rank") + " (emulated)" * (self.emulate_ranks and cell.ranks > 1)

    def processes(self, cell: Cell) -> int:
        """Return the number of ranks with which a cell is run."""
        return 1 if self.emulate_ranks else cell.ranks

    def check_ranks(self) -> None:
        """Raise UserError if the nodes or the GPUs of this machine do not have the ranks of a cell."""
        for ranks in map(self.processes, self.cells):
            if self.nodes:
                self.nodes.check(ranks)
            elif self.on_gpus and ranks > len(self.gpu_ids):
                emulate = ", --emulate-ranks to see the learning curves" if self.kind == "horizontal" else ""
                raise UserError(
                    f"--ranks {ranks} on {counted(len(self.gpu_ids), 'GPU')}: each rank needs one; use fewer ranks, "
                    f"several nodes (--on slurm){emulate}, --gpu-ids none for ranks on the CPU, or name a GPU "
                    "several times to share it"
                )

    def cell_argv(self, cell: Cell) -> list[str]:
        """Return the arguments of `paceline train` without those about the run directory and the devices."""
        envs = ["--total-envs", self.envs] if self.kind == "vertical" else ["--num-envs", self.envs]
        if self.emulate_ranks:
            envs = ["--num-envs", self.total_envs(cell)]
        return [*self.train_argv, *map(str, envs), "--seed", str(cell.seed)]

    def command(self, cell: Cell, run: Path, gpu_ids: tuple[int, ...]) -> list[str]:
        """Return the arguments of `paceline` that train a cell, or continue it."""
        argv, ranks = self.cell_argv(cell), self.processes(cell)
        if self.nodes:
            index = self.cells.index(cell)
            return self.nodes.command(argv, run, ranks, self.on_gpus, self.max_iterations, index)
        devices = ["--gpu-ids", *map(str, gpu_ids)] if self.on_gpus else ["--gpu-ids", "none", "--ranks", str(ranks)]
        return ["train", *argv, "--run-dir", str(run), *devices]

    def to_dict(self) -> dict[str, Any]:
        """Return the content of grid.json."""
        return {
            "kind": self.kind,
            "task": self.task,
            "num_envs" if self.kind == "horizontal" else "total_envs": self.envs,
            "emulated": self.emulate_ranks,
            "device": "gpu" if self.on_gpus else "cpu",
            "on": self.nodes.engine if self.nodes else None,
            "ranks_per_node": self.nodes.ranks_per_node if self.nodes else None,
            "jobs": self.jobs,
            "settings": self.settings,
            "cells": [
                {"run": cell.name, "ranks": cell.ranks, "seed": cell.seed, "total_envs": self.total_envs(cell)}
                for cell in self.cells
            ],
        }

    def notes(self, most_jobs: int) -> list[str]:
        """Return what a reader of the results must know. `most_jobs` is the largest `jobs` of all sessions."""
        if most_jobs == 1 or (self.nodes and self.nodes.engine == "slurm"):
            return []
        return [f"Up to {most_jobs} runs shared the machine, so throughput and wall time are not comparable."]


def open_grid(grid: Grid, directory: Path) -> int:
    """Write grid.json. If the directory holds it, compare the experiments: the new one may have more cells, and any
    other difference raises UserError. Return the largest `jobs` of all sessions."""
    file, most_jobs = directory / GRID_FILE, grid.jobs
    if file.exists():
        stored = _read(file)
        if found := _difference(stored, grid.to_dict()):
            raise UserError(
                f"{directory} holds another experiment ({found}): choose another --run-dir, or give the same options"
            )
        most_jobs = max(most_jobs, stored.get("jobs", 1))
    elif directory.is_dir() and any(directory.iterdir()):
        raise UserError(f"{directory} is not empty and holds no {GRID_FILE}: choose another --run-dir")
    for cell in grid.cells:
        if RunDir(directory / cell.name).is_held():
            raise UserError(f"{directory / cell.name} is being trained by another process: wait for it, or stop it")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(grid.to_dict() | {"jobs": most_jobs}, indent=2).encode() + b"\n")
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error.strerror}; choose another --run-dir") from None
    return most_jobs


def _read(file: Path) -> dict[str, Any]:
    try:
        return parse_json(read_text(file))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}: {one_line(error)}; choose another --run-dir") from None


def _difference(stored: dict[str, Any], given: dict[str, Any]) -> str:
    """Return the first difference between two experiments, or "" if the given one is the stored one, with all of its
    cells and maybe more."""

    def flat(grid: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in grid.items() if name not in ("jobs", "cells", "settings")} | {
            f"--{name.replace('_', '-')}": value for name, value in grid.get("settings", {}).items()
        }

    if differing := changes(flat(stored), flat(given)):
        return differing[0]
    missing = [cell["run"] for cell in stored.get("cells", []) if cell not in given["cells"]]
    return f"it has {missing[0]}, which --ranks and --seeds leave out" if missing else ""
