"""Workflow files: what is accepted, what is refused and with which words, and damaged files."""

import random
import resource
import traceback
from importlib import resources
from pathlib import Path

import pytest

from paceline.errors import UserError
from paceline.launch import template
from paceline.launch.profile import read_profile
from paceline.launch.workflow import WorkflowFile, parse_workflow, read_workflow
from tests.fuzz.guard import cases, harmless

FILE = Path("file.yaml")
SHIPPED = ("train_cameras.yaml", "train_one_node.yaml", "train_policy.yaml", "train_then_export.yaml")
# The structure of OSMO's example of training on several nodes.
MULTI_NODE = """\
# One lead and several workers.
workflow:
  groups:
  - name: training
    tasks:
    - name: master
      lead: true
      command: ["bash"]
      args: ["/tmp/entry.sh"]
      image: registry/image:1.0
      environment:
        ACCEPT: Y
        NUMBER: 1
      files:
      - contents: |2-

          set -eux
          train --nproc_per_node={{num_gpu}} --nnodes={{num_nodes}} --rdzv_endpoint=localhost:5555
          mv logs/ {{output}}/
        path: /tmp/entry.sh
      outputs:
      - url: {{ storage_url }}/policies/{{workflow_id}}/
    {% for i in range(1, num_nodes) %}
    - name: worker-{{i}}
      command: ["bash"]
      args: ["/tmp/entry.sh"]
      image: registry/image:1.0
      files:
      - path: /tmp/entry.sh
        contents: train --node_rank={{i}} --rdzv_endpoint={{host:master}}:5555
    {% endfor %}
  name: train-multi-node
  resources:
    default:
      cpu: 30
      gpu: {{num_gpu}}
      memory: 64Gi
      storage: 64Gi
default-values:
  num_gpu: 2
  num_nodes: 3
"""
PLAIN = """\
version: 2
workflow:
  name: plain
  timeout: {exec_timeout: 1h30m, queue_timeout: 60}
  resources:
    default: {cpu: 1, memory: 1Gi}
  tasks:
  - name: first
    image: image
    command: [bash, -c]
    args: ["echo {{output}}"]
    exitActions: {COMPLETE: 3, RESCHEDULE: "4-6,9"}
  - name: second
    image: image
    command: [cat]
    args: ["{{input:0}}/file", "{{input:first}}"]
    inputs: [{task: first, regex: ".*"}]
"""


def parse(text: str, *values: str) -> WorkflowFile:
    return parse_workflow(text, FILE, values)


def test_a_group_of_nodes_is_rendered_from_a_loop_and_the_engines_tokens_stay():
    file = parse(MULTI_NODE, "storage_url=s3://bucket")
    (group,) = file.workflow.task_groups
    assert [task.name for task in group.tasks] == ["master", "worker-1", "worker-2"]
    assert group.lead.name == "master"
    assert (group.barrier, group.ignoreNonleadStatus) == (True, True)
    master, worker = group.tasks[0], group.tasks[2]
    assert master.environment == {"ACCEPT": "Y", "NUMBER": "1"}
    assert "--nproc_per_node=2 --nnodes=3" in (master.files[0].contents or "")
    assert (master.files[0].contents or "").endswith("mv logs/ {{output}}/")
    assert master.outputs[0].url == "s3://bucket/policies/{{workflow_id}}/"
    assert worker.files[0].contents == "train --node_rank=2 --rdzv_endpoint={{host:master}}:5555"
    assert file.workflow.resource(worker).gpu == 2


def test_tasks_without_groups_are_groups_of_one():
    workflow = parse(PLAIN).workflow
    assert [group.name for group in workflow.task_groups] == ["first", "second"]
    assert workflow.timeout.exec_timeout == 5400.0
    first = workflow.task_groups[0].tasks[0]
    actions = {code: first.action(code) for code in (0, 1, 3, 5, 9)}
    assert actions == {0: "COMPLETE", 1: "FAIL", 3: "COMPLETE", 5: "RESCHEDULE", 9: "RESCHEDULE"}


