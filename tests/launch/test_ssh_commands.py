"""Commands, profile and choice of hosts of the engine ssh, without a host."""

from pathlib import Path

import pytest
from rich.console import Console

from paceline.errors import UserError
from paceline.launch.engines import ssh
from paceline.launch.engines.engine import LaunchOptions
from paceline.launch.engines.placement import Host, Placement
from paceline.launch.engines.resources import Amounts
from paceline.launch.profile import Profile, read_profile
from paceline.launch.spec import Workflow
from paceline.launch.workflow import parse_workflow

FILE = """\
version: 2
workflow:
  name: example
  groups:
  - name: training
    tasks:
    - name: master
      lead: true
      image: paceline
      command: [bash, train.sh]
      credentials: {storage: {HOME: key}}
      files: [{path: train.sh, localpath: not_read.sh}]
    - name: worker
      image: paceline
      command: [echo, "{{host:master}}"]
  - name: exporting
    tasks:
    - name: export
      image: paceline
      command: [ls, "{{input:0}}"]
      inputs: [{task: master}]
"""
PROFILE = """\
storage_root: /data
environment: /opt/paceline
ssh:
  sync: [{source: policies/, target: /opt/policies, exclude: [.git]}]
"""
HOSTS = """\
  hosts:
  - {name: a, address: 10.0.0.1, user: robot, port: 2222, identity_file: /keys/a, storage_root: /disk}
  - {name: b, environment: /venv}
  options: [-J, gateway]
"""


def describe(folder: Path, profile: str) -> str:
    (folder / "profile.yaml").write_text(profile)
    text = ssh.describe(parse_workflow(FILE, Path("file.yaml")), read_profile(folder / "profile.yaml"))
    return text.split("inputs: [{task: master}]\n\n", 1)[1]


SSH = "-T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=3 -o ServerAliveCountMax=4 -o ControlPath=none"
RUN = "-P -m paceline.launch.engines.ssh_task"
INPUT = "# Standard input, to which credentials and the contents of localpath files are added:"
MASTER = (
    '"task":{"name":"master","lead":true,"image":"paceline","command":["bash","train.sh"],'
    '"files":[{"path":"train.sh","localpath":"not_read.sh"}],'
    '"credentials":{"storage":{"HOME":"key"}}}'
)
WORKER = '"task":{"name":"worker","image":"paceline","command":["echo","{{host:master}}"]}'
EXPORT = '"task":{"name":"export","image":"paceline","command":["ls","{{input:0}}"],"inputs":[{"task":"master"}]}'

PLACEHOLDERS = f"""\
rsync --archive --mkpath --exclude=.git -e 'ssh {SSH}' -- policies/ host1:/opt/policies
rsync --archive --mkpath --exclude=.git -e 'ssh {SSH}' -- policies/ host2:/opt/policies
# training: master (lead)
ssh {SSH} host1 '/opt/paceline/bin/python {RUN} prepare'
ssh {SSH} host1 '/opt/paceline/bin/python {RUN} run'
{INPUT}
# {{"workflow_id":"example-1",{MASTER},"storage_root":"/data","venv":"/opt/paceline",\
"hosts":{{"master":"host1","worker":"host2"}},"silence_seconds":15.0}}
# training: worker
ssh {SSH} host2 '/opt/paceline/bin/python {RUN} prepare'
ssh {SSH} host2 '/opt/paceline/bin/python {RUN} run'
{INPUT}
# {{"workflow_id":"example-1",{WORKER},"storage_root":"/data","venv":"/opt/paceline",\
"hosts":{{"master":"host1","worker":"host2"}},"silence_seconds":15.0}}
# exporting after training: export
ssh {SSH} host1 '/opt/paceline/bin/python {RUN} prepare'
ssh {SSH} host1 '/opt/paceline/bin/python {RUN} run'
{INPUT}
# {{"workflow_id":"example-1",{EXPORT},"storage_root":"/data","venv":"/opt/paceline",\
"hosts":{{"export":"host1"}},"silence_seconds":15.0}}"""

