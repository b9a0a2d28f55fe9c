"""Read a workflow file: split it into sections, render its template and check what it says.

Every error names the file, the line and a remedy.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from paceline.errors import UserError, one_line, unknown
from paceline.launch import template
from paceline.launch.document import Document, LineError, Location
from paceline.launch.spec import Group, Task, Workflow
from paceline.validation import read_text, shown

_SECTIONS = ("version", "workflow", "default-values")
_URL_WITH_PASSWORD = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/@:]*:[^\s/@$]+@", re.IGNORECASE)
_SECTION = re.compile(r"""^(["']?)([A-Za-z_][\w-]*)\1[ \t]*:(?=[ \t\r\n]|$)""")


@dataclass(frozen=True)
class WorkflowFile:
    path: Path
    workflow: Workflow
    text: str
    """The file with the rendered `workflow` section."""
    set_values: tuple[str, ...] = ()
    """Values of `--set`, each NAME=VALUE."""
    set_strings: tuple[str, ...] = ()
    """Values of `--set-string`, each NAME=VALUE."""
    unresolved: tuple[str, ...] = ()
    """Messages about tokens that name no task of the group and no input. OSMO keeps their text."""


def read_workflow(path: Path, set_values: Iterable[str] = (), set_strings: Iterable[str] = ()) -> WorkflowFile:
    """Read a workflow file. `set_values` and `set_strings` hold NAME=VALUE; the former become int, float or string."""
    try:
        text = read_text(path)
    except OSError as error:
        raise UserError(f"cannot read the workflow file {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is not a workflow file: {one_line(error)}") from None
    return parse_workflow(text, path, set_values, set_strings)


def parse_workflow(
    text: str, path: Path, set_values: Iterable[str] = (), set_strings: Iterable[str] = ()
) -> WorkflowFile:
    """Parse the text of a workflow file; `path` names it in errors."""
    set_values, set_strings = tuple(set_values), tuple(set_strings)
    if found := template.RESERVED.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise UserError(f"{path}:{line}: the character {shown(found[0])} is reserved; remove it")
    sections = _sections(text, path)
    _check_version(sections, path)
    values = _default_values(sections, path)
    given = _given("--set", set_values) | _given("--set-string", set_strings)
    first_line, section = sections["workflow"]
    for name in given:
        if name not in values and not re.search(rf"\b{name}\b", section):
            raise UserError(f"--set {name}: {path}: {unknown('variable', name, values)}")
    rendered = template.render(section, values | given, str(path), first_line)

    def place(line: int) -> str:
        return f"{path}:{rendered.lines[min(line, len(rendered.lines)) - 1]}"

    try:
        document = Document(rendered.text)
        workflow = document.validate(Workflow, ("workflow",), _restore)
        for location, message in _problems(workflow):
            raise document.error(("workflow", *location), message)
    except LineError as error:
        raise UserError(f"{place(error.line)}: {error}") from None
    lines = template.restore(rendered.text).split("\n")
    unresolved = list[str]()
    for location, token, message in _unresolved_tokens(workflow):
        start = document.error(("workflow", *location), message).line
        line = next((number for number, text in enumerate(lines[start - 1 :], start) if token in text), start)
        unresolved.append(f"{place(line)}: {message}")
    text = "version: 2\n" + "\n".join(lines)
    return WorkflowFile(path, workflow, text, set_values, set_strings, tuple(unresolved))


def _sections(text: str, path: Path) -> dict[str, tuple[int, str]]:
    """Return the first line and the text of each section. The file is no YAML before its template is rendered."""
    sections, name = dict[str, tuple[int, list[str]]](), ""
    for number, line in enumerate(re.findall(r"[^\n]*\n|[^\n]+", text), 1):
        if found := _SECTION.match(line):
            name = found[2]
            if name not in _SECTIONS:
                raise UserError(f"{path}:{number}: {unknown('section', name, _SECTIONS)}")
            if name in sections:
                raise UserError(f"{path}:{number}: the section {name} occurs twice; remove one")
            sections[name] = (number, [line])
        elif name:
            sections[name][1].append(line)
        elif line.strip() and not line.startswith(("#", "---")):
            raise UserError(f"{path}:{number}: {shown(line.strip())} is outside of the sections {', '.join(_SECTIONS)}")
    if "workflow" not in sections:
        raise UserError(f"{path}: no section workflow; a workflow file has a line that begins with workflow:")
    return {name: (number, "".join(lines)) for name, (number, lines) in sections.items()}


def _plain_section(
    sections: dict[str, tuple[int, str]], name: str, path: Path
) -> tuple[Any, Callable[[Location, str], UserError]]:
    """Return the values of a section that is no template, and a function that makes an error at a location of it."""
    first_line, text = sections[name]

    def located(error: LineError) -> UserError:
        return UserError(f"{path}:{first_line + error.line - 1}: {error}")

    try:
        document = Document(text)
        values = document.values()[name]
    except LineError as error:
        raise located(error) from None
    return values, lambda location, message: located(document.error((name, *location), message))


def _check_version(sections: dict[str, tuple[int, str]], path: Path) -> None:
    if "version" not in sections:
        return
    version, error = _plain_section(sections, "version", path)
    if version not in (2, "2") or isinstance(version, bool):
        raise error((), f"version {shown(version)} is not supported; write version: 2")


def _default_values(sections: dict[str, tuple[int, str]], path: Path) -> dict[str, Any]:
    if "default-values" not in sections:
        return {}
    values, error = _plain_section(sections, "default-values", path)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise error((), f"default-values {shown(values)} must be a mapping of names and values")
    for name in values:
        if not isinstance(name, str) or not name.isidentifier():
            near = re.sub(r"\W", "_", name) if isinstance(name, str) else ""
            hint = f", for example {near}" if near.isidentifier() else ""
            raise error((name,), f"the name {shown(name)} of a default value must have letters, digits and _{hint}")

    def plain(value: Any, location: Location) -> Any:
        if isinstance(value, dict):
            return {plain(key, location): plain(item, (*location, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [plain(item, (*location, index)) for index, item in enumerate(value)]
        if isinstance(value, date):
            return str(value)
        if not isinstance(value, (str, int, float, type(None))):
            raise error(location, f"the value {shown(value)} must be a number, a string, a list or a mapping")
        return value

    return plain(values, ())


def _given(option: str, arguments: Iterable[str]) -> dict[str, Any]:
    values = dict[str, Any]()
    for argument in arguments:
        name, separator, value = argument.partition("=")
        if not separator or not name.isidentifier():
            raise UserError(f"{option} {shown(argument)} must be NAME=VALUE, for example num_gpu=4")
        if found := template.RESERVED.search(value):
            raise UserError(f"{option} {name}: the character {shown(found[0])} is reserved; remove it")
        if _URL_WITH_PASSWORD.search(value):
            # The error does not repeat the value, which holds a secret.
            raise UserError(
                f"{option} {name}: a URL contains credentials, which would be stored with the job: leave them out, and "
                "give them in environment variables or in the credentials of the task"
            )
        values[name] = _number(value) if option == "--set" else value
    return values


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _restore(value: Any) -> Any:
    if isinstance(value, str):
        return template.restore(value)
    if isinstance(value, dict):
        return {_restore(key): _restore(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_restore(item) for item in value]
    return value


def _problems(workflow: Workflow) -> Iterator[tuple[Location, str]]:
    """Yield what is wrong with a workflow whose keys and types are right."""
    if bool(workflow.tasks) == bool(workflow.groups):
        has = "both tasks and groups" if workflow.tasks else "neither tasks nor groups"
        yield ("tasks",), f"the workflow has {has}; give tasks, or groups with tasks in each"
        return
    groups, grouped = workflow.task_groups, bool(workflow.groups)
    group_of = {task.name: group for group in groups for task in group.tasks}
    users = dict[str, str]()
    for index, group in enumerate(groups):
        place: Location = ("groups", index) if grouped else ()
        if grouped:
            yield from _repeated((*place, "name"), f"group {group.name}", users)
        leads = [task.name for task in group.tasks if task.lead]
        if len(group.tasks) > 1 and len(leads) != 1:
            found = f"the leads {', '.join(leads[:10])}" if leads else "no lead"
            second = [number for number, task in enumerate(group.tasks) if task.lead][1:2]
            at = (*place, "tasks", *second, "lead") if second else place
            yield at, f"the group {group.name} has {found}; set lead: true in exactly one of its tasks"
        for number, task in enumerate(group.tasks):
            at = (*place, "tasks", number if grouped else index)
            yield from _repeated((*at, "name"), f"task {task.name}", users)
            for location, message in _task_problems(task, workflow, group_of):
                yield (*at, *location), f"task {task.name}: {message}"
    yield from _cycles(groups, group_of, grouped)


def _repeated(location: Location, user: str, users: dict[str, str]) -> Iterator[tuple[Location, str]]:
    """Yield an error if a name is used twice. Tasks and groups share their names, "-" is "_", and case is ignored."""
    kind, _, name = user.partition(" ")
    other = users.setdefault(name.lower().replace("_", "-"), user)
    if other == user and other is not user:
        yield location, f"two {kind}s have the name {name}; names of groups and tasks must be unique"
    elif other is not user:
        same = "" if other.endswith(f" {name}") else ' (case is ignored, and "_" is the same as "-")'
        yield location, f"the {other} and the {user} have the same name{same}; names must be unique"


def _task_problems(task: Task, workflow: Workflow, group_of: dict[str, Group]) -> Iterator[tuple[Location, str]]:
    group = group_of[task.name]
    if task.resource not in workflow.resources and (workflow.resources or task.resource != "default"):
        if "resource" in task.model_fields_set:
            yield ("resource",), str(unknown("resource", task.resource, workflow.resources))
        else:
            names = ", ".join(workflow.resources)
            yield (), f"resources has no default; add it, or set resource to one of {names}"
    if (code := task.doubled_exit_code()) is not None:
        yield ("exitActions",), f"exit code {code} has two actions; give each code to one action"
    paths = set[str]()
    for index, file in enumerate(task.files):
        if (file.contents is None) == (file.localpath is None):
            yield ("files", index), f"the file {shown(file.path)} needs either contents or localpath"
        if file.path in paths:
            yield ("files", index, "path"), f"two files have the path {shown(file.path)}; paths must be unique"
        paths.add(file.path)
    for index, given in enumerate(task.inputs):
        if len({"task", "url", "dataset"} & given.model_fields_set) != 1:
            yield ("inputs", index), "an input needs exactly one of task, url and dataset"
        elif given.task is None or given.is_earlier:
            continue
        elif given.task not in group_of:
            yield ("inputs", index, "task"), str(unknown("task", given.task, group_of))
        elif group_of[given.task] is group:
            message = f"the input {given.task} runs at the same time, in the same group; move it to another group"
            yield ("inputs", index, "task"), message if given.task != task.name else "a task cannot be its own input"
    for index, output in enumerate(task.outputs):
        if len({"url", "dataset", "update_dataset"} & output.model_fields_set) != 1:
            yield ("outputs", index), "an output needs exactly one of url, dataset and update_dataset"


def _unresolved_tokens(workflow: Workflow) -> Iterator[tuple[Location, str, str]]:
    """Yield the location, the text and a message for each token that has no value."""
    for index, group in enumerate(workflow.task_groups):
        hosts = [task.name for task in group.tasks]
        for number, task in enumerate(group.tasks):
            at: Location = ("groups", index, "tasks", number) if workflow.groups else ("tasks", index)
            inputs = [*map(str, range(len(task.inputs))), *(given.name for given in task.inputs if given.name)]
            for location, text in task.texts():
                for token in template.TOKEN.finditer(text):
                    kind, _, name = token[1].partition(":")
                    problem = ""
                    if kind == "host" and name not in hosts:
                        problem = str(unknown("task of the same group", name, hosts))
                    if kind == "input" and name not in inputs:
                        known = f"its inputs are {', '.join(inputs)}" if inputs else "it has no inputs"
                        problem = f"the task has no such input; {known}"
                    if problem:
                        yield (*at, *location), token[0], f"task {task.name}: {token[0]}: {problem}"


def _cycles(groups: list[Group], group_of: dict[str, Group], grouped: bool) -> Iterator[tuple[Location, str]]:
    """Yield the groups that wait for each other."""
    needs = {group.name: upstream(group, group_of) for group in groups}
    while ready := {name for name, names in needs.items() if not names & needs.keys()}:
        needs = {name: names for name, names in needs.items() if name not in ready}
    if needs:
        index = next(index for index, group in enumerate(groups) if group.name in needs)
        kind = "groups" if grouped else "tasks"
        message = f"the {kind} {', '.join(needs)} wait for each other's output; remove one of their inputs"
        yield ("groups" if grouped else "tasks", index), message


def group_by_task(workflow: Workflow) -> dict[str, Group]:
    """Return the group of each task, by the name of the task."""
    return {task.name: group for group in workflow.task_groups for task in group.tasks}


def upstream(group: Group, group_of: dict[str, Group]) -> set[str]:
    """Return the names of the groups whose outputs are inputs of a group."""
    inputs = (given for task in group.tasks for given in task.inputs)
    return {group_of[given.task].name for given in inputs if given.task and not given.is_earlier}


def ordered_groups(workflow: Workflow) -> list[Group]:
    """Return the groups in an order in which they can run: each after those whose outputs are its inputs."""
    group_of, waiting, ordered = group_by_task(workflow), workflow.task_groups, dict[str, Group]()
    while waiting:
        ready = {group.name: group for group in waiting if upstream(group, group_of) <= ordered.keys()}
        ordered |= ready
        waiting = [group for group in waiting if group.name not in ready]
    return [*ordered.values()]
