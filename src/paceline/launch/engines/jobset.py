"""Kubernetes objects of a workflow: JobSets, and ConfigMaps with the files of the tasks.

Groups that depend on each other are one JobSet, so that their order is kept without a program of ours in the cluster.
"""

import base64
import hashlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any

import yaml

from paceline.errors import UserError
from paceline.launch.engines.task_files import TaskFiles, TaskSpec
from paceline.launch.profile import KubernetesSettings
from paceline.launch.spec import File, Group, Resource, Task, Workflow
from paceline.launch.task_runner import STORAGE_CODE
from paceline.launch.workflow import group_by_task, ordered_groups, upstream

INSTANCE = "app.kubernetes.io/instance"
"""Label of all objects of a job."""
STORAGE_ROOT = Path("/paceline")
"""Storage root in the pods."""
_FILES = "/etc/paceline"
_SPEC = "task.json"
_CONTAINER = "task"
# JobSet requires that the name of a pod, JOBSET-TASK-0-0-XXXXX, has at most 63 characters.
_LONGEST_JOBSET, _LONGEST_TASK = 34, 18
_LARGEST_CONFIG_MAP = 2**20
Object = dict[str, Any]


@dataclass(frozen=True)
class Manifest:
    name: str
    """Value of the label INSTANCE."""
    objects: list[Object]
    hosts: dict[str, str]
    """Host name of each task. It begins with the name of the task's Job, followed by -0."""

    @property
    def text(self) -> str:
        return yaml.dump_all(self.objects, Dumper=_Dumper, sort_keys=False, width=120)


def render(
    workflow: Workflow, settings: KubernetesSettings, workflow_id: str, read: Callable[[File], bytes]
) -> Manifest:
    """Return the objects of a job. `read` returns the contents of a file with `localpath`. Raise UserError if the files
    of a task are too large."""
    name = dns_label(workflow_id, _LONGEST_JOBSET)
    job = _Job(workflow, settings, workflow_id, workflow.labels | {INSTANCE: name}, read, {})
    group_of = group_by_task(workflow)
    needs = {group.name: upstream(group, group_of) for group in workflow.task_groups}
    parts = dict[str, list[Group]]()
    for groups in (found := _connected(workflow, needs)):
        jobset = name if len(found) == 1 else dns_label(f"{name}-{groups[0].name}", _LONGEST_JOBSET)
        parts[jobset] = groups
        for task in (task for group in groups for task in group.tasks):
            job.hosts[task.name] = f"{jobset}-{_task_label(task)}-0-0.{jobset}"
    return Manifest(name, [each for item in parts.items() for each in job.objects(*item, needs)], job.hosts)


def dns_label(text: str, longest: int) -> str:
    """Return a DNS label for a name. If it differs from the name, it ends with a hash, so that it is unique."""
    label = re.sub(r"[^a-z0-9-]", "-", text.lower())
    if label == text and len(label) <= longest:
        return label
    return f"{label[: longest - 6].rstrip('-')}-{hashlib.sha256(text.encode()).hexdigest()[:5]}"


def secret_name(credential: str) -> str:
    """Return the name of the Secret that holds a credential: lower-case letters, with - in place of _."""
    return credential.lower().replace("_", "-")


def needs_runner(task: Task) -> bool:
    """Return whether Paceline must copy files of the task from or to a URL, in the container of the task."""
    urls = any(place.url for place in (*task.inputs, *task.outputs))
    return urls or bool(task.checkpoint) or any(given.regex for given in task.inputs)


def _task_label(task: Task) -> str:
    return dns_label(task.name, _LONGEST_TASK)


def _connected(workflow: Workflow, needs: dict[str, set[str]]) -> list[list[Group]]:
    """Return the sets of groups that depend on each other, each in an order in which they can run."""
    names, found = [group.name for group in workflow.task_groups], list[list[Group]]()
    for group in ordered_groups(workflow):
        joined = [part for part in found if needs[group.name] & {each.name for each in part}]
        found = [part for part in found if part not in joined]
        found.append([*(each for part in joined for each in part), group])
    return sorted(found, key=lambda part: min(names.index(group.name) for group in part))