def test_values_become_numbers_or_stay_strings():
    text = PLAIN.replace("echo", "{{ a.__class__.__name__ if false else a + 1 }}")
    assert "10 {{output}}" in parse(text, "a=9").text
    assert "2.5 {{output}}" in parse(text, "a=1.5").text
    with pytest.raises(UserError, match="invalid"):
        parse(text, "a=x")
    with pytest.raises(UserError, match="invalid"):
        parse_workflow(text, FILE, set_strings=["a=9"])


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("values", [[], ["num_gpu=0", "ranks_per_node=2"]])
def test_the_files_of_paceline_are_valid(name: str, values: list[str]):
    url, credentials = "checkpoint_url=s3://bucket/{{workflow_id}}", "credentials={s3: {AWS_SECRET_ACCESS_KEY: key}}"
    file = read_workflow(Path(str(resources.files("paceline") / "workflows" / name)), values, [url, credentials])
    lead = file.workflow.task_groups[0].lead
    assert lead.image == "paceline"
    assert lead.environment["TENSORBOARD_PORT"] == "6006"
    assert lead.credentials == {"s3": {"AWS_SECRET_ACCESS_KEY": "key"}}
    assert "--mirror s3://bucket/{{workflow_id}}" in (lead.files[0].contents or "")


def test_the_folder_of_the_repository_is_that_of_the_package():
    folder = Path(__file__).parents[2] / "workflows"
    assert sorted(file.name for file in folder.iterdir()) == sorted(SHIPPED)


def changed(old: str, new: str, text: str = MULTI_NODE) -> str:
    assert old in text
    return text.replace(old, new, 1)


