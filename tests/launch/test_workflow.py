"""Workflow files: what is accepted, and what is refused with which words."""

import re
from importlib import resources
from pathlib import Path

import pytest
import yaml
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from paceline.errors import UserError
from paceline.launch.engines import ENGINES, load_engine
from paceline.launch.profile import KubernetesSettings, Profile, read_profile
from paceline.launch.workflow import WorkflowFile, parse_workflow, read_workflow

FILE = Path("file.yaml")
SHIPPED = ("scaling.yaml", "train_cameras.yaml", "train_one_node.yaml", "train_policy.yaml")
SHIPPED += ("train_then_evaluate.yaml", "train_then_export.yaml")
SHIPPED_FOLDER = Path(str(resources.files("paceline") / "workflows"))
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
  timeout: {exec_timeout: PT1H30M, queue_timeout: 60}
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


# Lines of a workflow, and further indented lines of its task.
ACCEPTED = {
    "lists that are empty": "  groups: []",
    "labels": "  labels: {team: robotics, example.org/run: run_42}",
    "durations": "  timeout: {exec_timeout: 7d, queue_timeout: 500ms}",
    "units of sizes": "  resources: {default: {memory: 128GiB, storage: 0.5Ti, gpu: '2'}}",
    "a topology": "  resources: {default: {topology: [{key: rack, requirementType: preferred}]}}",
    "exit codes of OSMO": "    exitActions: {complete: 0-10, RESCHEDULE: '3004,3006'}",
    "credentials": "    credentials: {login: {USER: user}, keys: /root/.keys}",
    "mounts": "    volumeMounts: [/dev/shm, '/opt:/home/opt']",
    "privileges": "    privileged: true\n    hostNetwork: true",
    "a checkpoint": "    checkpoint: [{path: '{{output}}/a', url: 's3://b/c', frequency: 30m, regex: .*}]",
    "a cache": "    downloadType: download\n    cacheSize: 50%",
    "a key twice with the same value": "    privileged: false\n    privileged: false",
    "an input of an earlier job": "    inputs: [{task: 'train-7:first'}]\n    args: ['{{input:first}}']",
    "datasets": "    inputs: [{dataset: {name: a, regex: .*}}, {dataset: b}]",
    "a dataset as output": "    outputs: [{dataset: {name: a, path: models}}, {update_dataset: {name: b}}]",
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_file_that_osmo_accepts_is_accepted(case: str):
    lines = ACCEPTED[case]
    task = "  tasks:\n  - name: one\n    image: image\n    command: [echo]\n"
    body = f"{task}{lines}" if lines.startswith("    ") else f"{lines}\n{task}"
    file = parse(f'# A comment.\nversion: "2"\nworkflow:\n  name: test\n{body}\n')
    (group,) = file.workflow.task_groups
    assert group.lead.name == "one"
    assert not file.unresolved


def test_values_have_the_text_that_they_have_in_osmo():
    text = """\
workflow:
  name: test
  tasks:
  - name: one
    image: image
    command: [echo]
    environment: {A: 1, B: true}
    args:
    - {{ a.c[1] }}
    - {{ b.c[1] }}
    - "{{ day }}"
    - "{{ empty }}"
    - {{ truth | lower }}-
    - "{% raw %}{{ output }}{% endraw %}"
    - {% set list = [] %}{% set _ = list.append("last") %}{{ list[0] }}
default-values: {a: &a {c: {1: x}}, b: *a, day: 2026-01-31, empty: , truth: true}
"""
    task = parse(text).workflow.task_groups[0].lead
    assert task.args == ["x", "x", "2026-01-31", "None", "true-", "{{ output }}", "last"]
    assert task.environment == {"A": "1", "B": "True"}


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("values", [[], ["num_gpu=0", "ranks_per_node=2"]])
def test_the_files_of_paceline_are_valid(name: str, values: list[str]):
    url, credentials = "checkpoint_url=s3://bucket/{{workflow_id}}", "credentials={s3: {AWS_SECRET_ACCESS_KEY: key}}"
    file = read_workflow(SHIPPED_FOLDER / name, values, [url, credentials])
    lead = file.workflow.task_groups[0].lead
    assert lead.image == "paceline"
    if name != "scaling.yaml":
        assert lead.environment["TENSORBOARD_PORT"] == "6006"
    assert lead.credentials == {"s3": {"AWS_SECRET_ACCESS_KEY": "key"}}
    assert "--mirror s3://bucket/{{workflow_id}}" in (lead.files[0].contents or "")


@pytest.mark.parametrize("on", ENGINES)
@pytest.mark.parametrize("name", SHIPPED)
def test_the_files_of_paceline_are_described_by_every_engine(name: str, on: str):
    profile = Profile(kubernetes=KubernetesSettings(storage_claim="shared"))
    assert "-m paceline" in load_engine(on).describe(read_workflow(SHIPPED_FOLDER / name), profile)


@pytest.mark.parametrize("name", SHIPPED)
def test_osmo_renders_the_files_of_paceline_as_paceline_does(name: str):
    path = SHIPPED_FOLDER / name
    _, section = path.read_text().split("\nworkflow:")
    section, defaults = section.split("\ndefault-values:")
    values = yaml.safe_load(f"values:{defaults}")["values"]
    # OSMO replaces each token by a variable whose value is the token.
    for index, token in enumerate(
        dict.fromkeys(re.findall(r"{{(?:workflow_id|output|input:[^}]+|host:[^}]+)}}", section))
    ):
        section = section.replace(token, f"{{{{hash{index}}}}}")
        values[f"hash{index}"] = token
    template = SandboxedEnvironment(undefined=StrictUndefined).from_string(f"workflow:{section}")
    rendered = yaml.safe_load(f"version: 2\n{template.render(values)}\n")
    assert rendered == yaml.safe_load(read_workflow(path).text)


def test_a_scaling_experiment_has_a_group_of_nodes_for_each_run_and_a_report():
    values, ranks = ["num_gpu=2", "seeds=2", "total_envs=96"], ["ranks=1 4"]
    *runs, comparison = read_workflow(SHIPPED_FOLDER / "scaling.yaml", values, ranks).workflow.task_groups
    assert [(run.name, len(run.tasks)) for run in runs] == [
        *(("ranks-1-seed-0", 1), ("ranks-4-seed-0", 2), ("ranks-1-seed-1", 1), ("ranks-4-seed-1", 2)),
    ]
    scripts = [task.files[0].contents or "" for run in runs for task in run.tasks]
    assert all("--total-envs 96" in script for script in scripts)
    assert "--nnodes=2 --nproc-per-node=2" in scripts[2]
    assert "--rdzv-endpoint={{host:ranks-4-seed-0-master}}:5556" in scripts[2]
    assert "--seed 1" in scripts[-1]
    assert [given.task for given in comparison.lead.inputs] == [run.lead.name for run in runs]
    assert comparison.lead.args[0].endswith("{{input:0}}/run {{input:1}}/run {{input:2}}/run {{input:3}}/run")


def test_the_file_of_the_page_for_isaac_lab_has_one_line_per_node():
    page = (Path(__file__).parents[2] / "docs" / "isaaclab_launch.md").read_text()
    text = page.split('```yaml title="isaaclab_train.yaml"\n')[1].split("```")[0]
    (group,) = parse(text, "num_nodes=3").workflow.task_groups
    assert (group.lead.name, len(group.tasks)) == ("node-0", 3)
    assert "--nnodes=3 --node_rank=2" in (group.tasks[2].files[0].contents or "")


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
    "another version": (changed("version: 2", "version: 1", PLAIN), 1, ["version 1", "write version: 2"]),
    "no lead": (
        changed("lead: true", "lead: false").replace("{{ storage_url }}", "s3:/"),
        4,
        ["no lead", "lead: true"],
    ),
    "two leads": (
        changed("image:1.0\n      files:", "image:1.0\n      lead: true\n      files:").replace(
            "{{ storage_url }}", ""
        ),
        28,
        ["leads master, worker-1, worker-2", "exactly one"],
    ),
    "the same name twice": (
        changed("name: second", "name: first", PLAIN),
        13,
        ["two tasks have the name first", "unique"],
    ),
    "the same key twice": (changed("    image:", "    name: x\n    image:", PLAIN), 9, ["'name' occurs twice"]),
    "tasks and groups": (PLAIN + "  groups:\n  - {name: g, tasks: [{name: t, image: i, command: [c]}]}\n", 7, ["both"]),
    "no tasks": ("workflow:\n  name: empty\n", 1, ["neither tasks nor groups"]),
    "a cycle": (
        changed("args: [", "inputs: [{task: second}]\n    args: [", PLAIN),
        8,
        ["the tasks first, second wait"],
    ),
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
    "an unknown resource": (changed("    image:", "    resource: big\n    image:", PLAIN), 9, ["resource 'big'"]),
    "a code with two actions": (changed("COMPLETE: 3", "COMPLETE: 4", PLAIN), 12, ["exit code 4 has two actions"]),
    "an unknown action": (changed("COMPLETE: 3", "RETRY: 4", PLAIN), 12, ["'RETRY'", "RESCHEDULE"]),
    "a range of codes that is empty": (changed('"4-6,9"', '"6-4"', PLAIN), 12, ["'6-4'", '"0-3,7"']),
    "a duration with an unknown unit": (changed("PT1H30M", "1x", PLAIN), 4, ["'1x'", "30m"]),
    "a size without a number": (changed("1Gi", "much", PLAIN), 6, ["'much'", "64Gi"]),
    "a missing command": (changed("    command: [cat]\n", "", PLAIN), 13, ["the task has no command"]),
    "an input of two kinds": (changed("task: first,", "task: first, url: a,", PLAIN), 17, ["exactly one of"]),
    "an invalid regular expression": (changed('".*"', '"*"', PLAIN), 17, ["regular expression"]),
    "a list without an end": (changed("[bash, -c]", "[bash, -c", PLAIN), 11, ["not valid YAML", "close the list"]),
    "a tab": (changed("    image:", "\timage:", PLAIN), 9, ["not valid YAML", "not with tabs"]),
    "a text with a colon": (changed("name: plain", "name: a: b", PLAIN), 3, ["not valid YAML", "in quotes"]),
    "a text with a star": (changed("[cat]", "[*.txt]", PLAIN), 15, ["not valid YAML", "in quotes"]),
    "a control character": (changed("[cat]", "[cat\a]", PLAIN), 15, [r"'\x07' is not allowed"]),
    "half of a character": (changed("[cat]", r'["\ud83d"]', PLAIN), 15, ["half of a character"]),
    "a reserved character": (changed("[cat]", "[cat\ue000]", PLAIN), 15, [r"'\ue000' is reserved"]),
    "a text in place of a list": (changed("[cat]", "cat", PLAIN), 15, ["task second: command 'cat'", "[a, b]"]),
    "a date in place of a text": (changed("[cat]", "[2026-01-31]", PLAIN), 15, ["2026-01-31 must", "in quotes"]),
    "a key without a value": (changed("image: image", "image:", PLAIN), 9, ["task first: image has no value"]),
    "a name that differs in case": (changed("name: second", "name: FIRST", PLAIN), 13, ["case is ignored", "unique"]),
    "a task with the name of its group": (
        changed("name: master", "name: training").replace("{{ storage_url }}", ""),
        6,
        ["the group training and the task training", "unique"],
    ),
    "no default resource": (changed("default: {cpu", "large: {cpu", PLAIN), 8, ["no default", "one of large"]),
    "a tag that is not closed": (changed("    {% endfor %}\n", ""), 23, ["{% for %} is not closed", "{% endfor %}"]),
    "a host with spaces": (
        changed("{{host:master}}", "{{ host:master }}").replace("{{ storage_url }}", ""),
        30,
        ["{{host:NAME}}, without spaces"],
    ),
    "a token in a string": (
        changed("echo {{output}}", "{{ '{{host:%s}}' % 'a' }}", PLAIN),
        11,
        ["a token is in a string", '"{{" ~ "host:NAME}}"'],
    ),
    "a token in another text of a template": (
        changed("echo {{output}}", "{{ 'a' ~ '{{output}}' }}", PLAIN),
        11,
        ["{{output}} is in a string"],
    ),
    "default values that are indented": (
        changed("default-values:", "  default-values:").replace("  num_", "    num_"),
        18,
        ["'num_gpu'", "default-values must begin in the first column"],
    ),
    "a default value that no template can use": (
        PLAIN + "default-values:\n  a: 1\n  b-c: 2\n",
        20,
        ["'b-c'", "for example b_c"],
    ),
    "a label that Kubernetes does not have": (
        changed("  name: plain\n", "  name: plain\n  labels: {a: b c}\n", PLAIN),
        4,
        ["Kubernetes labels", "'a: b c'"],
    ),
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


def test_a_url_with_credentials_is_refused_and_not_repeated():
    with pytest.raises(UserError, match="storage_url: a URL contains credentials") as refusal:
        parse(MULTI_NODE, "storage_url=s3://key:c3cret@bucket/run")
    assert "c3cret" not in str(refusal.value)
    parse(MULTI_NODE, "storage_url=s3://user@bucket:80/run")


def test_values_that_the_file_does_not_use_are_refused():
    with pytest.raises(UserError, match="did you mean 'num_gpu'"):
        parse(MULTI_NODE, "num_gpus=4", "storage_url=s3://bucket")
    with pytest.raises(UserError, match="must be NAME=VALUE"):
        parse(MULTI_NODE, "num_gpu")


def test_a_line_of_an_error_inside_a_loop_is_that_of_the_template():
    text = changed("image: registry/image:1.0\n      files", "image: []\n      files")
    with pytest.raises(UserError, match=rf"^{FILE}:27: task worker-1: image \[\] must be a string"):
        parse(text, "storage_url=s3://bucket")


@pytest.mark.parametrize(
    ("text", "line", "messages"),
    [
        (changed("{{input:0}}", "{{input:1}}", PLAIN), 16, ["second: {{input:1}}", "its inputs are 0, first"]),
        (changed("echo {{output}}", "{{host:second}}", PLAIN), 11, ["first: {{host:second}}", "choose from first"]),
        (changed("{{output}}", "{{host:mastr}}"), 19, ["master: {{host:mastr}}", "did you mean 'master'"]),
    ],
)
def test_tokens_without_a_value_are_reported_with_their_line(text: str, line: int, messages: list[str]):
    """OSMO accepts such a file and keeps the text of the token."""
    values = ["storage_url=s3://bucket"] if "storage_url" in text else []
    (message,) = parse(text, *values).unresolved
    assert message.startswith(f"{FILE}:{line}: task ")
    for part in messages:
        assert part in message


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