A = f"-J gateway {SSH} -l robot -p 2222 -i /keys/a"
NAMED = f"""\
rsync --archive --mkpath --exclude=.git -e 'ssh {A}' -- policies/ 10.0.0.1:/opt/policies
rsync --archive --mkpath --exclude=.git -e 'ssh -J gateway {SSH}' -- policies/ b:/opt/policies
# training: master (lead)
ssh {A} 10.0.0.1 '/opt/paceline/bin/python {RUN} prepare'
ssh {A} 10.0.0.1 '/opt/paceline/bin/python {RUN} run'
{INPUT}
# {{"workflow_id":"example-1",{MASTER},"storage_root":"/disk","venv":"/opt/paceline",\
"hosts":{{"master":"10.0.0.1","worker":"b"}},"silence_seconds":15.0}}
# training: worker
ssh -J gateway {SSH} b '/venv/bin/python {RUN} prepare'
ssh -J gateway {SSH} b '/venv/bin/python {RUN} run'
{INPUT}
# {{"workflow_id":"example-1",{WORKER},"storage_root":"/data","venv":"/venv",\
"hosts":{{"master":"10.0.0.1","worker":"b"}},"silence_seconds":15.0}}
# exporting after training: export
ssh {A} 10.0.0.1 '/opt/paceline/bin/python {RUN} prepare'
ssh {A} 10.0.0.1 '/opt/paceline/bin/python {RUN} run'
{INPUT}
# {{"workflow_id":"example-1",{EXPORT},"storage_root":"/disk","venv":"/opt/paceline",\
"hosts":{{"export":"10.0.0.1"}},"silence_seconds":15.0}}"""


@pytest.mark.parametrize(("profile", "expected"), [(PROFILE, PLACEHOLDERS), (PROFILE + HOSTS, NAMED)])
def test_a_dry_run_prints_the_commands_and_what_the_hosts_receive(profile: str, expected: str, tmp_path: Path):
    assert describe(tmp_path, profile) == expected


def test_a_dry_run_shows_a_task_after_its_inputs_in_any_order_of_the_file():
    tasks = (
        "  - {name: last, image: i, command: [cat], inputs: [{task: first}]}\n  - {name: first, image: i, command: [a]}"
    )
    printed = ssh.describe(parse_workflow(f"workflow:\n  name: w\n  tasks:\n{tasks}", Path("file.yaml")), Profile())
    assert [line for line in printed.splitlines() if line.startswith(("# first", "# last"))] == [
        *("# first: first", "# last after first: last"),
    ]


def host(name: str, cpu: float = 0.0, gpus: int = 0) -> Host:
    return Host(name, Amounts(cpu, gpus), [str(index) for index in range(gpus)])


def workflow(*names: str, **resource: object) -> Workflow:
    tasks = [{"name": name, "image": "i", "command": ["true"], "lead": name == names[0]} for name in names]
    groups = [{"name": "together", "tasks": tasks}]
    return Workflow.model_validate({"name": "w", "groups": groups, "resources": {"default": resource}})


def placed(placement: Placement, *names: str) -> list[str]:
    return [placement.host(name).name for name in names]


def test_each_task_has_a_host_until_all_hosts_have_one():
    flow = workflow("a", "b", "c", gpu=1)
    placement = Placement([host("x", gpus=2), host("y", gpus=2)], flow, tasks_per_host=2, oversubscribe=False)
    assert placement.reserve(flow.task_groups[0])
    assert placed(placement, "a", "b", "c") == ["x", "y", "x"]
    variables = [placement.variables(task) for task in flow.task_groups[0].tasks]
    assert variables == [{"CUDA_VISIBLE_DEVICES": gpus} for gpus in ("0", "0", "1")]
    # All hosts are in use; afterwards they are free again.
    assert not placement.reserve(workflow("d", "e", gpu=1).task_groups[0])
    placement.release(flow.task_groups[0])
    assert placement.reserve(workflow("d", "e", gpu=1).task_groups[0])


