"""Settings of a site, which a workflow file does not have: where jobs are stored and how tasks are started."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints

from paceline.errors import UserError, one_line
from paceline.launch.document import Document, LineError
from paceline.launch.spec import Seconds
from paceline.validation import read_text


class Section(BaseModel):
    """Base of all sections: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskLimits(Section):
    """Settings of all engines that start the tasks themselves."""

    grace_seconds: Annotated[float, Ge(0), Le(3600)] = 30.0
    """Time between SIGTERM and SIGKILL when a task is stopped, s; from 0 to 3600."""
    max_reschedules: Annotated[int, Ge(0), Le(1000)] = 10
    """Number of times that a task or group may be started again by the exit action RESCHEDULE, from 0 to 1000."""


class LocalSettings(TaskLimits):
    """Settings of the engine `local`."""


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError("must be an absolute path")
    return path


RemotePath = Annotated[Path, AfterValidator(_absolute)]
HostName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][\w.:%-]*$", max_length=255)]
"""Name or address of a host. It cannot begin with "-": programs would read it as an option."""


class SshHost(Section):
    """A host of the engine `ssh`."""

    name: HostName
    """Name of the host in messages."""
    address: HostName | None = None
    """Name or address that ssh connects to, and the value of {{host:TASK}}: the other hosts must reach it too. The
    default is `name`."""
    user: HostName | None = None
    """User on the host. The default is that of ssh."""
    port: Annotated[int, Ge(1), Le(65535)] | None = None
    """Port of the SSH server, from 1 to 65535. The default is that of ssh."""
    identity_file: Annotated[Path, AfterValidator(Path.expanduser)] | None = None
    """File of the private key. The default is that of ssh."""
    gpus: Annotated[int, Ge(0), Le(1024)] | None = None
    """Number of GPUs that tasks may use, from 0 to 1024. The default is the number of GPUs of the host."""
    storage_root: RemotePath | None = None
    """Absolute path of the directory on the host that holds jobs/ and datasets/. The default is the `storage_root` of
    the profile."""
    environment: RemotePath | None = None
    """Absolute path of the virtual environment on the host in which Paceline is installed. The default is the
    `environment` of the profile."""

    @property
    def reached_at(self) -> str:
        """Name or address that ssh and the other hosts connect to."""
        return self.address or self.name


def _unique(hosts: list[SshHost]) -> list[SshHost]:
    for names in ([host.name for host in hosts], [host.reached_at for host in hosts]):
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two hosts have the name or address {name}; names and addresses must be unique")
    return hosts


class SyncedPath(Section):
    """A file or directory that is copied to all hosts before the tasks start, by rsync."""

    source: str
    """Path on the launching machine. As in rsync, a directory with "/" at the end stands for its contents."""
    target: str
    """Path on the hosts."""
    exclude: list[str] = []
    """Patterns of rsync of files that are not copied, for example .git."""


class SshSettings(TaskLimits):
    """Settings of the engine `ssh`."""

    hosts: Annotated[list[SshHost], AfterValidator(_unique)] = []
    """Hosts that run tasks."""
    options: list[str] = []
    """Options of the program ssh that are added to every call, for example ["-J", "gateway"]."""
    sync: list[SyncedPath] = []
    """Files and directories that are copied to the hosts before the tasks start."""
    shared_storage: bool = False
    """True if all hosts share the directory `storage_root`. Otherwise, outputs that another host needs are copied."""
    tasks_per_host: Annotated[int, Ge(1), Le(1024)] = 1
    """Maximum number of tasks that run on a host at the same time, from 1 to 1024; a second task is given to a host
    only if all hosts have one."""
    lost_seconds: Annotated[float, Ge(5), Le(3600)] = 15.0
    """Time without an answer after which a host is lost, s; from 5 to 3600. The host ends its tasks after the same time
    without a message from the launching machine."""
    connect_seconds: Annotated[float, Ge(1), Le(600)] = 10.0
    """Maximum time to connect to a host, s; from 1 to 600."""


