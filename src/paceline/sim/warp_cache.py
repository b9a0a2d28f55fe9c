"""The cache of compiled kernels of Warp."""

import os
import sys
import time
from collections.abc import Callable

from paceline.errors import counted


def compiled_modules_counter() -> Callable[[], str]:
    """Return a function that states how many modules of kernels Warp has compiled from now on; empty if none. Warp is
    not imported here."""
    began = time.time()

    def describe() -> str:
        config = getattr(sys.modules.get("warp"), "config", None)
        folder = getattr(config, "kernel_cache_dir", None)
        if not folder or not os.path.isdir(folder):
            return ""
        count = sum(entry.stat().st_mtime >= began for entry in os.scandir(folder))
        return f"{counted(count, 'kernel module')} compiled" if count else ""

    return describe
