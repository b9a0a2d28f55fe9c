"""Print what a host has, as JSON: `python -m paceline.launch.engines.host_facts STORAGE_ROOT WORKFLOW [--gpus]`."""

import sys
from pathlib import Path

from pydantic import BaseModel

from paceline import __version__
from paceline.launch.engines.resources import Amounts, available, visible_gpus


class HostFacts(BaseModel):
    version: str
    """Version of Paceline."""
    have: Amounts
    gpus: list[str]
    """Values for CUDA_VISIBLE_DEVICES."""
    last_job: int
    """Highest number of a job of the workflow."""


def main() -> None:
    storage_root, workflow = Path(sys.argv[1]), sys.argv[2]
    gpus = visible_gpus() if "--gpus" in sys.argv[3:] else []
    numbers = [path.name.rpartition("-")[2] for path in (storage_root / "jobs").glob(f"{workflow}-*")]
    last_job = max((int(number) for number in numbers if number.isdecimal()), default=0)
    facts = HostFacts(version=__version__, have=available(storage_root, gpus), gpus=gpus, last_job=last_job)
    print(facts.model_dump_json())


if __name__ == "__main__":
    main()