class SlurmSettings(TaskLimits):
    """Settings of the engine `slurm`."""

    partition: str | None = None
    """Partition of the jobs. The default is that of the cluster."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that the nodes must have, as for `sbatch --constraint`."""
    time: Annotated[Seconds, Ge(60)] | None = None
    """Time limit of one start of a job, at least 60 s, for example 24h. A job that reaches it saves a checkpoint and is
    requeued. The default is that of the partition."""
    signal_seconds: Annotated[int, Ge(1), Le(65535)] = 120
    """Time before the limit at which the tasks are stopped, s; from 1 to 65535. Slurm may be up to 60 s early."""
    gpu_option: Annotated[str, StringConstraints(pattern=r"^--.*\{gpu\}")] = "--gpus-per-node={gpu}"
    """Option of sbatch that requests {gpu} GPUs per node, for example --gres=gpu:a100:{gpu}."""
    tmp: bool = True
    """Request `storage` as temporary disk space of the nodes (`--tmp`). Set it to false where the nodes have no TmpDisk
    in the configuration of Slurm."""
    pools: dict[str, str] = {}
    """Partition of each `pool` of a workflow."""
    platforms: dict[str, str] = {}
    """Constraint of each `platform` of a workflow."""
    options: list[Annotated[str, StringConstraints(pattern=r"^--[a-z]")]] = []
    """Further options of sbatch, for example --reservation=NAME."""


class KubernetesSettings(TaskLimits):
    """Settings of the engine `kubernetes`."""

    context: str | None = None
    """Context of kubectl's configuration. The default is kubectl's current context."""
    namespace: str = "default"
    """Namespace of the job."""
    storage_claim: str | None = None
    """PersistentVolumeClaim that is the storage root of all pods, with the access mode ReadWriteMany. Without it, the
    output directory of a task is lost with its pod, and no task can read the output of another one."""
    storage_secret: str | None = None
    """Secret whose keys become environment variables of the tasks, for example AWS_ACCESS_KEY_ID, for URLs."""
    image_pull_secret: str | None = None
    """Secret with the login of the image registry."""
    service_account: str | None = None
    """Service account of the pods. The default is that of the namespace."""
    fs_group: Annotated[int, Ge(0)] | None = None
    """Group ID that owns the storage claim, for images that do not run as root."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name of the GPUs among the resources of a node."""
    node_selector: dict[str, str] = {}
    """Labels that the nodes of all tasks must have."""
    platforms: dict[str, dict[str, str]] = {}
    """Labels of nodes for each `platform` of the resources of a workflow."""
    tolerations: list[dict[str, Any]] = []
    """Tolerations of all pods, as in a pod's specification."""


class OsmoSettings(Section):
    """Settings of the engine `osmo`."""

    pool: str | None = None
    """Pool to which workflows are submitted. The default is that of the file, or of the user's OSMO profile."""


class ContainerSettings(Section):
    """Container tool that runs each task in its image, for the engines that start tasks themselves."""

    tool: Literal["podman", "docker", "apptainer"]
    """Program that runs containers."""
    options: list[str] = []
    """Further options of `podman run`, `docker run` or `apptainer exec`, for example --volume=/data:/data."""


class Profile(Section):
    """Settings of a site."""

    storage_root: Annotated[Path, AfterValidator(Path.expanduser)] = Path()
    """Directory that holds the directories jobs/ and datasets/. The default is the current directory."""
    environment: Annotated[Path, AfterValidator(Path.expanduser)] | None = None
    """Virtual environment whose programs the tasks use. The default is the one in which Paceline runs."""
    local: LocalSettings = LocalSettings()
    ssh: SshSettings = SshSettings()
    slurm: SlurmSettings = SlurmSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
    osmo: OsmoSettings = OsmoSettings()
    container: ContainerSettings | None = None
    """Without it, tasks run in `environment`, and their images are not used."""


def default_path() -> Path:
    """Return $XDG_CONFIG_HOME/paceline/profile.yaml, by default ~/.config/paceline/profile.yaml."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "paceline" / "profile.yaml"


def read_profile(path: Path | None) -> Profile:
    """Read a profile. Without a path, read the default one, or return the defaults if it does not exist."""
    file = path or default_path()
    if path is None and not file.exists():
        return Profile()
    try:
        return Document(read_text(file)).validate(Profile, ())
    except LineError as error:
        raise UserError(f"{file}:{error.line}: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read the profile {file}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{file} is not a profile: {one_line(error)}") from None
