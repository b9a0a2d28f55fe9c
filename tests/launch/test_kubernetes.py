"""The engine kubernetes: its manifests, checked against JobSet's types and by kubectl. There is no cluster here."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api.models.io_k8s_api_core_v1_config_map import IoK8sApiCoreV1ConfigMap
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from rich.console import Console

from paceline.errors import UserError
from paceline.launch.engines import kubernetes
from paceline.launch.engines.engine import LaunchOptions
from paceline.launch.engines.jobset import dns_label
from paceline.launch.job_record import find_job
from paceline.launch.profile import KubernetesSettings, Profile, read_profile
from paceline.launch.task_runner import STORAGE_CODE
from paceline.launch.workflow import parse_workflow, read_workflow
from tests.forked import paceline

GOLDEN = Path(__file__).parent / "golden"
WORKFLOWS = Path(__file__).parents[2] / "workflows"
CLAIM = Profile(kubernetes=KubernetesSettings(storage_claim="shared"))
# CI runs as root and must have kubectl, see scripts/node_packages.
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None and os.getuid() != 0, reason="kubectl is missing")


def objects(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


def described(text: str, profile: Profile = CLAIM) -> list[dict[str, Any]]:
    return objects(kubernetes.describe(parse_workflow(text, Path("file.yaml")), profile))


def single(lines: str, head: str = "") -> str:
    """Return a workflow with one task."""
    task = "".join(f"    {line}\n" for line in lines.splitlines())
    return f"workflow:\n  name: w\n{head}  tasks:\n  - name: t\n    image: i\n    command: [echo]\n{task}"


def group(keys: str, lead: str = "", worker: str = "", more: str = "") -> str:
    """Return a workflow with a group of a lead and a worker."""
    return (
        f"workflow:\n  name: w\n  groups:\n  - name: g\n{keys}    tasks:\n"
        f"    - {{name: lead, lead: true, image: i, command: [sh, -c], {lead}}}\n"
        f"    - {{name: worker, image: i, command: [sh, -c], {worker}}}\n{more}"
    )


def jobs(manifest: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the jobs of all JobSets by name."""
    return {job["name"]: job for each in manifest if each["kind"] == "JobSet" for job in each["spec"]["replicatedJobs"]}


def container(manifest: list[dict[str, Any]], task: str) -> dict[str, Any]:
    return jobs(manifest)[task]["template"]["spec"]["template"]["spec"]["containers"][0]


def check_types(manifest: list[dict[str, Any]]) -> None:
    """Check that all values have the types of the Kubernetes API, and that all keys are known to it."""
    kinds = {"JobSet": JobsetV1alpha2JobSet, "ConfigMap": IoK8sApiCoreV1ConfigMap}
    for each in manifest:
        read = kinds[each["kind"]].from_dict(each)
        # Unknown keys are lost.
        assert read is not None
        assert json.loads(json.dumps(read.to_dict())) == each


def check_names(manifest: list[dict[str, Any]]) -> None:
    """Check the names as the webhook of JobSet does."""
    for jobset in (each for each in manifest if each["kind"] == "JobSet"):
        for job in jobset["spec"]["replicatedJobs"]:
            assert len(f"{jobset['metadata']['name']}-{job['name']}-0-0-abcde") <= 63
            assert job["name"].strip("-").replace("-", "").isalnum()
            assert job["name"] == job["name"].lower()


@pytest.fixture(scope="module")
def features() -> str:
    """The manifest of a workflow with all keys that the engine honors."""
    return kubernetes.describe(read_workflow(GOLDEN / "features.yaml"), read_profile(GOLDEN / "features_profile.yaml"))


def test_manifest_has_not_changed(features: str):
    """After a wanted change, write it again with paceline launch features.yaml --dry-run and the profile."""
    assert features == (GOLDEN / "kubernetes_features.yaml").read_text().rstrip()


@pytest.mark.parametrize("name", sorted(path.name for path in WORKFLOWS.glob("*.yaml")))
def test_shipped_files_have_the_types_of_jobset(name: str):
    manifest = objects(kubernetes.describe(read_workflow(WORKFLOWS / name), CLAIM))
    check_types(manifest)
    check_names(manifest)


