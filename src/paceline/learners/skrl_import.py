"""What both of skrl's adapters need around it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import UserError


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


def check_minibatches(minibatches: int, samples: int) -> None:
    """skrl itself would learn from empty ones, and become NaN."""
    if samples < minibatches:
        raise UserError(
            f"--skrl.mini-batches {minibatches} is more than the {samples} samples of a rank in an iteration: "
            "choose fewer, or more worlds or --skrl.rollouts"
        )
