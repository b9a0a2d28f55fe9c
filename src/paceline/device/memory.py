"""Free memory of the host."""

from pathlib import Path

import psutil


def free_host_bytes() -> int:
    """Return the available memory of the host, or the memory limit of the container if that is lower."""
    available = psutil.virtual_memory().available
    try:
        return min(available, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return available
