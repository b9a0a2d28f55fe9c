"""Training rate and CPU time with and without --mirror: to a local folder and to an S3 server on this host.

The variants alternate in one run of this script, because the rate of a host changes with time. A run during which other
processes used more than 5 % of a core is repeated; --other-load changes this limit, for a host that is never idle. The
S3 server stands for another host and therefore has the lowest priority.

    python bench/mirror.py [--rounds 3] [--device cpu|0]
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from paceline.run.metrics_file import read_metrics
from tests.run.s3 import BUCKET, S3Server

WARMUP_ITERATIONS = 5
MOST_ATTEMPTS = 100
SESSION = Path("/proc/self/autogroup")
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="Number of runs of each variant.")
    parser.add_argument("--device", default="cpu", help="cpu, or the index of a GPU.")
    parser.add_argument("--task", default="cartpole", help="Name of the task.")
    parser.add_argument("--iterations", type=int, default=200, help="Number of iterations of each run.")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="Iterations between two checkpoints.")
    parser.add_argument("--other-load", type=float, default=0.05, help="Cores that other processes may use.")
    parser.add_argument("--name", default="mirror", help="Name of the file in bench/results.")
    arguments = parser.parse_args()
    server = S3Server(("nice", "-n19", "chrt", "--batch", "0"))
    rates: dict[str, list[float]] = {"none": [], "file": [], "s3": []}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in rates}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for index in range(arguments.rounds):
                urls = {"none": None, "file": f"file://{folder}/mirror_{index}", "s3": f"s3://{BUCKET}/{index}"}
                for name, url in urls.items():
                    rate, seconds = _train_undisturbed(arguments, f"{folder}/{name}_{index}", url, server.environment)
                    rates[name].append(rate)
                    cpu_seconds[name].append(seconds)
                    print(name, f"{rate:,.0f} steps/s", f"{seconds:.1f} s CPU", flush=True)
    finally:
        server.stop()
    settings = {key: value for key, value in vars(arguments).items() if key not in ("rounds", "name")}
    result = {
        **settings,
        "cpu_count": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "session_priority": SESSION.read_text().strip() if SESSION.exists() else None,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "python": platform.python_version(),
        "steps_per_second": rates,
        "cpu_seconds": cpu_seconds,
        "relative_rate": {name: median(rates[name]) / median(rates["none"]) for name in ("file", "s3")},
        "additional_cpu_seconds": {name: min(cpu_seconds[name]) - min(cpu_seconds["none"]) for name in ("file", "s3")},
    }
    (RESULTS / f"{arguments.name}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(result["relative_rate"], result["additional_cpu_seconds"])


def _train_undisturbed(
    arguments: argparse.Namespace, run: str, url: str | None, environment: dict[str, str]
) -> tuple[float, float]:
    """Wait until the host is idle, and train until other processes have not disturbed a run."""
    cores = psutil.cpu_count() or 1
    for attempt in range(MOST_ATTEMPTS):
        while psutil.cpu_percent(interval=1.0) / 100 * cores > arguments.other_load:
            pass
        suffix = f"_{attempt}"
        began, busy, server = time.monotonic(), _busy_seconds(), _server_seconds()
        rate, seconds = _train(arguments, Path(run + suffix), url and url + suffix, environment)
        others = _busy_seconds() - busy - (_server_seconds() - server) - seconds
        if others < arguments.other_load * (time.monotonic() - began):
            return rate, seconds
        print(f"other processes used {others:.1f} s of CPU time: repeated", flush=True)
    sys.exit("The host is not idle.")


def _busy_seconds() -> float:
    """Return the CPU time that all processes of this host have used, s."""
    return sum(psutil.cpu_times()[:3])  # user, nice, system


def _server_seconds() -> float:
    """Return the CPU time that the S3 server, the only child of this process between two runs, has used, s."""
    return sum(child.cpu_times().user + child.cpu_times().system for child in psutil.Process().children())


def _train(
    arguments: argparse.Namespace, run: Path, url: str | None, environment: dict[str, str]
) -> tuple[float, float]:
    """Train one run in a new process. Return its env steps per second after the first iterations, which compile,
    including checkpoints and logging, and the CPU time of the process from its start to its end, s."""
    gpu_ids = "none" if arguments.device == "cpu" else arguments.device
    command = [sys.executable, "-m", "paceline", "train", arguments.task, "--gpu-ids", gpu_ids, "--run-dir", str(run)]
    command += ["--max-iterations", str(arguments.iterations), "--checkpoint-every", str(arguments.checkpoint_every)]
    command += ["--mirror", url] if url else []
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=os.environ | environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    first, *_, last = read_metrics(run / "metrics.jsonl")[0][WARMUP_ITERATIONS:]
    steps, elapsed = (last[f"progress/{name}"] - first[f"progress/{name}"] for name in ("env_steps", "train_seconds"))
    return steps / elapsed, seconds


if __name__ == "__main__":
    main()
