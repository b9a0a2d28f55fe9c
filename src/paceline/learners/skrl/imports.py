"""What both of skrl's adapters need around it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_launcher() -> Iterator[None]:
    """Inside, a launcher's variables are not set: skrl joins processes as soon as it is imported, torch's over nccl
    alone and JAX's in a runtime of their own."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "JAX_RANK", "JAX_LOCAL_RANK", "JAX_WORLD_SIZE")
    found = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(found)