@dataclass(frozen=True)
class _Job:
    workflow: Workflow
    settings: KubernetesSettings
    workflow_id: str
    labels: dict[str, str]
    read: Callable[[File], bytes]
    hosts: dict[str, str]

    def objects(self, name: str, groups: list[Group], needs: dict[str, set[str]]) -> Iterator[Object]:
        """Yield a JobSet, after the ConfigMaps of its tasks."""
        pods = list[_Pod]()
        replicated_jobs = list[Object]()
        for group in groups:
            for task in sorted(group.tasks, key=lambda task: task is not group.lead):
                pod = _Pod(self, f"{name}-{_task_label(task)}", group, task, ordered=len(groups) > 1)
                pods.append(pod)
                if pod.files:
                    yield pod.config_map()
                lead = _task_label(group.lead)
                if not pod.lead and group.barrier:
                    before = [{"name": lead, "status": "Ready"}]
                else:
                    upstream_leads = [_task_label(each.lead) for each in groups if each.name in needs[group.name]]
                    before = [{"name": label, "status": "Complete"} for label in upstream_leads]
                order = {"dependsOn": before} if before else {}
                template = {"spec": pod.job_spec()}
                replicated_jobs.append({"name": _task_label(task), "replicas": 1, **order, "template": template})
        rules = [
            {"name": "failed", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"]}
        ]
        if alone := [_task_label(pod.task) for pod in pods if pod.restarts_alone]:
            exceeded = {"targetReplicatedJobs": alone, "onJobFailureReasons": ["BackoffLimitExceeded"]}
            rules.append({"name": "exceeded", "action": "FailJobSet", **exceeded})
        failure = {"maxRestarts": self.settings.max_reschedules, "restartStrategy": "BlockingRecreate", "rules": rules}
        leads = [_task_label(group.lead) for group in groups]
        yield {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name, "labels": self.labels},
            "spec": {
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "successPolicy": {"operator": "All", "targetReplicatedJobs": leads},
                "failurePolicy": failure,
                "replicatedJobs": replicated_jobs,
            },
        }


