"""The keys of a workflow file: OSMO's workflow specification, version 2."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)")
_BYTES = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BYTES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*(B|[KMGT]i?)?")
_CODES = re.compile(r"\d{1,3}(-\d{1,3})?(,\s*\d{1,3}(-\d{1,3})?)*")
_LONGEST_SECONDS = 1e9

ACTIONS = ("COMPLETE", "FAIL", "RESCHEDULE")


def _seconds(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(f"({_DURATION.pattern})+", value[:40]):
        return sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(value))
    if isinstance(value, str):
        raise ValueError("must be a number of seconds, or a duration such as 90s, 30m, 1h30m or 2d")
    return value


def _size(value: str) -> str:
    if not _SIZE.fullmatch(value):
        raise ValueError("must be a size such as 512Mi, 64Gi or 1T")
    return value


def _exit_codes(value: str) -> str:
    if not _CODES.fullmatch(value) or any(low > high or high > 255 for low, high in _code_ranges(value)):
        raise ValueError('must be exit codes from 0 to 255, such as "3" or "0-3,7"')
    return value


def _regex(value: str) -> str:
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"must be a regular expression: {error}") from None
    return value


def _code_ranges(codes: str) -> Iterator[tuple[int, int]]:
    for part in codes.split(","):
        low, _, high = part.strip().partition("-")
        yield int(low), int(high or low)


def size_bytes(size: str) -> float:
    """Return the number of bytes of a size such as 64Gi."""
    number, unit = _SIZE.fullmatch(size).groups("")  # pyright: ignore[reportOptionalMemberAccess]
    return float(number) * _BYTES[unit]


Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z]([\w-]{0,98}[A-Za-z0-9])?$")]
Seconds = Annotated[float, BeforeValidator(_seconds), Ge(0), Le(_LONGEST_SECONDS)]
Size = Annotated[str, AfterValidator(_size)]
Regex = Annotated[str, StringConstraints(max_length=1000), AfterValidator(_regex)]


class Spec(BaseModel):
    """Base of all sections: unknown keys are refused, and numbers are accepted for strings."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)


class Dataset(Spec):
    """A dataset of older files."""

    name: str
    path: str = ""
    paths: list[str] = []
    metadata: list[str] = []
    labels: list[str] = []
    regex: Regex = ""
    localpath: str = ""


class Input(Spec):
    """A directory that a task reads: the output of another task, or a copy of a URL or dataset."""

    task: str | None = None
    url: str | None = None
    dataset: Dataset | None = None
    regex: Regex = ""


class Output(Spec):
    """A place to which the output directory of a task is copied when the task completes."""

    url: str | None = None
    dataset: Dataset | None = None
    update_dataset: Dataset | None = None
    regex: Regex = ""


class File(Spec):
    path: Annotated[str, MinLen(1)]
    contents: str | None = None
    localpath: str | None = None
    base64: bool = False


class Checkpoint(Spec):
    path: str
    url: str
    frequency: Seconds
    regex: Regex = ""


class Kpi(Spec):
    index: str
    path: str


class Task(Spec):
    name: Name
    lead: bool = False
    image: str
    command: Annotated[list[str], MinLen(1)]
    args: list[str] = []
    environment: dict[str, str] = {}
    files: list[File] = []
    inputs: list[Input] = []
    outputs: list[Output] = []
    kpis: list[Kpi] = []
    credentials: dict[str, str | dict[str, str]] = {}
    resource: str = "default"
    exitActions: dict[Literal["COMPLETE", "FAIL", "RESCHEDULE"], Annotated[str, AfterValidator(_exit_codes)]] = {}  # noqa: N815
    checkpoint: list[Checkpoint] = []
    volumeMounts: list[str] = []  # noqa: N815
    privileged: bool = False
    hostNetwork: bool = False  # noqa: N815
    downloadType: str | None = None  # noqa: N815
    cacheSize: Size | None = None  # noqa: N815

    def action(self, exit_code: int) -> str:
        """Return what follows when the task has ended: COMPLETE, FAIL or RESCHEDULE."""
        for action, codes in self.exitActions.items():
            if any(low <= exit_code <= high for low, high in _code_ranges(codes)):
                return action
        return "FAIL" if exit_code else "COMPLETE"

    def doubled_exit_code(self) -> int | None:
        """Return an exit code for which two actions are given, or None."""
        codes = [range(low, high + 1) for text in self.exitActions.values() for low, high in _code_ranges(text)]
        seen = set[int]()
        for code in (code for part in codes for code in part):
            if code in seen:
                return code
            seen.add(code)
        return None

    def texts(self) -> Iterator[str]:
        """Yield the strings of the task in which the engine replaces tokens."""
        yield from self.command
        yield from self.args
        yield from self.environment.values()
        yield from (file.contents for file in self.files if file.contents)
        yield from (checkpoint.path for checkpoint in self.checkpoint)
        yield from (place.url for place in (*self.inputs, *self.outputs, *self.checkpoint) if place.url)


class Group(Spec):
    """Tasks that run at the same time."""

    name: Name
    barrier: bool = True
    ignoreNonleadStatus: bool = True  # noqa: N815
    tasks: Annotated[list[Task], MinLen(1)]

    @property
    def lead(self) -> Task:
        return next((task for task in self.tasks if task.lead), self.tasks[0])


class Resource(Spec):
    cpu: Annotated[float, Ge(0), Le(1e6)] | None = None
    gpu: Annotated[int, Ge(0), Le(10**6)] | None = None
    memory: Size | None = None
    storage: Size | None = None
    platform: str | None = None
    nodesExcluded: list[str] = []  # noqa: N815
    topology: list[dict[str, str]] = []


class Timeout(Spec):
    exec_timeout: Seconds | None = None
    queue_timeout: Seconds | None = None


class Workflow(Spec):
    name: Name
    labels: dict[str, str] = {}
    pool: str | None = None
    timeout: Timeout = Timeout()
    resources: dict[str, Resource] = {}
    tasks: Annotated[list[Task], MinLen(1)] | None = None
    groups: Annotated[list[Group], MinLen(1)] | None = Field(default=None)

    @property
    def task_groups(self) -> list[Group]:
        """The groups. A task outside of a group is a group of one task, which has its name."""
        return self.groups or [Group(name=task.name, tasks=[task]) for task in self.tasks or []]

    def resource(self, task: Task) -> Resource:
        return self.resources.get(task.resource, Resource())
