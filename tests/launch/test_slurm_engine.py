"""The engine slurm without a cluster: batch scripts and refusals."""

from pathlib import Path

import pytest

from paceline.errors import UserError
from paceline.launch.engines import slurm
from paceline.launch.profile import Profile, SlurmSettings, read_profile
from paceline.launch.workflow import parse_workflow
from tests.forked import paceline

WORKFLOWS = Path(__file__).parents[2] / "workflows"
PROFILE = """\
storage_root: /nfs
environment: /opt/paceline
slurm:
  partition: gpu
  account: robots
  qos: normal
  constraint: ib
  time: 24h
  signal_seconds: 300
  gpu_option: --gres=gpu:a100:{gpu}
  pools: {large: gpu-large}
  platforms: {dgx: h100}
  options: [--reservation=night, --mail-type=END]
"""
FILE = """\
workflow:
  name: ex
  pool: large
  labels: {team: robot-arms, run: "7"}
  timeout: {exec_timeout: 2h}
  resources:
    default: {cpu: 1.5, gpu: 4, memory: 64Gi, storage: 100G, platform: dgx, nodesExcluded: [n7, n9]}
    small: {cpu: 1}
  tasks:
  - {name: report, image: i, resource: small, command: [report], inputs: [{task: train}]}
  - {name: train, image: i, command: [train]}
"""
EXAMPLE = """\
# /nfs/jobs/ex-1/train.sbatch
#!/bin/bash
#SBATCH --job-name=ex-1.train
#SBATCH --partition=gpu-large
#SBATCH --account=robots
#SBATCH --qos=normal
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --gres=gpu:a100:4
#SBATCH --mem=65536M
#SBATCH --tmp=95368M
#SBATCH '--constraint=ib&h100'
#SBATCH --exclude=n7,n9
#SBATCH --time=0-02:07:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/nfs/jobs/ex-1/train.slurm.log
#SBATCH --comment=team=robot-arms,run=7
#SBATCH --reservation=night
#SBATCH --mail-type=END
exec /opt/paceline/bin/python -P -m paceline.launch.engines.slurm_group /nfs/jobs/ex-1 train

# /nfs/jobs/ex-1/report.sbatch
#!/bin/bash
#SBATCH --job-name=ex-1.report
#SBATCH --partition=gpu-large
#SBATCH --account=robots
#SBATCH --qos=normal
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --constraint=ib
#SBATCH --time=0-02:07:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/nfs/jobs/ex-1/report.slurm.log
#SBATCH --comment=team=robot-arms,run=7
#SBATCH --reservation=night
#SBATCH --mail-type=END
exec /opt/paceline/bin/python -P -m paceline.launch.engines.slurm_group /nfs/jobs/ex-1 report

job1=$(sbatch --parsable --export=ALL /nfs/jobs/ex-1/train.sbatch)
job2=$(sbatch --parsable --export=ALL --dependency=afterok:$job1 --kill-on-invalid-dep=yes /nfs/jobs/ex-1/report.sbatch)
"""
NODES = """\
# /nfs/jobs/train-policy-1/training.sbatch
#!/bin/bash
#SBATCH --job-name=train-policy-1.training
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=2
#SBATCH --mem=4096M
#SBATCH --tmp=1024M
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/nfs/jobs/train-policy-1/training.slurm.log
exec /opt/paceline/bin/python -P -m paceline.launch.engines.slurm_group /nfs/jobs/train-policy-1 training

job1=$(sbatch --parsable --export=ALL /nfs/jobs/train-policy-1/training.sbatch)
"""


def described(text: str, **settings: object) -> str:
    slurm_settings = SlurmSettings.model_validate(settings)
    return slurm.describe(parse_workflow(text, Path("file.yaml")), Profile(slurm=slurm_settings))


def workflow(keys: str = "", resource: str = "{}", other: str = "{}") -> str:
    return f"""\
workflow:
  name: test
{keys}
  resources: {{default: {resource}, other: {other}}}
  groups:
  - name: together
    tasks:
    - {{name: master, lead: true, image: i, command: [a]}}
    - {{name: worker, image: i, command: [a], resource: other}}
"""


def test_a_dry_run_prints_the_scripts_and_commands_of_all_settings(tmp_path: Path):
    (tmp_path / "profile.yaml").write_text(PROFILE)
    file = parse_workflow(FILE, Path("file.yaml"))
    assert slurm.describe(file, read_profile(tmp_path / "profile.yaml")) + "\n" == EXAMPLE


def test_a_dry_run_of_several_nodes_needs_no_slurm(tmp_path: Path):
    (tmp_path / "profile.yaml").write_text("storage_root: /nfs\nenvironment: /opt/paceline\n")
    argv = ["--on", "slurm", "--profile", "profile.yaml", "--set", "num_nodes=4", "--dry-run"]
    done = paceline("launch", str(WORKFLOWS / "train_policy.yaml"), *argv, cwd=tmp_path, PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, NODES), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["profile.yaml"]


def test_missing_programs_of_slurm_are_named(tmp_path: Path):
    argv = ["--on", "slurm", "--set", "num_gpu=0"]
    done = paceline("launch", str(WORKFLOWS / "train_policy.yaml"), *argv, cwd=tmp_path, PATH=str(tmp_path))
    assert done.returncode == 2
    assert "sbatch is not in PATH" in done.stderr
    assert not (tmp_path / "jobs").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (workflow("  timeout: {queue_timeout: 1h}"), "timeout.queue_timeout"),
        (workflow("  pool: large"), "^file.yaml: pool: unknown pool 'large'.* slurm.pools"),
        (workflow(resource="{gpu: 1}", other="{gpu: 2}"), "master and worker of the group together differ"),
        (workflow("", "{platform: dgx}", "{platform: dgx}"), "resources.platform: unknown platform 'dgx'"),
        (workflow("", "{topology: [{key: rack}]}", "{topology: [{key: rack}]}"), "does not support topology"),
        (workflow('  labels: {note: "one\\ntwo"}'), "Kubernetes labels"),
    ],
)
def test_what_slurm_cannot_do_is_refused_by_name(text: str, message: str):
    with pytest.raises(UserError, match=message):
        described(text)


def test_tasks_with_equal_resources_of_different_names_are_one_job():
    assert "#SBATCH --nodes=2\n" in described(workflow(resource="{cpu: 2}", other="{cpu: 2}"))


def test_storage_is_not_requested_where_the_nodes_have_no_tmp_disk():
    text = workflow(resource="{storage: 1Gi}", other="{storage: 1Gi}")
    assert "--tmp=1024M" in described(text)
    assert "--tmp" not in described(text, tmp=False)


def test_the_time_limit_is_never_above_that_of_the_site():
    text = workflow("  timeout: {exec_timeout: 10d}")
    assert "--time=1-12:30:00" in described(text, time="PT36H30M")
    assert "--time=10-00:04:00" in described(text, signal_seconds=120, grace_seconds=30)


@pytest.mark.parametrize("settings", ["gpu_option: --gpus=2", "options: [night]", "time: 10s", "partitions: x"])
def test_wrong_settings_are_errors_with_a_line(tmp_path: Path, settings: str):
    (tmp_path / "profile.yaml").write_text(f"slurm:\n  {settings}\n")
    with pytest.raises(UserError, match=r"profile\.yaml:2"):
        read_profile(tmp_path / "profile.yaml")
