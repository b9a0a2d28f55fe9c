"""The keys of a workflow file: OSMO's workflow specification, version 2."""

import re
import warnings
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, StringConstraints

from paceline.validation import shown

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"([0-9]{1,12})(us|ms|s|m|h|d)")
_ISO_DURATION = re.compile(r"P(?:([0-9]+)D)?(?:T(?:([0-9]+)H)?(?:([0-9]+)M)?(?:([0-9]+(?:\.[0-9]+)?)S)?)?")
_BYTES = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BYTES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)(B|[KMGT](?:iB?)?)?")
_CODES = re.compile(r"[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*")
_LABEL = r"[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?"
_DNS_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_LABEL_KEY = re.compile(rf"({_DNS_LABEL}(\.{_DNS_LABEL})*/)?{_LABEL}", re.ASCII)
_LABEL_VALUE = re.compile(_LABEL, re.ASCII)
_NAME = r"[A-Za-z]([A-Za-z0-9_-]{0,98}[A-Za-z0-9])?"
_LONGEST_SECONDS, _MOST_LABELS = 1e9, 16


def _seconds(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if found := _DURATION.fullmatch(value):
        return float(found[1]) * _UNITS[found[2]]
    if (found := _ISO_DURATION.fullmatch(value[:40])) and any(found.groups()):
        return sum(float(number) * _UNITS[unit] for number, unit in zip(found.groups("0"), "dhms", strict=True))
    raise ValueError("must be a number of seconds, or a duration such as 90s, 30m, 12h or 2d")


def _size(value: str) -> str:
    if not _SIZE.fullmatch(value):
        raise ValueError("must be a size such as 512Mi, 64Gi or 1T")
    return value


def _exit_codes(value: str) -> str:
    if not _CODES.fullmatch(value) or any(low > high for low, high in _code_ranges(value)):
        raise ValueError('must be exit codes such as "3" or "0-3,7"')
    return value


def _upper_keys(value: Any) -> Any:
    """Return the mapping of exit actions with names in capitals, because OSMO ignores case."""
    return {str(name).upper(): codes for name, codes in value.items()} if isinstance(value, dict) else value


def _scalars_as_text(value: Any) -> Any:
    """Return a mapping with true and false as text, as OSMO does; numbers become text by the type of the field."""
    if isinstance(value, dict):
        return {key: _scalars_as_text(item) for key, item in value.items()}
    return str(value) if isinstance(value, bool) else value


def _cache_size(value: str) -> str:
    return value if re.fullmatch(r"[0-9]{1,2}%|100%", value) else _size(value)


def _labels(value: dict[str, str]) -> dict[str, str]:
    if len(value) > _MOST_LABELS:
        raise ValueError(f"must have at most {_MOST_LABELS} labels")
    for key, item in value.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(item):
            raise ValueError(f"must have names and values of Kubernetes labels, which {shown(f'{key}: {item}')} is not")
    return value


def _dataset(value: Any) -> Any:
    """Return the mapping of a dataset that is given by its name alone."""
    return {"name": value} if isinstance(value, str) else value


def _regex(value: str) -> str:
    try:
        with warnings.catch_warnings(action="ignore"):
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


Name = Annotated[str, StringConstraints(pattern=f"^{_NAME}$")]
TaskName = Annotated[str, StringConstraints(pattern=f"^{_NAME}(:{_NAME})?$")]
"""Name of a task, or WORKFLOW_ID:TASK for a task of an earlier job."""
Seconds = Annotated[float, BeforeValidator(_seconds), Ge(0), Le(_LONGEST_SECONDS)]
Size = Annotated[str, AfterValidator(_size)]
Regex = Annotated[str, StringConstraints(max_length=1000), AfterValidator(_regex)]
ExitCodes = Annotated[str, StringConstraints(max_length=1000), AfterValidator(_exit_codes)]
Action = Literal["COMPLETE", "FAIL", "RESCHEDULE"]


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


DatasetByName = Annotated[Dataset, BeforeValidator(_dataset)]


class Input(Spec):
    """A directory that a task reads: the output of another task, or a copy of a URL or dataset."""

    task: TaskName | None = None
    url: str | None = None
    dataset: DatasetByName | None = None
    regex: Regex = ""

    @property
    def name(self) -> str:
        """Name of the task in {{input:NAME}}, or an empty string."""
        return (self.task or "").rpartition(":")[2]

    @property
    def is_earlier(self) -> bool:
        """Return whether the input is the output of a task of an earlier job."""
        return ":" in (self.task or "")

    def source(self, workflow_id: str) -> PurePosixPath:
        """Return the path of the output of the task, relative to the directory jobs/."""
        return PurePosixPath((self.task or "").rpartition(":")[0] or workflow_id) / self.name / "output"


class Output(Spec):
    """A place to which the output directory of a task is copied when the task completes."""

    url: str | None = None
    dataset: DatasetByName | None = None
    update_dataset: DatasetByName | None = None
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
    environment: Annotated[dict[str, str], BeforeValidator(_scalars_as_text)] = {}
    files: list[File] = []
    inputs: list[Input] = []
    outputs: list[Output] = []
    kpis: list[Kpi] = []
    credentials: Annotated[dict[str, str | dict[str, str]], BeforeValidator(_scalars_as_text)] = {}
    resource: str = "default"
    exitActions: Annotated[dict[Action, ExitCodes], BeforeValidator(_upper_keys)] = {}  # noqa: N815
    checkpoint: list[Checkpoint] = []
    volumeMounts: list[str] = []  # noqa: N815
    privileged: bool = False
    hostNetwork: bool = False  # noqa: N815
    downloadType: str | None = None  # noqa: N815
    cacheSize: Annotated[str, AfterValidator(_cache_size)] | None = None  # noqa: N815

    def action(self, exit_code: int) -> str:
        """Return what follows when the task has ended: COMPLETE, FAIL or RESCHEDULE."""
        for action, codes in self.exitActions.items():
            if any(low <= exit_code <= high for low, high in _code_ranges(codes)):
                return action
        return "FAIL" if exit_code else "COMPLETE"

    def doubled_exit_code(self) -> int | None:
        """Return an exit code for which two actions are given, or None."""
        seen = set[int]()
        for text in self.exitActions.values():
            codes = {code for low, high in _code_ranges(text) for code in range(low, high + 1)}
            if codes & seen:
                return min(codes & seen)
            seen |= codes
        return None

    def texts(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Yield the strings of the task in which the engine replaces tokens, each with its location in the task."""
        yield from ((("command", index), text) for index, text in enumerate(self.command))
        yield from ((("args", index), text) for index, text in enumerate(self.args))
        yield from ((("environment", name), text) for name, text in self.environment.items())
        yield from ((("files", index, "contents"), file.contents or "") for index, file in enumerate(self.files))
        for key in ("inputs", "outputs", "checkpoint"):
            yield from (((key, index, "url"), place.url or "") for index, place in enumerate(getattr(self, key)))
        yield from ((("checkpoint", index, "path"), place.path) for index, place in enumerate(self.checkpoint))


class Group(Spec):
    """Tasks that run at the same time."""

    name: Name
    barrier: bool = True
    ignoreNonleadStatus: bool = True  # noqa: N815
    tasks: Annotated[list[Task], MinLen(1)]

    @property
    def lead(self) -> Task:
        return next((task for task in self.tasks if task.lead), self.tasks[0])


class Topology(Spec):
    """Tasks that must or should run close to each other."""

    key: str
    group: str = "default"
    requirementType: Literal["required", "preferred"] = "required"  # noqa: N815


class Resource(Spec):
    cpu: Annotated[float, Ge(0), Le(1e6)] | None = None
    gpu: Annotated[int, Ge(0), Le(10**6)] | None = None
    memory: Size | None = None
    storage: Size | None = None
    platform: str | None = None
    nodesExcluded: list[str] = []  # noqa: N815
    topology: list[Topology] = []


class Timeout(Spec):
    exec_timeout: Seconds | None = None
    queue_timeout: Seconds | None = None


class Workflow(Spec):
    name: Name
    labels: Annotated[dict[str, str], AfterValidator(_labels)] = {}
    pool: str | None = None
    timeout: Timeout = Timeout()
    resources: dict[str, Resource] = {}
    tasks: list[Task] = []
    groups: list[Group] = []

    @property
    def task_groups(self) -> list[Group]:
        """The groups. A task outside of a group is a group of one task, which has its name."""
        return self.groups or [Group(name=task.name, tasks=[task]) for task in self.tasks]

    def resource(self, task: Task) -> Resource:
        return self.resources.get(task.resource, Resource())