REFUSED = {
    "an undefined variable": (MULTI_NODE, 22, ["'storage_url'", "--set storage_url=VALUE"]),
    "a misspelled variable": (changed("{{num_gpu}}", "{{num_gpus}}"), 18, ["'num_gpus'", "did you mean 'num_gpu'"]),
    "a token with spaces": (changed("echo {{output}}", "echo {{ output }}", PLAIN), 11, ["{{output}}, without spaces"]),
    "a template that is wrong": (changed("echo", "{% for %}", PLAIN), 11, ["the template is invalid"]),
    "unsafe code": (changed("echo", "{{ ''.__class__.__mro__ }}", PLAIN), 11, ["unsafe"]),
    "an unknown key": (changed("    image:", "    imag:", PLAIN), 9, ["'imag'", "did you mean 'image'"]),
    "an unknown section": (changed("version:", "versions:", PLAIN), 1, ["'versions'", "did you mean 'version'"]),
    "another version": (changed("version: 2", "version: 1", PLAIN), 1, ["version 1 must be 2"]),
    "no lead": (
        changed("lead: true", "lead: false").replace("{{ storage_url }}", "s3:/"),
        4,
        ["no lead", "lead: true"],
    ),
    "two leads": (
        changed("image:1.0\n      files:", "image:1.0\n      lead: true\n      files:").replace(
            "{{ storage_url }}", ""
        ),
        4,
        ["leads master, worker-1, worker-2", "exactly one"],
    ),
    "the same name twice": (changed("name: second", "name: first", PLAIN), 13, ["first is used by two", "unique"]),
    "the same key twice": (changed("    image:", "    name: x\n    image:", PLAIN), 9, ["'name' occurs twice"]),
    "tasks and groups": (PLAIN + "  groups:\n  - {name: g, tasks: [{name: t, image: i, command: [c]}]}\n", 7, ["both"]),
    "no tasks": ("workflow:\n  name: empty\n", 1, ["neither tasks nor groups"]),
    "a cycle": (changed("args: [", "inputs: [{task: second}]\n    args: [", PLAIN), 8, ["first, second wait"]),
    "an input that no task has": (
        changed("task: first,", "task: frst,", PLAIN),
        17,
        ["'frst'", "did you mean 'first'"],
    ),
    "an input of the same group": (
        changed(
            "      outputs:\n      - url: {{ storage_url }}", "      inputs:\n      - task: worker-1\n      - url: a"
        ),
        22,
        ["worker-1 runs at the same time"],
    ),
    "a token of no input": (
        changed("{{input:0}}", "{{input:1}}", PLAIN),
        13,
        ["{{input:1}}", "its inputs are 0, first"],
    ),
    "a host of no task": (
        changed("{{host:master}}", "{{host:mastr}}").replace("{{ storage_url }}", ""),
        24,
        ["{{host:mastr}}", "did you mean 'master'"],
    ),
    "an unknown resource": (changed("    image:", "    resource: big\n    image:", PLAIN), 9, ["resource 'big'"]),
    "a code with two actions": (changed("COMPLETE: 3", "COMPLETE: 4", PLAIN), 12, ["exit code 4 has two actions"]),
    "an unknown action": (changed("COMPLETE: 3", "RETRY: 4", PLAIN), 12, ["'RETRY'", "RESCHEDULE"]),
    "a code that is too large": (changed("COMPLETE: 3", "COMPLETE: 256", PLAIN), 12, ["256", "0 to 255"]),
    "a duration without a unit": (changed("1h30m", "1x", PLAIN), 4, ["'1x'", "1h30m"]),
    "a size without a number": (changed("1Gi", "much", PLAIN), 6, ["'much'", "64Gi"]),
    "a missing command": (changed("    command: [cat]\n", "", PLAIN), 13, ["the task has no command"]),
    "an input of two kinds": (changed("task: first,", "task: first, url: a,", PLAIN), 17, ["exactly one of"]),
    "an invalid regular expression": (changed('".*"', '"*"', PLAIN), 17, ["regular expression"]),
    "no YAML": (changed("[bash, -c]", "[bash, -c", PLAIN), 11, ["not valid YAML"]),
    "text outside of sections": ("hello\n" + PLAIN, 1, ["'hello' is outside"]),
    "default values that are no mapping": (PLAIN + "default-values: [1]\n", 18, ["must be a mapping"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_is_refused_with_its_line_and_a_remedy(case: str):
    text, line, messages = REFUSED[case]
    with pytest.raises(UserError) as refusal:
        parse(text)
    message = str(refusal.value)
    assert message.startswith(f"{FILE}:{line}: "), message
    assert len(message.splitlines()) == 1
    for part in messages:
        assert part in message


def test_values_that_the_file_does_not_use_are_refused():
    with pytest.raises(UserError, match="did you mean 'num_gpu'"):
        parse(MULTI_NODE, "num_gpus=4", "storage_url=s3://bucket")
    with pytest.raises(UserError, match="must be NAME=VALUE"):
        parse(MULTI_NODE, "num_gpu")


def test_a_line_of_an_error_inside_a_loop_is_that_of_the_template():
    text = changed("image: registry/image:1.0\n      files", "image: []\n      files")
    with pytest.raises(UserError, match=rf"^{FILE}:27: groups.0.tasks.1.image \[\] must be a string"):
        parse(text, "storage_url=s3://bucket")


LARGE = [
    "{% for i in range(9999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999999) %}{% endfor %}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 'a'.center(10 ** 10) }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
]


@pytest.mark.parametrize("text", LARGE)
def test_a_template_without_an_end_is_refused(text: str):
    with pytest.raises(UserError, match=r"the template (needs more than|is invalid)"):
        parse(changed("echo", text, PLAIN))


def test_aliases_that_make_a_short_file_large_are_refused():
    doubled = "".join(f"    a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}, *a{n - 1}]\n" for n in range(1, 30))
    with pytest.raises(UserError, match="more than"):
        parse(f"workflow:\n  labels:\n    a0: &a0 [x]\n{doubled}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("storage_rot: /a", ":1: unknown key of profile 'storage_rot': did you mean 'storage_root'"),
        ("local:\n  grace_seconds: -1", ":2: local.grace_seconds -1 must be at least 0"),
        ("[", ":1: it is not valid YAML"),
        ("3", ":1: profile 3 must be a mapping"),
    ],
)
def test_a_profile_is_refused_with_its_line(text: str, message: str, tmp_path: Path):
    (tmp_path / "profile.yaml").write_text(text)
    with pytest.raises(UserError) as refusal:
        read_profile(tmp_path / "profile.yaml")
    assert message in str(refusal.value)


def test_the_profile_is_read_from_its_default_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert read_profile(None).local.max_reschedules == 10
    (tmp_path / "paceline").mkdir()
    (tmp_path / "paceline" / "profile.yaml").write_text("local: {max_reschedules: 2}\n")
    assert read_profile(None).local.max_reschedules == 2


SNIPPETS = [
    *"[]{}#'\"|>&*!%@`\t\0\N{BOM}\x85\u2028\ue000\ue001\ue002\ue003",
    *(
        ": ",
        "- ",
        "? ",
        "---\n",
        "...\n",
        "<<: ",
        "&a ",
        "*a",
        "!!binary ",
        "!!set ",
        "!!python/object/apply:os.system ",
    ),
    *(
        "[" * 500,
        "{a: " * 500,
        "9" * 5000,
        "0x" + "f" * 5000,
        "2001-99-99",
        "1:" * 50,
        ".inf",
        "null",
        "true",
        "~",
        "''",
    ),
    *("lead: true", "inputs: [{task: first}]", "exitActions: {FAIL: 0}", "{{output}}", "{{host:first}}", "{{input:9}}"),
]
TAGS = [
    *(
        "{{",
        "}}",
        "{%",
        "%}",
        "{#",
        "#}",
        "{%-",
        "-%}",
        "{% raw %}",
        "{% endraw %}",
        "{% for i in range(3) %}",
        "{% endfor %}",
    ),
    *("{% if a %}", "{% else %}", "{% endif %}", "{% set b = a %}", "{% set b %}", "{% endset %}", "{% macro m(x) %}"),
    *(
        "{% endmacro %}",
        "{{ a }}",
        "{{ b.c }}",
        "{{ a[0] }}",
        "{{ a|int }}",
        "{{ a|join(',') }}",
        "{{ '%s' % a }}",
        "{{ a() }}",
    ),
    *("{{ a.__class__ }}", "{{ a|attr('__init__') }}", "{{ self }}", "{{ self.__init__.__globals__ }}", "{{ cycler }}"),
    *(
        "{{ lipsum.__globals__['os'].system('touch sprung') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ),
    *(
        "{% extends 'x' %}",
        "{{ namespace() }}",
        "{{ joiner.__init__ }}",
        "{{ range(9) | map('string') | list }}",
        "{{ loop }}",
    ),
    *(
        "{{ ''.format(a) }}",
        "{{ '{0.__class__}'.format(a) }}",
        "{{ 1 / 0 }}",
        "{{ a ~ [] }}",
        "{{ none + 1 }}",
        "\n",
        "  ",
        "x: ",
    ),
]


def spliced(text: str, snippets: list[str], generator: random.Random) -> str:
    """Return a text with pieces replaced, removed and put in between."""
    for _ in range(generator.choice([1, 1, 2, 3, 5])):
        start = generator.randrange(len(text) + 1)
        end = min(len(text), start + generator.choice([0, 0, 1, 5, 40]))
        text = text[:start] + generator.choice([*snippets, ""]) + text[end:]
    return text


def test_damaged_files_are_refused_in_one_line():
    faults, refused, number = list[str](), 0, -1
    for number in cases(600):
        text = spliced(PLAIN, SNIPPETS, random.Random(number))
        if template.TOKEN.sub("", text).count("{{") or "{%" in text or "{#" in text:
            continue
        try:
            with harmless():
                parse(text)
        except UserError as error:
            refused += 1
            if len(str(error).splitlines()) != 1 or len(str(error)) > 2000:
                faults.append(f"case {number}: {str(error)[:3000]}")
        except Exception:
            faults.append(f"case {number}: {traceback.format_exc(limit=-4)}")
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults[:10])
    assert refused > number // 3


def test_random_templates_have_a_text_or_an_error_and_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    before, texts = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for number in cases(1500):
        generator = random.Random(number)
        text = "".join(generator.choices([*TAGS, "text\n"], k=generator.choice([1, 2, 4, 8])))
        with harmless():
            found = template.render_without_limits(text, {"a": generator.choice([1, "x", [1], {"c": 2}])}, 7)
        if "text" in found:
            texts += 1
            assert len(found["lines"]) == found["text"].count("\n") + 1, text
            assert set(found["lines"]) <= set(range(7, 8 + text.count("\n"))), text
        else:
            assert len(found["message"].splitlines()) <= 1, text
    assert texts > len(cases(1500)) // 20
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 2**28
    assert not list(tmp_path.iterdir())