def test_all_features_have_the_types_of_jobset(features: str):
    check_types(objects(features))
    check_names(objects(features))


@needs_kubectl
def test_kubectl_reads_the_same_values(features: str):
    """kubectl's YAML differs from PyYAML's, for example y is true."""
    command = ["kubectl", "label", "--local", "--dry-run=client", "--filename=-", "checked=yes", "--output=json"]
    done = subprocess.run(command, input=features, capture_output=True, text=True, check=True)
    decoder, rest, read = json.JSONDecoder(), done.stdout.lstrip(), []
    while rest:
        value, end = decoder.raw_decode(rest)
        read.append(value)
        rest = rest[end:].lstrip()
    for value in read:
        assert value["metadata"]["labels"].pop("checked") == "yes"
    assert read == objects(features)


def test_long_and_similar_names_stay_unique():
    names = ["a" * 99, "a" * 98 + "b", "Worker_1", "worker-2", "worker_3"]
    tasks = "".join(f"  - {{name: {name}, image: i, command: [echo]}}\n" for name in names)
    manifest = described(f"workflow:\n  name: {'w' * 90}\n  tasks:\n{tasks}")
    check_names(manifest)
    assert len({each["metadata"]["name"] for each in manifest}) == len(names)
    assert len({dns_label(name, 18) for name in names}) == len(names)
    assert dns_label("worker-2", 18) == "worker-2"


def test_hosts_are_the_names_of_pods():
    manifest = described(group("", worker="args: ['{{host:lead}}']"))
    jobset = next(each for each in manifest if each["kind"] == "JobSet")["metadata"]["name"]
    assert container(manifest, "worker")["args"][-1] == f"{jobset}-lead-0-0.{jobset}"


def test_groups_that_depend_on_each_other_are_one_jobset():
    tasks = "".join(
        f"  - {{name: {name}, image: i, command: [echo], inputs: [{', '.join(f'{{task: {one}}}' for one in needs)}]}}\n"
        for name, needs in (("d", "bc"), ("b", "a"), ("c", "a"), ("a", ""), ("x", ""))
    )
    manifest = described(f"workflow:\n  name: w\n  tasks:\n{tasks}")
    sets = [list(jobs([each])) for each in manifest if each["kind"] == "JobSet"]
    assert sets == [["a", "b", "c", "d"], ["x"]]
    assert jobs(manifest)["d"]["dependsOn"] == [{"name": name, "status": "Complete"} for name in "bc"]
    assert "dependsOn" not in jobs(manifest)["a"]


def test_credentials_are_references():
    os.environ["SECRET_TOKEN"] = "value-of-the-token"
    try:
        lines = "credentials:\n  my_login: {SECRET_TOKEN: token}\n  key: /etc/key"
        text = kubernetes.describe(parse_workflow(single(lines), Path("f")), CLAIM)
    finally:
        del os.environ["SECRET_TOKEN"]
    assert "value-of-the-token" not in text
    reference = {"secretKeyRef": {"name": "my-login", "key": "token"}}
    assert {"name": "SECRET_TOKEN", "valueFrom": reference} in container(objects(text), "t")["env"]
    assert "secretName: key" in text


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("pool", single("", "  pool: a\n")),
        ("timeout.queue_timeout", single("", "  timeout: {queue_timeout: 1h}\n")),
        ("inputs.dataset", single("inputs: [{dataset: {name: d}}]")),
        ("outputs.dataset", single("outputs: [{dataset: {name: d}}]")),
        ("file://", single("outputs: [{url: file:///data}]")),
        ("kpis", single("kpis: [{index: a, path: b}]")),
        ("exitActions", single("exitActions: {RESCHEDULE: '0'}")),
        ("credentials.a", single("credentials: {a: relative}")),
        ("credentials.ä", single("credentials: {ä: /etc/a}")),
        ("volumeMounts", single("volumeMounts: [data]")),
        ("files.path", single("files: [{path: '/a:b', contents: c}]")),
        ("platform", single("resource: r", "  resources: {r: {platform: dgx}}\n")),
        ("topology", single("resource: r", "  resources: {r: {topology: [{key: zone}]}}\n")),
    ],
)
def test_what_cannot_be_honored_is_refused_by_name(key: str, text: str):
    with pytest.raises(UserError, match=rf"f\.yaml: .*kubernetes does not support {key}"):
        kubernetes.describe(parse_workflow(text, Path("f.yaml")), CLAIM)


