"""Workflow files and templates that hypothesis generates.

A file is accepted, or refused in one line that names the file and the line. A template starts no program and changes no
file.

The cases are the same in each run. PACELINE_FUZZ_CASES=100000 runs as many random cases of each property.
"""

import json
import os
import re
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from paceline.errors import UserError
from paceline.launch import template
from paceline.launch.workflow import WorkflowFile, parse_workflow, read_workflow
from tests.fuzz.guard import CASES, harmless

FILE = Path("file.yaml")
WORKFLOWS = Path(__file__).parents[2] / "workflows"
TAG = re.compile(r"\{[{%#]")
PLACE = re.compile(rf"{FILE}:([0-9]+): ")
# These errors concern the whole file or no file.
WITHOUT_LINE = (f"{FILE}: no section workflow", f"{FILE}: the template needs more than", "--set")


def fuzz(cases: int) -> settings:
    return settings(
        max_examples=int(os.environ.get(CASES, cases)),
        derandomize=CASES not in os.environ,
        deadline=timedelta(seconds=30),
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def parse(text: str, *values: str, strings: tuple[str, ...] = ()) -> WorkflowFile | None:
    """Return the workflow, or None if the text is refused with a message of the right form."""
    try:
        return parse_workflow(text, FILE, values, strings)
    except UserError as error:
        message = str(error)
    assert message.isprintable(), repr(message)
    assert len(message) < 1000
    if not message.startswith(WITHOUT_LINE):
        place = PLACE.match(message)
        assert place, message
        assert 1 <= int(place[1]) <= text.count("\n") + 1, message
    return None


def parse_without_template(text: str, *values: str, strings: tuple[str, ...] = ()) -> WorkflowFile | None:
    """Parse a text that no process has to render. Otherwise return None."""
    if TAG.search(re.sub(r"\{\{(output|workflow_id|(input|host):\w+)\}\}", "", text)):
        return None
    with harmless():
        return parse(text, *values, strings=strings)


PIECES = [
    *"[]{}#'\"|>&*!%@`\t\0\a\r\N{BOM}\x85\u2028\ue000\ue001\ue002\ue003:-?,",
    *("\n", "\n  ", "\n    ", "\r\n", ": ", "- ", "? ", "---\n", "...\n", "<<: ", "&a ", "*a", "!!binary ", "!!set "),
    *("!!python/object/apply:os.system ", "!!timestamp ", "2001-99-99", "2001-01-01", "1:" * 50, ".inf", "null"),
    *("[" * 100, "{a: " * 100, "9" * 5000, "0x" + "f" * 5000, "~", "''", '"\\ud800"', "true", "\x1b[31m"),
    *("workflow:", "version: ", "default-values:", "tasks:", "name: ", "command: ", "lead: true", "image: "),
    *("inputs: [{task: train}]", "exitActions: {FAIL: 0}", "regex: '[[a'", "labels: {a: b}"),
    *("{{output}}", "{{host:master}}", "{{input:9}}", "{{workflow_id}}"),
]


@fuzz(2800)
@given(st.lists(st.sampled_from(PIECES), max_size=20).map("".join) | st.text(max_size=20))
@example("workflow:\n" + "\n" * 100_000)
@example("workflow: " + "[" * 100_000)
@example("workflow:\n- *a")
@example("default-values: {a: &a [*a]}\nworkflow: {}")
def test_any_text(text: str):
    parse_without_template(text)


@pytest.fixture(scope="module")
def rendered() -> list[str]:
    """Return the workflow files of Paceline without the tags of their templates."""
    return [read_workflow(file, ["num_gpu=0"]).text for file in sorted(WORKFLOWS.glob("*.yaml"))]


EDITS = st.tuples(st.integers(0, 1000), st.sampled_from([0, 0, 1, 5, 40]), st.sampled_from([*PIECES, ""]))


@fuzz(1000)
@given(st.integers(), st.lists(EDITS, min_size=1, max_size=3))
def test_files_with_changed_text(rendered: list[str], number: int, edits: list[tuple[int, int, str]]):
    text = rendered[number % len(rendered)]
    for place, removed, piece in edits:
        start = place * len(text) // 1000
        text = text[:start] + piece + text[start + removed :]
    parse_without_template(text)


TEXTS = st.sampled_from(
    [
        "x",
        "",
        "{{output}}",
        "{{workflow_id}}",
        "true",
        "8",
        "a: b",
        "- c",
        "# d",
        "~",
        "{e",
        "*f",
        "%g",
        "'h",
        "ä\n\t€😀",
    ]
)
DURATIONS = st.sampled_from([0, 1.5, "90s", "30m", "12h", "2d", "500ms", "PT1H30M", "P1D"])
SIZES = st.sampled_from(["512Mi", "64Gi", "1T", "1.5GiB", 1024, "100B"])
# Keys of a task and values that are valid in any workflow.
VALUES = {
    "args": st.lists(TEXTS | st.integers() | st.floats(allow_nan=False, allow_infinity=False), max_size=2),
    "environment": st.dictionaries(TEXTS, TEXTS | st.integers() | st.booleans(), max_size=2),
    "files": st.just([{"path": "/a", "contents": "x"}, {"path": "b", "localpath": "c"}]),
    "outputs": st.just([{"url": "s3://bucket/{{workflow_id}}", "regex": ".*"}, {"update_dataset": {"name": "d"}}]),
    "inputs": st.just([{"url": "file:///a"}, {"dataset": "d"}, {"task": "earlier-7:train"}]),
    "checkpoint": st.builds(lambda value: [{"path": "a", "url": "b", "frequency": value}], DURATIONS),
    "credentials": st.just({"a": "/path", "b": {"NAME": "key"}}),
    "exitActions": st.sampled_from([{}, {"COMPLETE": 3}, {"RESCHEDULE": "4-6,3006", "fail": "1-3"}]),
    "privileged": st.booleans(),
    "volumeMounts": st.just(["/a:/b"]),
}
HEADS = st.builds(
    lambda memory, gpu, duration: {
        "name": "test",
        "labels": {"team": "a"},
        "resources": {"default": {"memory": memory, "gpu": gpu}, "other": {"topology": [{"key": "rack"}]}},
        "timeout": {"exec_timeout": duration},
    },
    SIZES,
    st.integers(0, 8),
    DURATIONS,
)


@st.composite
def workflows(draw: st.DrawFn) -> dict[str, Any]:
    """Return a valid workflow of one or two groups or tasks, in which tasks may read the output of earlier ones."""
    groups, names = list[dict[str, Any]](), list[str]()
    for index in range(draw(st.integers(1, 2))):
        tasks = list[dict[str, Any]]()
        for number in range(draw(st.integers(1, 2))):
            task = {"name": f"t{index}{number}", "lead": number == 0, "image": draw(TEXTS), "command": [draw(TEXTS)]}
            for key in draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=3, unique=True)):
                task[key] = deepcopy(draw(VALUES[key]))
            if names and draw(st.booleans()):
                task["inputs"] = [{"task": draw(st.sampled_from(names))}]
                task["args"] = ["{{input:0}}", f"{{{{host:{task['name']}}}}}"]
            tasks.append(task)
        groups.append({"name": f"g{index}", "barrier": draw(st.booleans()), "tasks": tasks})
        names += [task["name"] for task in tasks]
    head = draw(HEADS)
    if all(len(group["tasks"]) == 1 for group in groups):
        return head | {"tasks": [group["tasks"][0] for group in groups]}
    return head | {"groups": groups}


