"""Choose hosts and GPUs for the tasks of a workflow."""

import math
from dataclasses import dataclass, field

from paceline.errors import UserError
from paceline.launch.engines.resources import Amounts, task_needs
from paceline.launch.spec import Group, Task, Workflow


@dataclass
class Host:
    """A host and what runs on it."""

    name: str
    have: Amounts = field(default_factory=Amounts)
    gpus: list[str] = field(default_factory=list)
    """Values for CUDA_VISIBLE_DEVICES."""
    needs: dict[str, Amounts] = field(default_factory=dict)
    """Resources that the tasks on the host need, by the name of the task."""
    is_lost: bool = False


class Placement:
    """Chooses hosts and GPUs for tasks."""

    def __init__(
        self, hosts: list[Host], workflow: Workflow, tasks_per_host: float = math.inf, oversubscribe: bool = False
    ):
        self.hosts, self._workflow = hosts, workflow
        self._tasks_per_host, self._oversubscribe = tasks_per_host, oversubscribe
        self._host_of = dict[str, Host]()
        """Host of each task; the last one if the task has ended."""
        self._gpus_of = dict[str, list[str]]()

    def host(self, task: str) -> Host:
        return self._host_of[task]

    def variables(self, task: Task) -> dict[str, str]:
        """Return the environment variable that gives a task its GPUs, if it states how many it needs."""
        if self._workflow.resource(task).gpu is None:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus_of[task.name])}

    def reserve(self, group: Group) -> bool:
        """Give each task of a group a host. Return False if there are not enough free ones."""
        for task in group.tasks:
            if not self._place(task, self._candidates(task)):
                self.release(group)
                return False
        return True

    def release(self, group: Group) -> None:
        for task in group.tasks:
            for host in self.hosts:
                host.needs.pop(task.name, None)

    def move(self, task: Task) -> None:
        """Give a task whose host is lost another one, if one is free."""
        self.host(task.name).needs.pop(task.name, None)
        free = [host for host in self._candidates(task) if not host.is_lost]
        self._place(task, free or [self.host(task.name)])

    def check(self, group: Group) -> None:
        """Raise UserError if a group cannot run even if nothing else runs."""
        if self.reserve(group):
            return self.release(group)
        names = ", ".join(host.name for host in self.hosts)
        if not self._oversubscribe and len(group.tasks) > len(self.hosts) * self._tasks_per_host:
            raise UserError(
                f"the group {group.name} has {len(group.tasks)} tasks for the hosts {names}, with "
                f"ssh.tasks_per_host {self._tasks_per_host}; add hosts to the profile, increase tasks_per_host, or add "
                "--oversubscribe"
            )
        needs = "; ".join(f"{task.name}: {task_needs(task, self._workflow)}" for task in group.tasks)
        have = "; ".join(f"{host.name}: {host.have}" for host in self.hosts)
        raise UserError(
            f"the tasks of {group.name} need more than the hosts have that nodesExcluded allows; request less in "
            f"resources, or add --oversubscribe\n  needed: {needs}\n  hosts: {have}"
        )

    def _candidates(self, task: Task) -> list[Host]:
        """Return the hosts that can run a task, the best first: hosts that are not lost, have fewer tasks, and have the
        task's inputs."""
        need, excluded = task_needs(task, self._workflow), self._workflow.resource(task).nodesExcluded
        inputs = [self._host_of[given.task].name for given in task.inputs if given.task in self._host_of]
        found = [
            host
            for host in self.hosts
            if host.name not in excluded and (self._oversubscribe or self._has_room(host, need))
        ]
        return sorted(found, key=lambda host: (host.is_lost, len(host.needs), -inputs.count(host.name)))

    def _has_room(self, host: Host, need: Amounts) -> bool:
        return len(host.needs) < self._tasks_per_host and sum(host.needs.values(), need).fits(host.have)

    def _place(self, task: Task, candidates: list[Host]) -> bool:
        for host in candidates[:1]:
            # GPUs that no other task on the host has come first.
            taken = [gpu for name in host.needs for gpu in self._gpus_of[name]]
            order = sorted(host.gpus, key=taken.count)
            self._gpus_of[task.name] = order[: self._workflow.resource(task).gpu or 0]
            self._host_of[task.name] = host
            host.needs[task.name] = task_needs(task, self._workflow)
        return bool(candidates)
