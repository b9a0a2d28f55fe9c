"""Training as a Slurm job, submitted with a script written by hand, on a real Slurm."""

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.run import checkpoint
from tests.launch.slurm_cluster import ENDED, SlurmCluster, slurm_cluster

pytestmark = pytest.mark.root

SECONDS = 90.0
ITERATIONS = 40
TRAIN = "cartpole --distributed --gpu-ids none --num-envs 8 --checkpoint-every 10 --timeout 5 --ppo.hidden 16 16"

# Arguments of the script are those of `paceline train`. The parts are explained in `SlurmCluster`.
SCRIPT = f"""\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH --requeue --open-mode=append
#SBATCH --signal=B:USR1@30
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
trap 'requeue=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
lead=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=0 --wait=60 {shlex.quote(sys.executable)} -m torch.distributed.run \\
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc_per_node=1 --max-restarts=3 --monitor-interval=0.1 \\
    --rdzv_backend=c10d --rdzv_endpoint="$lead:29400" --rdzv_id="$SLURM_JOB_ID.$SLURM_RESTART_COUNT" \\
    -m paceline train "$@" &
wait $!
code=$?
if [ "$requeue" ]; then
    wait $!  # the trap has ended the first wait
    code=$?
fi
if [ $code != 0 ]; then
    job=$(scontrol --oneliner show job "$SLURM_JOB_ID")
    [[ $job == *PreemptTime=[0-9]* ]] && requeue=yes
    [[ $requeue && $job == *JobState=RUNNING* ]] && scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


@dataclass(frozen=True)
class Job:
    """A submitted job that trains."""

    cluster: SlurmCluster
    id: str
    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def result(self) -> dict[str, Any]:
        try:
            return json.loads((self.run / "result.json").read_text())
        except OSError:
            return {"status": "not begun"}

    def has_checkpoint(self) -> bool:
        return bool(checkpoint.listing(self.run / "checkpoints"))

    def learner(self) -> dict[str, Any]:
        """Return the state of the learner in the newest checkpoint."""
        return checkpoint.load(checkpoint.newest(self.run / "checkpoints"))["learner"]

    def state(self) -> str:
        return self.cluster.state(self.id)

    def wait_until_completed(self) -> None:
        self.cluster.wait(lambda: self.state() in ENDED, SECONDS)
        assert self.state() == "COMPLETED", self.printed()

    def printed(self) -> str:
        return (self.folder / "job.log").read_text()


@pytest.fixture(scope="module")
def running_cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster(3) as cluster:
        yield cluster


@pytest.fixture
def cluster(running_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """A cluster without jobs. Afterwards, links are restored and jobs are canceled, also if the test failed."""
    yield running_cluster
    for node in running_cluster.nodes:
        node.reconnect()
    running_cluster.call("scancel", "--user=root")
    running_cluster.wait_until_idle()
    running_cluster.wait(lambda: not running_cluster.job_processes(), 30.0)


def submit(cluster: SlurmCluster, folder: Path, iterations: int = ITERATIONS) -> Job:
    script = folder / "train.sh"
    script.write_text(SCRIPT)
    argv = [*TRAIN.split(), "--max-iterations", str(iterations), "--run-dir", str(folder / "run")]
    return Job(cluster, cluster.submit(f"--output={folder / 'job.log'}", str(script), *argv), folder)


@pytest.fixture(scope="module")
def undisturbed(running_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = submit(running_cluster, tmp_path_factory.mktemp("undisturbed"))
    job.wait_until_completed()
    return job


def assert_equal_tensors(actual: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name in expected:
            assert_equal_tensors(actual[name], expected[name])
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected)
    else:
        assert actual == expected


def test_two_nodes_train_as_one_job(undisturbed: Job):
    found = undisturbed.result()
    assert (found["status"], found["world_size"], found["iterations"]) == ("completed", 2, ITERATIONS)
    assert "rank 0 on node1" in undisturbed.printed()
    assert "rank 1 on node2" in undisturbed.printed()


def test_a_job_that_loses_a_node_is_requeued_on_others_with_the_result_of_an_undisturbed_run(
    cluster: SlurmCluster, undisturbed: Job, tmp_path: Path
):
    job = submit(cluster, tmp_path)
    cluster.wait(job.has_checkpoint, SECONDS)
    cluster.node("node2").cut()
    job.wait_until_completed()
    info = cluster.job(job.id)
    assert (info["NodeList"], info["Restarts"]) == ("node[1,3]", "1")
    assert (job.result()["restarts"], job.result()["requeues"]) == (1, 1)
    assert_equal_tensors(job.learner(), undisturbed.learner())


def test_a_preempted_job_saves_a_checkpoint_and_continues_later(
    cluster: SlurmCluster, undisturbed: Job, tmp_path: Path
):
    job = submit(cluster, tmp_path)
    cluster.wait(job.has_checkpoint, SECONDS)
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/bash\nsleep 1\n")
    cluster.submit("--partition=urgent", "--nodes=3", "--exclusive", f"--output={tmp_path / 'urgent.log'}", str(urgent))
    cluster.wait(lambda: job.state() == "PENDING", SECONDS)
    stopped = job.result()
    assert stopped["status"] == "interrupted"
    assert job.learner()["iteration"] == stopped["iterations"] < ITERATIONS
    job.wait_until_completed()
    assert f"from iteration {stopped['iterations']}, restart 1" in job.printed()
    assert cluster.job(job.id)["Restarts"] == "1"
    assert_equal_tensors(job.learner(), undisturbed.learner())


def test_a_canceled_job_saves_a_checkpoint_and_leaves_no_process(cluster: SlurmCluster, tmp_path: Path):
    job = submit(cluster, tmp_path, iterations=10**6)
    cluster.wait(job.has_checkpoint, SECONDS)
    cluster.cancel(job.id)
    cluster.wait(lambda: job.state() == "CANCELLED", SECONDS)
    cluster.wait(lambda: not cluster.job_processes(), 10.0)
    assert job.result()["status"] == "interrupted"
    assert job.learner()["iteration"] == job.result()["iterations"]
