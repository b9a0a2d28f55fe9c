"""Read a workflow file: split it into sections, render its template and check what it says.

Every error names the file, the line and a remedy.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UserError, one_line, unknown
from paceline.launch import template
from paceline.launch.document import Document, LineError, Location
from paceline.launch.spec import Group, Task, Workflow
from paceline.validation import parse_yaml, read_text, shown

_SECTIONS = ("version", "workflow", "default-values")
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
    sections = _sections(text, path)
    _check_version(sections, path)
    values = _default_values(sections, path)
    given = _given("--set", set_values) | _given("--set-string", set_strings)
    first_line, section = sections["workflow"]
    for name in given:
        if name not in values and not re.search(rf"\b{name}\b", section):
            raise UserError(f"--set {name}: {path}: {unknown('variable', name, values)}")
    rendered = template.render(section, values | given, str(path), first_line)
    try:
        document = Document(rendered.text)
        workflow = document.validate(Workflow, ("workflow",), _restore)
        for location, message in _problems(workflow):
            raise document.error(("workflow", *location), message)
    except LineError as error:
        line = rendered.lines[min(error.line, len(rendered.lines)) - 1]
        raise UserError(f"{path}:{line}: {error}") from None
    text = "version: 2\n" + template.restore(rendered.text)
    return WorkflowFile(path, workflow, text, set_values, set_strings)


def _sections(text: str, path: Path) -> dict[str, tuple[int, str]]:
    """Return the first line and the text of each section. The file is no YAML before its template is rendered."""
    sections, name = dict[str, tuple[int, str]](), ""
    for number, line in enumerate((f"{line}\n" for line in text.split("\n")), 1):
        if found := _SECTION.match(line):
            name = found[2]
            if name not in _SECTIONS:
                raise UserError(f"{path}:{number}: {unknown('section', name, _SECTIONS)}")
            if name in sections:
                raise UserError(f"{path}:{number}: the section {name} occurs twice; remove one")
            sections[name] = (number, line)
        elif name:
            start, before = sections[name]
            sections[name] = (start, before + line)
        elif line.strip() and not line.startswith(("#", "---")):
            raise UserError(f"{path}:{number}: {shown(line.strip())} is outside of the sections {', '.join(_SECTIONS)}")
    if "workflow" not in sections:
        raise UserError(f"{path}: no section workflow; a workflow file has a line that begins with workflow:")
    return sections


def _check_version(sections: dict[str, tuple[int, str]], path: Path) -> None:
    line, text = sections.get("version", (0, "version: 2"))
    try:
        version = parse_yaml(text)["version"]
    except ValueError as error:
        raise UserError(f"{path}:{line}: {error}") from None
    if version != 2 or isinstance(version, bool):
        raise UserError(f"{path}:{line}: version {shown(version)} must be 2, the version of OSMO's workflow files")


def _default_values(sections: dict[str, tuple[int, str]], path: Path) -> dict[str, Any]:
    line, text = sections.get("default-values", (0, "default-values: {}"))
    try:
        values = parse_yaml(text)["default-values"] or {}
        if not isinstance(values, dict):
            raise ValueError("default-values must be a mapping of names and values")
        for name in values:
            if not isinstance(name, str) or not name.isidentifier():
                raise ValueError(f"the name {shown(name)} in default-values must have letters, digits and _ only")
        for value in values.values():
            _check_plain(value)
    except ValueError as error:
        raise UserError(f"{path}:{line}: {error}") from None
    return values


def _check_plain(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _check_plain(key)
            _check_plain(item)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item)
    elif not isinstance(value, (str, int, float, type(None))):
        raise ValueError(f"the value {shown(value)} in default-values must be a number, a string, a list or a mapping")


def _given(option: str, arguments: Iterable[str]) -> dict[str, Any]:
    values = dict[str, Any]()
    for argument in arguments:
        name, separator, value = argument.partition("=")
        if not separator or not name.isidentifier():
            raise UserError(f"{option} {shown(argument)} must be NAME=VALUE, for example num_gpu=4")
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
    if (workflow.tasks is None) == (workflow.groups is None):
        has = "both tasks and groups" if workflow.tasks else "neither tasks nor groups"
        yield ("tasks",), f"the workflow has {has}; give tasks, or groups with tasks in each"
        return
    groups = workflow.task_groups
    group_of = dict[str, Group]()
    names = set[str]()
    for index, group in enumerate(groups):
        place: Location = ("groups", index) if workflow.groups else ()
        if workflow.groups and group.name in names:
            yield (*place, "name"), f"the name {group.name} is used by two groups; names must be unique"
        names.add(group.name)
        leads = [task.name for task in group.tasks if task.lead]
        if len(group.tasks) > 1 and len(leads) != 1:
            found = f"the leads {', '.join(leads)}" if leads else "no lead"
            yield place, f"the group {group.name} has {found}; set lead: true in exactly one of its tasks"
        for number, task in enumerate(group.tasks):
            at = (*place, "tasks", number) if workflow.groups else ("tasks", index)
            if task.name in group_of:
                yield (*at, "name"), f"the name {task.name} is used by two tasks; names must be unique"
            group_of[task.name] = group
    for index, group in enumerate(groups):
        for number, task in enumerate(group.tasks):
            at: Location = ("groups", index, "tasks", number) if workflow.groups else ("tasks", index)
            for location, message in _task_problems(task, workflow, group_of):
                yield (*at, *location), f"task {task.name}: {message}"
    yield from _cycles(groups, group_of, bool(workflow.groups))


def _task_problems(task: Task, workflow: Workflow, group_of: dict[str, Group]) -> Iterator[tuple[Location, str]]:
    group = group_of[task.name]
    if task.resource not in workflow.resources and task.resource != "default":
        yield ("resource",), str(unknown("resource", task.resource, workflow.resources))
    if (code := task.doubled_exit_code()) is not None:
        yield ("exitActions",), f"exit code {code} has two actions; give each code to one action"
    paths = set[str]()
    for index, file in enumerate(task.files):
        if (file.contents is None) == (file.localpath is None):
            yield ("files", index), f"the file {file.path} needs either contents or localpath"
        if file.path in paths:
            yield ("files", index, "path"), f"two files have the path {file.path}; paths must be unique"
        paths.add(file.path)
    for index, given in enumerate(task.inputs):
        if len({"task", "url", "dataset"} & given.model_fields_set) != 1:
            yield ("inputs", index), "an input needs exactly one of task, url and dataset"
        elif given.task is not None and given.task not in group_of:
            yield ("inputs", index, "task"), str(unknown("task", given.task, group_of))
        elif given.task is not None and group_of[given.task] is group:
            message = f"the input {given.task} runs at the same time, in the same group; move it to another group"
            yield ("inputs", index, "task"), message if given.task != task.name else "a task cannot be its own input"
    for index, output in enumerate(task.outputs):
        if len({"url", "dataset", "update_dataset"} & output.model_fields_set) != 1:
            yield ("outputs", index), "an output needs exactly one of url, dataset and update_dataset"
    yield from (((), problem) for problem in _token_problems(task, group))


def _token_problems(task: Task, group: Group) -> Iterator[str]:
    inputs = {str(index) for index in range(len(task.inputs))} | {given.task for given in task.inputs if given.task}
    for token in (match[1] for text in task.texts() for match in template.TOKEN.finditer(text)):
        kind, _, name = token.partition(":")
        if kind == "host" and name not in (hosts := [each.name for each in group.tasks]):
            yield f"{{{{{token}}}}}: {unknown('task of the same group', name, hosts)}"
        if kind == "input" and name not in inputs:
            known = f"its inputs are {', '.join(sorted(inputs))}" if inputs else "it has no inputs"
            yield f"{{{{{token}}}}}: the task has no such input; {known}"


def _cycles(groups: list[Group], group_of: dict[str, Group], grouped: bool) -> Iterator[tuple[Location, str]]:
    """Yield the groups that wait for each other."""
    needs = {group.name: upstream(group, group_of) for group in groups}
    while ready := {name for name, names in needs.items() if not names & needs.keys()}:
        needs = {name: names for name, names in needs.items() if name not in ready}
    if needs:
        index = next(index for index, group in enumerate(groups) if group.name in needs)
        message = f"{', '.join(needs)} wait for each other's output; remove one of their inputs"
        yield ("groups" if grouped else "tasks", index), message


def group_by_task(workflow: Workflow) -> dict[str, Group]:
    """Return the group of each task, by the name of the task."""
    return {task.name: group for group in workflow.task_groups for task in group.tasks}


def upstream(group: Group, group_of: dict[str, Group]) -> set[str]:
    """Return the names of the groups whose outputs are inputs of a group."""
    return {group_of[given.task].name for task in group.tasks for given in task.inputs if given.task}