class _Pod:
    """The Job of a task, which has one pod."""

    def __init__(self, job: _Job, name: str, group: Group, task: Task, ordered: bool):
        self._job, self._name, self._group, self.task = job, name, group, task
        self.lead = task is group.lead
        self.restarts_alone = not self.lead and group.ignoreNonleadStatus
        # Files are mounted at their paths, so the runner and the resolved command know nothing of them.
        spec = TaskSpec(
            workflow_id=job.workflow_id,
            task=task.model_copy(update={"files": [], "credentials": {}}),
            storage_root=STORAGE_ROOT,
            hosts={each.name: job.hosts[each.name] for each in group.tasks},
            grace_seconds=job.settings.grace_seconds,
        )
        self._place = TaskFiles(spec)
        self._runner = needs_runner(task)
        self.files: dict[str, bytes] = {f"file-{index}": self._contents(file) for index, file in enumerate(task.files)}
        if self._runner:
            self.files[_SPEC] = spec.model_dump_json(exclude_defaults=True, indent=2).encode()
        # Marks the group as completed, for its other tasks and for a JobSet that is started again.
        self._completed = STORAGE_ROOT / "jobs" / job.workflow_id / f".{group.name}.completed" if ordered else None

    def _contents(self, file: File) -> bytes:
        if file.localpath is not None:
            return self._job.read(file)
        if file.base64:
            return base64.b64decode(file.contents or "")
        return self._place.resolve(file.contents or "").encode()

    def config_map(self) -> Object:
        if sum(map(len, self.files.values())) > _LARGEST_CONFIG_MAP:
            raise UserError(
                f"task {self.task.name}: its files have more than 1 MiB, the limit of a ConfigMap; use an input with a "
                "URL, or put them into the image"
            )
        texts, binaries = dict[str, str](), dict[str, str]()
        for key, contents in self.files.items():
            try:
                texts[key] = contents.decode()
            except UnicodeDecodeError:
                binaries[key] = base64.b64encode(contents).decode()
        data = ({"data": texts} if texts else {}) | ({"binaryData": binaries} if binaries else {})
        metadata = {"name": self._name, "labels": self._job.labels}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, **data}

    def job_spec(self) -> Object:
        disrupted = [{"type": "DisruptionTarget", "status": "True"}]
        if self.restarts_alone:
            # The script ends with 0 where a failure is ignored. After any other end, the pod is started again.
            rules = [{"action": "Ignore", "onPodConditions": disrupted}]
        else:
            # A counted failure fails the Job at once, and JobSet starts all tasks of the group again.
            codes = {"containerName": _CONTAINER, "operator": "NotIn", "values": self._codes("RESCHEDULE") or [0]}
            rules = [{"action": "Count", "onPodConditions": disrupted}, {"action": "FailJob", "onExitCodes": codes}]
        timeout = self._job.workflow.timeout
        deadline = dict[str, int]()
        if timeout.exec_timeout is not None:
            # The time in which a pod waits for a node counts.
            deadline["activeDeadlineSeconds"] = max(1, math.ceil(timeout.exec_timeout + (timeout.queue_timeout or 0)))
        return {
            "completionMode": "Indexed",
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": self._job.settings.max_reschedules if self.restarts_alone else 0,
            "podFailurePolicy": {"rules": rules},
            **deadline,
            "template": {"metadata": {"labels": self._job.labels}, "spec": self._pod_spec()},
        }

    def _codes(self, action: str) -> list[int]:
        # The exit code of the runner for a failed transfer is a failure, also if exitActions says otherwise.
        own = STORAGE_CODE if self._runner else None
        return [code for code in range(1, 256) if self.task.action(code) == action and code != own]

    def _pod_spec(self) -> Object:
        settings, task = self._job.settings, self.task
        resource = self._job.workflow.resource(task)
        selector = settings.node_selector | (settings.platforms[resource.platform] if resource.platform else {})
        volumes, mounts = self._volumes(resource)
        container = {
            "name": _CONTAINER,
            "image": task.image,
            "command": ["sh", "-c", _literal(self._script()), _CONTAINER],
            "args": [_literal(part) for part in self._command()],
            "env": self._variables(resource),
            **({"envFrom": [{"secretRef": {"name": settings.storage_secret}}]} if settings.storage_secret else {}),
            "resources": _resources(resource, settings.gpu_resource),
            "volumeMounts": mounts,
            **({"securityContext": {"privileged": True}} if task.privileged else {}),
        }
        return {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": math.ceil(settings.grace_seconds),
            **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if task.hostNetwork else {}),
            **({"nodeSelector": selector} if selector else {}),
            **({"affinity": _avoid(resource.nodesExcluded)} if resource.nodesExcluded else {}),
            **({"tolerations": settings.tolerations} if settings.tolerations else {}),
            **({"serviceAccountName": settings.service_account} if settings.service_account else {}),
            **({"securityContext": {"fsGroup": settings.fs_group}} if settings.fs_group is not None else {}),
            **({"imagePullSecrets": [{"name": settings.image_pull_secret}]} if settings.image_pull_secret else {}),
            "containers": [container],
            "volumes": volumes,
        }

    def _command(self) -> list[str]:
        if self._runner:
            return ["python", "-m", "paceline.launch.task_runner", "run", f"{_FILES}/{_SPEC}"]
        return self._place.command()

    def _script(self) -> str:
        """Return the shell script that runs the task's command, its arguments, and ends with the exit code that
        Kubernetes must see."""
        place, completed = self._place, quote(str(self._completed))
        lines = [f"[ ! -e {completed} ] || exit 0"] if self._completed else []
        lines.append(f"mkdir -p {_quoted(place.work, place.output, place.directory / 'input')}")
        lines.append(f"cd {_quoted(place.work)}")
        for index, file in enumerate(self.task.files):
            if not file.path.startswith("/"):
                lines.append(f"mkdir -p {_quoted(PurePosixPath(file.path).parent)}")
                lines.append(f"cp {_FILES}/file-{index} {_quoted(file.path)}")
        if self._runner:
            lines.append(f"python -m paceline.launch.task_runner prepare {_FILES}/{_SPEC} || exit")
        else:
            for index, given in enumerate(self.task.inputs):
                source = place.directory.parents[1] / given.source(place.spec.workflow_id)
                lines.append(f"ln -sfn {_quoted(source, place.input(index))}")
        mapped = self._codes("COMPLETE")
        if not mapped and not self.restarts_alone and not self._completed:
            return "\n".join([*lines, 'exec "$@"'])
        lines += ["trap 'kill -TERM $pid' TERM", '"$@" &', "pid=$!"]
        if self._completed and not self.lead:
            lines.append(f"{{ until [ -e {completed} ]; do sleep 5; done; kill -TERM $pid; }} &")
        # A signal interrupts wait.
        lines.append("while wait $pid; code=$?; kill -0 $pid 2>/dev/null; do :; done")
        if mapped:
            lines.append(f"case $code in {'|'.join(map(str, mapped))}) code=0 ;; esac")
        if self._completed:
            lines.append(f"[ $code -ne 0 ] || touch {completed}" if self.lead else f"[ ! -e {completed} ] || code=0")
        if self.restarts_alone:
            kept = "|".join(map(str, [0, *self._codes("RESCHEDULE")]))
            lines.append(f'case $code in {kept}) ;; *) echo "paceline: exit code $code is ignored"; code=0 ;; esac')
        return "\n".join([*lines, "exit $code"])

    def _variables(self, resource: Resource) -> list[Object]:
        values = {"PYTHONUNBUFFERED": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if resource.gpu == 0 else {})
        variables: list[Object] = [
            {"name": name, "value": _literal(value)} for name, value in (values | self._place.environment()).items()
        ]
        for credential, keys in self.task.credentials.items():
            if not isinstance(keys, str):
                for name, key in keys.items():
                    secret = {"secretKeyRef": {"name": secret_name(credential), "key": key}}
                    variables.append({"name": name, "valueFrom": secret})
        return variables

    def _volumes(self, resource: Resource) -> tuple[list[Object], list[Object]]:
        claim = self._job.settings.storage_claim
        storage = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
        volumes: list[Object] = [{"name": "storage", **storage}]
        mounts: list[Object] = [{"name": "storage", "mountPath": str(STORAGE_ROOT)}]
        if self.files:
            volumes.append({"name": "files", "configMap": {"name": self._name, "defaultMode": 0o755}})
            mounts.append({"name": "files", "mountPath": _FILES})
        for index, file in enumerate(self.task.files):
            if file.path.startswith("/"):
                mounts.append({"name": "files", "mountPath": file.path, "subPath": f"file-{index}"})
        for index, (credential, place) in enumerate(self.task.credentials.items()):
            if isinstance(place, str):
                volumes.append({"name": f"secret-{index}", "secret": {"secretName": secret_name(credential)}})
                mounts.append({"name": f"secret-{index}", "mountPath": place, "readOnly": True})
        for index, mount in enumerate(self.task.volumeMounts):
            source, target, read_only = split_mount(mount)
            volumes.append({"name": f"host-{index}", "hostPath": {"path": source}})
            mounts.append({"name": f"host-{index}", "mountPath": target, **({"readOnly": True} if read_only else {})})
        if resource.gpu and all(mount["mountPath"] != "/dev/shm" for mount in mounts):
            # The default of 64 MiB is too small for NCCL.
            volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
            mounts.append({"name": "shm", "mountPath": "/dev/shm"})
        return volumes, mounts