def test_a_task_moves_to_a_host_that_is_not_lost():
    flow = workflow("a", "b")
    hosts = [host("x"), host("y"), host("z")]
    placement = Placement(hosts, flow, tasks_per_host=1, oversubscribe=False)
    assert placement.reserve(flow.task_groups[0])
    for lost, expected in ((hosts[0], "z"), (hosts[2], "z")):
        lost.is_lost = True
        placement.move(flow.task_groups[0].tasks[0])
        assert placed(placement, "a", "b") == [expected, "y"]


def test_a_host_that_a_resource_excludes_is_not_used():
    flow = workflow("a", "b", nodesExcluded=["x"])
    placement = Placement([host("x"), host("y"), host("z")], flow, tasks_per_host=1, oversubscribe=True)
    placement.reserve(flow.task_groups[0])
    assert placed(placement, "a", "b") == ["y", "z"]


def test_a_dry_run_refuses_a_file_that_excludes_all_hosts(tmp_path: Path):
    (tmp_path / "profile.yaml").write_text(PROFILE + HOSTS)
    excluding = FILE.replace("  groups:", "  resources: {default: {nodesExcluded: [a, b]}}\n  groups:")
    with pytest.raises(UserError, match="nodesExcluded"):
        ssh.describe(parse_workflow(excluding, Path("file.yaml")), read_profile(tmp_path / "profile.yaml"))


def test_a_task_runs_where_its_inputs_are():
    tasks = [{"name": name, "image": "i", "command": ["true"]} for name in ("first", "second", "third")]
    tasks[2]["inputs"] = [{"task": "second"}]
    flow = Workflow.model_validate({"name": "w", "tasks": tasks})
    first, second, third = flow.task_groups
    placement = Placement([host("x"), host("y")], flow, tasks_per_host=1, oversubscribe=False)
    assert placement.reserve(first)
    assert placement.reserve(second)
    placement.release(first)
    placement.release(second)
    assert placement.reserve(third)
    assert placed(placement, "third") == ["y"]


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        (workflow("a", "b", "c"), "has 3 tasks for the hosts x, y, with ssh.tasks_per_host 1; add hosts"),
        (workflow("a", "b", gpu=3), r"resources, or add --oversubscribe\n  needed: a: 3 GPUs"),
        (workflow("a", cpu=8), "hosts: x: 4 CPUs, 2 GPUs; y: 4 CPUs, 2 GPUs"),
    ],
)
def test_a_group_that_does_not_fit_is_refused(flow: Workflow, message: str):
    hosts = [host("x", 4, 2), host("y", 4, 2)]
    with pytest.raises(UserError, match=message):
        Placement(hosts, flow, tasks_per_host=1, oversubscribe=False).check(flow.task_groups[0])
    Placement(hosts, flow, tasks_per_host=1, oversubscribe=True).check(flow.task_groups[0])


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("{name: -oProxyCommand=x}", "profile.yaml:2: "),
        ("{name: a}, {name: a}", "two hosts have the name or address a"),
        ("{name: a}, {name: b, address: a}", "two hosts have the name or address a"),
        ("{name: a, storage_root: relative}", "must be an absolute path"),
        ("{name: a, port: 0}", "profile.yaml:2: "),
    ],
)
def test_a_wrong_host_is_refused_with_its_line(host: str, message: str, tmp_path: Path):
    (tmp_path / "profile.yaml").write_text(f"ssh:\n  hosts: [{host}]\n")
    with pytest.raises(UserError, match=message):
        read_profile(tmp_path / "profile.yaml")


def test_without_hosts_nothing_is_launched():
    file = parse_workflow(FILE.replace("localpath: not_read.sh", "contents: x"), Path("file.yaml"))
    with pytest.raises(UserError, match="add them to the profile"):
        ssh.launch(file, Profile(), Console(quiet=True), LaunchOptions())