def dump(workflow: dict[str, Any]) -> str:
    """Return a workflow file. JSON is YAML, and each value has a line."""
    return f"version: 2\nworkflow: {json.dumps(workflow, indent=1)}\n"


@fuzz(400)
@given(workflows())
def test_a_valid_workflow_is_accepted(workflow: dict[str, Any]):
    file = parse_workflow(dump(workflow), FILE)
    tasks = workflow.get("tasks") or [task for group in workflow["groups"] for task in group["tasks"]]
    found = [task for group in file.workflow.task_groups for task in group.tasks]
    assert [(task.name, task.image) for task in found] == [(task["name"], task["image"]) for task in tasks]
    assert not file.unresolved


KEYS = st.sampled_from(["name", "lead", "image", "command", "tasks", "inputs", "task", "url", "regex", "path", "gpu"])
WRONG = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.sampled_from(["t00", "g0", "9" * 99, "1-0"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS | TEXTS, inner, max_size=2),
    max_leaves=3,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return all containers of a value, each with all of its keys or indices."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    return [(value, key) for key, _ in items] + [place for _, item in items for place in places(item)]


CHANGES = st.tuples(st.integers(0, 10**6), st.sampled_from(["set", "set", "remove", "copy"]), KEYS, WRONG)


@fuzz(1100)
@given(workflows(), st.lists(CHANGES, min_size=1, max_size=2))
def test_a_workflow_with_wrong_values(workflow: dict[str, Any], changes: list[tuple[int, str, str, Any]]):
    for number, change, key, value in changes:
        found = places(workflow)
        container, place = found[number % len(found)]
        if change == "set":
            container[place] = value
        elif change == "remove":
            del container[place]
        elif isinstance(container, list):
            container.append(container[place])
        else:
            container[key] = container[place]
    parse_without_template(dump(workflow))


SETTINGS = st.builds(
    "{}={}".format,
    st.sampled_from(["a", "b", "a b", "", "__class__", "1a", "ä"]),
    st.text(max_size=10) | st.integers().map(str) | st.floats().map(str) | st.sampled_from(PIECES),
)


@fuzz(2100)
@given(
    st.lists(SETTINGS | st.text(max_size=10), max_size=3),
    st.lists(SETTINGS, max_size=2),
    st.dictionaries(KEYS | TEXTS, WRONG, max_size=3),
)
def test_values_of_variables(set_values: list[str], set_strings: list[str], defaults: dict[str, Any]):
    values = json.dumps({"a": 1, "b": 2} | defaults, indent=1)
    text = f"default-values: {values}\nworkflow: {{name: test, tasks: [{{name: one, image: i, command: [c]}}]}}"
    parse_without_template(text, *set_values, strings=tuple(set_strings))


NAMES = "a b undefined loop self range dict cycler joiner namespace lipsum caller varargs true none"
ATTRIBUTES = (
    "c upper format format_map items mro __class__ __init__ __globals__ __builtins__ __subclasses__ __mro__ __base__ "
    "__dict__ __code__ __getattribute__ __reduce_ex__ _TemplateReference__context environment gi_frame cr_frame"
)
FILTERS = (
    "abs attr('__class__') attr('format') batch(2) capitalize count default('x') dictsort first float forceescape "
    "format(a) groupby('c') indent(2) int items join(',') last length list lower map('upper') max min pprint random "
    "map(attribute='__class__') reject('odd') replace('x','y') reverse round safe select selectattr('__init__') "
    "slice(2) sort string striptags sum title tojson trim truncate(3) unique upper urlencode urlize wordcount xmlattr"
)
STRINGS = (
    "'x' '{}' '{0.__class__}' '{a.__init__.__globals__}' '%s' '__class__' 'os' 'system' '/etc/passwd' '\\n' "
    "'{{output}}'"
)
OPERATORS = "+ - * / // % ~ == < in and or is"


def one_of(words: str) -> st.SearchStrategy[str]:
    return st.sampled_from(words.split())


EXPRESSIONS = st.recursive(
    st.integers(0, 9).map(str) | one_of(NAMES) | one_of(STRINGS),
    lambda inner: st.one_of(
        st.builds("{}.{}".format, inner, one_of(ATTRIBUTES)),
        st.builds("{}[{}]".format, inner, inner),
        st.builds("{}({})".format, inner, inner | st.just("")),
        st.builds("({} {} {})".format, inner, one_of(OPERATORS), inner),
        st.builds("({})|{}".format, inner, one_of(FILTERS)),
        st.builds("[{}, {{'c': {}}}]".format, inner, inner),
        st.builds("({} if {} else {})".format, inner, inner, inner),
    ),
    max_leaves=5,
)
STATEMENTS = st.one_of(
    st.builds("{{{{ {} }}}}".format, EXPRESSIONS),
    st.builds(
        str.replace,
        st.sampled_from(
            [
                "{%- set b = E -%}",
                "{% for i in E %}x{{ i }}\n{% endfor %}",
                "{% if E %}\ny{% else %}z{% endif %}",
                "{% macro m(x) %}{{ E }}{% endmacro %}{{ m(1) }}",
                "{% with c = E %}{{ c }}{% endwith %}",
                "{% include E %}",
                "{% import E as m %}{{ m.x }}",
                "{% extends E %}",
                "{% raw %}{{ E }}{% endraw %}",
                "{% filter upper %}{{ E }}\n{% endfilter %}",
            ]
        ),
        st.just("E"),
        EXPRESSIONS,
    ),
    st.sampled_from(
        ["text\n", "{{", "}}", "{%", "%}", "{#", "#}", "{% endfor %}", "{{output}}", "{{ output }}", "\r\n"]
    ),
)
TEMPLATES = st.lists(STATEMENTS, min_size=1, max_size=4).map("".join)


@fuzz(2600)
@given(TEMPLATES, st.sampled_from([1, "x", [1, "y"], {"c": 2}]))
def test_a_template_has_a_text_or_an_error_and_does_nothing(source: str, value: Any):
    with harmless():
        found = template.render_without_limits(source, {"a": value}, 7)
    lines = range(7, 8 + source.count("\n"))
    if "text" in found:
        assert len(found["lines"]) == found["text"].count("\n") + 1
        assert set(found["lines"]) <= set(lines)
    else:
        assert found["message"].isprintable()
        assert found["line"] in (0, *lines)


ESCAPES = [
    "{{ lipsum.__globals__['os'].system('touch sprung') }}",
    "{{ cycler.__init__.__globals__.os.popen('touch sprung').read() }}",
    "{{ ''|attr('__class__')|attr('__mro__')|last|attr('__subclasses__')() }}",
    "{{ a.__class__.__base__.__subclasses__()[9] }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(a) }}",
    "{{ '{a.__class__}'.format_map({'a': a}) }}",
    "{{ self._TemplateReference__context }}",
    "{{ range.__init__.__func__.__globals__ }}",
    "{{ [a]|map(attribute='__class__')|first }}",
    "{% set f = a.__init__.__globals__ %}{{ f }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('touch sprung') }}",
    "{% extends '/etc/passwd' %}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_leave_the_sandbox(source: str):
    with harmless():
        found = template.render_without_limits(source, {"a": "x"}, 1)
    assert found.get("error") in ("failed", "undefined"), found


LARGE = [
    "{% for i in range(9999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999999) %}{% endfor %}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 'a'.center(10 ** 10) }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% set b = [1] %}{% for i in b %}{% set _ = b.append(1) %}{% endfor %}",
    "{{ 'a'|indent(9999999999) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ (range(99999)|list * 9999)|length }}",
]


@pytest.mark.parametrize("source", LARGE)
def test_a_template_without_an_end_is_refused(source: str):
    with pytest.raises(UserError, match=r"the template (needs more than|is invalid)"):
        parse_workflow(f"workflow:\n  name: {source}\n", FILE)


@fuzz(30)
@given(TEMPLATES, st.text(max_size=10))
def test_a_file_with_a_template(source: str, value: str):
    """Templates of files are rendered in another process."""
    tasks = "tasks: [{name: one, image: i, command: [c]}]"
    text = f"workflow:\n  name: test\n  {tasks}\n  labels: {{a: '{source}'}}\ndefault-values: {{a: 1}}\n"
    parse(text, f"a={value}")