def split_mount(mount: str) -> tuple[str, str, bool]:
    """Return the path on the node, the path in the container, and whether it is read-only, of SOURCE[:TARGET[:ro]]."""
    source, _, rest = mount.partition(":")
    target, _, mode = rest.partition(":")
    return source, target or source, mode == "ro"


def _quoted(*paths: object) -> str:
    return " ".join(quote(str(path)) for path in paths)


def _literal(text: str) -> str:
    """Return a text that Kubernetes does not expand: $(NAME) is a reference to a variable."""
    return text.replace("$(", "$$(")


def _resources(resource: Resource, gpu_resource: str) -> Object:
    requests, limits = dict[str, str](), dict[str, str]()
    if resource.cpu is not None:
        requests["cpu"] = f"{resource.cpu:g}"
    for name, size in (("memory", resource.memory), ("ephemeral-storage", resource.storage)):
        if size is not None:
            requests[name] = limits[name] = size.removesuffix("B").replace("K", "k").replace("ki", "Ki")
    if resource.gpu:
        limits[gpu_resource] = str(resource.gpu)
    return ({"requests": requests} if requests else {}) | ({"limits": limits} if limits else {})


def _avoid(nodes: list[str]) -> Object:
    expressions = [{"key": "kubernetes.io/hostname", "operator": "NotIn", "values": nodes}]
    terms = {"nodeSelectorTerms": [{"matchExpressions": expressions}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


class _Dumper(yaml.SafeDumper):
    """Writes YAML that kubectl reads as the same values: PyYAML and kubectl differ in which words and numbers need
    quotes."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def analyze_scalar(self, scalar: str) -> Any:
        analysis = super().analyze_scalar(scalar)
        if all(line.isprintable() for line in scalar.split("\n")):
            # PyYAML writes lines that end with a space, as many scripts have, as one quoted line.
            analysis.allow_block = True
        return analysis


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None if re.fullmatch(r"[A-Za-z_/][\w./-]+", text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _string)