def test_outputs_are_shared_only_by_a_claim():
    text = "workflow:\n  name: w\n  tasks:\n  - {name: a, image: i, command: [echo]}\n"
    text += "  - {name: b, image: i, command: [echo], inputs: [{task: a}]}\n"
    described(text)
    with pytest.raises(UserError, match=r"task b: .* inputs.task: set kubernetes.storage_claim"):
        described(text, Profile())


def test_files_above_the_limit_of_a_config_map_are_refused():
    large = "x" * 600_000
    with pytest.raises(UserError, match="task t: its files have more than 1 MiB"):
        described(single(f"files: [{{path: /a, contents: {large}}}, {{path: /b, contents: {large}}}]"))


class Pod:
    """Runs the command of a container on this machine, with directories in place of the volumes."""

    def __init__(self, manifest: list[dict[str, Any]], task: str, directory: Path):
        self.storage, files = directory / "storage", directory / task
        files.mkdir(parents=True, exist_ok=True)

        def moved(text: str) -> str:
            return re.sub(r"(?<!/etc)/paceline\b", str(self.storage), text).replace("/etc/paceline", str(files))

        for each in (each for each in manifest if each["metadata"]["name"].endswith(f"-{task}")):
            for key, value in each.get("data", {}).items():
                (files / key).write_text(moved(value))
        spec = container(manifest, task)
        self._command = [moved(part) for part in (*spec["command"], *spec["args"])]
        values = {each["name"]: each["value"] for each in spec["env"] if "value" in each}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = os.environ | values | {"PATH": path}

    @contextmanager
    def started(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Start the container's command. At the end all its processes are killed, as those of a container."""
        command = [*self._command, *arguments]
        with subprocess.Popen(
            command, env=self._environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def run(self, *arguments: str) -> int:
        with self.started(*arguments) as process:
            return process.wait(60)


ACTIONS = "exitActions: {COMPLETE: '0,3', RESCHEDULE: '7,143'}"


@pytest.mark.parametrize(
    ("task", "keys", "code", "seen"),
    [
        ("lead", "", 0, 0),
        ("lead", "", 3, 0),
        ("lead", "", 1, 1),
        ("lead", "", 7, 7),
        ("worker", "", 3, 0),
        ("worker", "", 1, 0),
        ("worker", "", 7, 7),
        ("worker", "    ignoreNonleadStatus: false\n", 1, 1),
    ],
)
def test_exit_codes_become_those_of_kubernetes(tmp_path: Path, task: str, keys: str, code: int, seen: int):
    manifest = described(group(keys, ACTIONS, ACTIONS))
    assert Pod(manifest, task, tmp_path).run(f"exit {code}") == seen


def test_failure_policy_follows_the_exit_actions():
    manifest = described(group("", ACTIONS, ACTIONS))
    lead, worker = (jobs(manifest)[name]["template"]["spec"] for name in ("lead", "worker"))
    values = {rule["action"]: rule.get("onExitCodes", {}).get("values") for rule in lead["podFailurePolicy"]["rules"]}
    assert values["FailJob"] == [7, 143]
    assert lead["backoffLimit"] == 0
    assert worker["backoffLimit"] == Profile().kubernetes.max_reschedules


def test_sigterm_reaches_the_command_of_a_worker(tmp_path: Path):
    pod = Pod(described(group("", worker=ACTIONS)), "worker", tmp_path)
    with pod.started("trap 'sleep 0.2; exit 7' TERM; echo ready; while :; do sleep 0.1; done") as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(30) == 7


@pytest.fixture
def chain() -> list[dict[str, Any]]:
    """A group of two tasks, and a task that needs the output of its lead."""
    after = "  - name: h\n    tasks:\n    - {name: after, image: i, command: [sh, -c], inputs: [{task: lead}]}\n"
    return described(group("", more=after))


def test_end_of_a_lead_ends_its_group_while_others_run(tmp_path: Path, chain: list[dict[str, Any]]):
    with Pod(chain, "worker", tmp_path).started("echo ready; exec sleep 100") as worker:
        assert worker.stdout
        assert worker.stdout.readline() == "ready\n"
        assert Pod(chain, "lead", tmp_path).run("echo result > ../output/file") == 0
        assert worker.wait(30) == 0
    link = tmp_path / "storage" / "jobs" / "w-1" / "after" / "input" / "0"
    assert Pod(chain, "after", tmp_path).run(f"grep result {link}/file") == 0


def test_completed_group_does_not_run_again(tmp_path: Path, chain: list[dict[str, Any]]):
    assert Pod(chain, "lead", tmp_path).run("exit 1") == 1
    assert Pod(chain, "lead", tmp_path).run("exit 0") == 0
    assert Pod(chain, "lead", tmp_path).run("exit 1") == 0


COPIES = """\
inputs: [{url: 'file:///paceline/in'}]
outputs: [{url: 'file:///paceline/out'}]
files: [{path: data/x, contents: text}]
args: [-c, 'cat {{input:0}}/a data/x > {{output}}/b']
exitActions: {COMPLETE: 0-255}
"""


def test_runner_copies_inputs_and_outputs_in_the_pod(tmp_path: Path):
    pod = Pod(described(single(COPIES).replace("[echo]", "[sh]")), "t", tmp_path)
    (pod.storage / "in").mkdir(parents=True)
    (pod.storage / "in" / "a").write_text("input ")
    assert pod.run() == 0
    assert (pod.storage / "out" / "b").read_text() == "input text"


def test_output_that_cannot_be_stored_fails_the_pod(tmp_path: Path):
    pod = Pod(described(single(COPIES).replace("[echo]", "[sh]")), "t", tmp_path)
    pod.storage.mkdir()
    (pod.storage / "out").write_text("not a directory")
    assert pod.run() == STORAGE_CODE


@pytest.fixture
def no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration of kubectl whose server does not answer."""
    cluster = {"name": "none", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "none", "context": {"cluster": "none", "user": ""}}
    config = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context]}
    (tmp_path / "config").write_text(json.dumps(config | {"current-context": "none"}))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))


@needs_kubectl
@pytest.mark.usefixtures("no_server")
@pytest.mark.timeout(120)
def test_kubectl_knows_the_commands(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """All commands reach the server's address, which refuses the connection: kubectl knows their options."""
    profile = Profile(storage_root=tmp_path, kubernetes=KubernetesSettings(context="none"))
    file = parse_workflow(single("environment: {TENSORBOARD_PORT: '6006'}"), Path("f.yaml"))
    with pytest.raises(UserError, match="kubectl has failed with exit code 1; the manifest is"):
        kubernetes.launch(file, profile, Console(), LaunchOptions())
    assert "127.0.0.1:1" in capfd.readouterr().err
    job = find_job(next((tmp_path / "jobs").iterdir()).name, profile)
    for action in (
        lambda: kubernetes.status(job, Console()),
        lambda: kubernetes.logs(job, None, False),
        lambda: kubernetes.logs(job, "t", True),
        lambda: kubernetes.cancel(job),
        lambda: kubernetes.tensorboard(job),
    ):
        assert action() == 1
        assert "refused" in capfd.readouterr().err


def test_missing_kubectl_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    file = parse_workflow(single(""), Path("f.yaml"))
    with pytest.raises(UserError, match="cannot run kubectl: No such file or directory; install it"):
        kubernetes.launch(file, Profile(storage_root=tmp_path), Console(), LaunchOptions())


def test_dry_run_on_the_command_line(tmp_path: Path):
    done = paceline("launch", str(WORKFLOWS / "train_one_node.yaml"), "--on", "kubernetes", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0
    assert "kind: JobSet" in done.stdout
    assert not list(tmp_path.iterdir())
