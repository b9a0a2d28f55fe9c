"""Environment variables by which a launcher, such as torch.distributed.run, describes the ranks of a run.

No other module reads RANK and WORLD_SIZE. This module imports little, because the entry point uses it before it loads
torch.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from paceline.errors import UserError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The variables of skrl's launcher for JAX. It does not set the number of ranks per host.
_JAX_VARIABLES = {
    name: f"JAX_{name.replace('MASTER', 'COORDINATOR')}" for name in _VARIABLES if name != "LOCAL_WORLD_SIZE"
}
WATCH_THREAD = "watch"
"""Name of the thread in which a rank watches the others."""
_REMEDY = "start the ranks with a launcher, or unset its variables to train with a single rank"


def under_launcher() -> bool:
    """Return whether a launcher started this process as a rank of a run."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def under_elastic_agent() -> bool:
    """Return whether torch's elastic launcher started this process. It restarts workers that end with an error."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def adopt_jax_launcher() -> None:
    """Copy the variables of skrl's launcher for JAX to those of torch's."""
    if "RANK" in os.environ or "JAX_RANK" not in os.environ:
        return
    if missing := [name for name in _JAX_VARIABLES.values() if name not in os.environ]:
        raise UserError(
            f"JAX_RANK is set, but not {' '.join(missing)}: start the ranks with python -m skrl.utils.distributed.jax, "
            "or unset it to train with a single rank"
        )
    os.environ.update({name: os.environ[jax_name] for name, jax_name in _JAX_VARIABLES.items()})


def variables_without_launcher(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables without those of a launcher."""
    names = {*_VARIABLES, *_JAX_VARIABLES.values()}
    return {
        name: value for name, value in variables.items() if name not in names and not name.startswith("TORCHELASTIC_")
    }


@contextmanager
def without_launcher() -> Iterator[None]:
    """Hide the launcher inside the context, for libraries that would initialize distributed training: skrl does so when
    it is imported, with nccl only."""
    own = variables_without_launcher(os.environ)
    found = {name: os.environ.pop(name) for name in set(os.environ) - set(own)}
    try:
        yield
    finally:
        os.environ.update(found)


def is_first_rank() -> bool:
    """Return whether this process is the main rank, or the only one. Invalid variables are not detected."""
    return os.environ.get("RANK", "0") == "0"


def read_ranks() -> tuple[int, int, int, int]:
    """Return the index of this rank and the number of ranks, of the run and then of this host."""
    if "LOCAL_RANK" not in os.environ:
        raise UserError(
            "RANK and WORLD_SIZE are set, but not LOCAL_RANK: if they count nodes, start the ranks with "
            "python -m torch.distributed.run --nnodes=$WORLD_SIZE --node_rank=$RANK --nproc_per_node=$NPROC_PER_NODE "
            "--master_addr=$MASTER_ADDR --master_port=$MASTER_PORT -m paceline train ...; "
            "or unset them to train with a single rank"
        )
    index, world_size = _index_and_size("RANK", "WORLD_SIZE")
    local, local_size = _index_and_size("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if local_size > world_size:
        hosted = f"{local_size} ranks on this host (LOCAL_RANK, LOCAL_WORLD_SIZE)"
        raise UserError(f"{hosted} but WORLD_SIZE is {world_size}: {_REMEDY}")
    return index, world_size, local, local_size


def main_address() -> tuple[str, int]:
    """Return host and port of the main rank."""
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise UserError(f"{' and '.join(missing)} not set, but RANK and WORLD_SIZE are: {_REMEDY}")
    return os.environ["MASTER_ADDR"], _number("MASTER_PORT", 1, 2**16 - 1)


def _index_and_size(index_name: str, size_name: str) -> tuple[int, int]:
    """Return the values of two variables. If the size is not set, it is index + 1."""
    index = _number(index_name)
    size = _number(size_name) if size_name in os.environ else index + 1
    if index >= size:
        raise UserError(
            f"the environment variable {index_name} is {index}, but {size_name} is {size}: a launcher counts ranks "
            f"from 0 to {size_name} - 1; {_REMEDY}"
        )
    return index, size


def _number(name: str, least: int = 0, most: int = 2**20) -> int:
    value = os.environ[name]
    # The length is checked first, because int() fails for thousands of digits.
    if value.isdecimal() and len(value) <= len(str(most)) and least <= int(value) <= most:
        return int(value)
    raise UserError(
        f"the environment variable {name} is {value[:80]!r}: a launcher sets it to a number from {least} to {most}"
    )
