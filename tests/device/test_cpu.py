"""Cores and memory that a process may use, on the host and in a container."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

from paceline.device.cpu import cores_of_new_processes, free_host_bytes

MIB = 2**20


def write_cgroup(folder: Path, limit: str, used: int, inactive_file: int) -> Path:
    """Write the files of a control group of version 2."""
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    # The file has about 60 lines; those of active pages and of anonymous memory are not reclaimable.
    stat = {"anon": used - inactive_file, "file": inactive_file, "inactive_file": inactive_file, "active_file": 0}
    (folder / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))
    return folder


def test_used_memory_is_not_free_in_a_container(tmp_path: Path) -> None:
    assert free_host_bytes(write_cgroup(tmp_path, str(8 * MIB), 5 * MIB, 0)) == 3 * MIB


def test_inactive_pages_of_files_are_free(tmp_path: Path) -> None:
    assert free_host_bytes(write_cgroup(tmp_path, str(8 * MIB), 7 * MIB, 4 * MIB)) == 5 * MIB


def test_a_container_beyond_its_limit_has_no_free_memory(tmp_path: Path) -> None:
    # A limit that is lowered below the used memory takes effect later.
    assert free_host_bytes(write_cgroup(tmp_path, str(4 * MIB), 5 * MIB, 0)) == 0


def test_the_memory_of_the_host_is_an_upper_bound(tmp_path: Path) -> None:
    total = psutil.virtual_memory().total
    assert 0 < free_host_bytes(write_cgroup(tmp_path, str(4 * total), 0, 0)) <= total


def test_without_a_limit_the_memory_of_the_host_is_free(tmp_path: Path) -> None:
    lowest = psutil.virtual_memory().available // 2
    assert free_host_bytes(write_cgroup(tmp_path, "max", 7 * MIB, 0)) > lowest
    assert free_host_bytes(tmp_path / "none") > lowest


def test_a_new_process_has_the_given_cores_and_this_one_keeps_its_own() -> None:
    def cores_of_child() -> str:
        script = "import os; print(sorted(os.sched_getaffinity(0)))"
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip()

    own = os.sched_getaffinity(0)
    with cores_of_new_processes(1):
        assert cores_of_child() == str(sorted(own)[:1])
    assert os.sched_getaffinity(0) == own
    with cores_of_new_processes(0):
        assert cores_of_child() == str(sorted(own))
