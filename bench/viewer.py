"""Measure what the viewer of `paceline train --viewer` costs.

    python bench/viewer.py [--task go1-velocity] [--device cuda]

One training run passes through three phases, round by round: the process of the viewer is stopped ("off"), it runs
without a client ("idle"), and a client in another process reads the page over a WebSocket as a browser does
("watched"). Every second round has the opposite order, because the rate changes while the policy learns. A result is
the median over the rounds of the ratio of the env steps per second to those of "off" in the same round. The client
shares the CPU with the training here; a browser is usually on another machine.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Self

import psutil
import rates
from rich.console import Console

from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.tasks import registry
from paceline.train import train
from paceline.view.training_viewer import TrainingViewer
from paceline.view.viewer_server import Address, choose_address

if TYPE_CHECKING:
    from paceline.training.session import Session

PHASES = ("off", "idle", "watched")
WARM_SECONDS = 20.0
"""Minimum time before the first round, in which the viewer starts and a GPU compiles."""
SETTLE_SECONDS = 2.0
"""Time at the beginning of a phase that is not measured."""


class Phases:
    """A callback that switches between the phases and measures the env steps per second of each."""

    name = "measurement"

    def __init__(self, address: Address, rounds: int, seconds: float):
        self._address, self._seconds = address, seconds
        self._left = [phase for i in range(rounds) for phase in (PHASES if i % 2 == 0 else PHASES[::-1])]
        url, script = f"ws://{address.host}:{address.port}", Path(__file__).with_name("viewer_client.py")
        command = (sys.executable, script, url, version("viser"))
        self._client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.rates: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.messages: list[float] = []

    def begin(self, session: "Session") -> Self:
        self._phase, self._started = "", time.monotonic()
        children = psutil.Process().children()
        self._viewer = next(each for each in children if "paceline.view.training_viewer" in each.cmdline())
        return self

    def after_iteration(self, session: "Session") -> None:
        now = time.monotonic()
        if not self._phase:
            if now > self._started + WARM_SECONDS and self._is_page_open():
                self._switch()
        elif self._measured_from is None:
            if now > self._started + SETTLE_SECONDS:
                self._measured_from = now, session.learner.iteration
        elif now > self._measured_from[0] + self._seconds:
            began, iteration = self._measured_from
            steps = (session.learner.iteration - iteration) * session.steps_per_iteration
            self.rates[self._phase].append(steps / (now - began))
            self._switch()

    def _is_page_open(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((self._address.host, self._address.port)) == 0

    def _switch(self) -> None:
        if self._phase == "watched":
            self._tell_client()
            assert self._client.stdout
            self.messages.append(float(self._client.stdout.readline()))
            # The viewer notices that the client has gone.
            time.sleep(1.0)
        if not self._left:
            self._viewer.send_signal(signal.SIGCONT)
            # SIGINT is ignored by a process that a script has started in the background.
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self._phase, self._started, self._measured_from = self._left.pop(0), time.monotonic(), None
        self._viewer.send_signal(signal.SIGSTOP if self._phase == "off" else signal.SIGCONT)
        if self._phase == "watched":
            self._tell_client()

    def _tell_client(self) -> None:
        """Have the client connect or disconnect."""
        assert self._client.stdin
        self._client.stdin.write("\n")
        self._client.stdin.flush()

    def close(self, status: str) -> None:
        self._client.kill()
        self._client.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="go1-velocity")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--num-envs", type=int, help="the default is that of the task")
    parser.add_argument("--viewer-envs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10.0, help="measured time of each phase")
    args = parser.parse_args()
    entry, load = registry.find(args.task), os.getloadavg()[0]
    num_envs = args.num_envs or (entry.gpu_envs if args.device == "cuda" else entry.cpu_envs)
    config = TrainConfig(
        args.task, {}, num_envs=num_envs, max_iterations=10**7, gpu_ids=(0,) if args.device == "cuda" else ()
    )
    address = choose_address("127.0.0.1", None)
    viewer = TrainingViewer(address, args.viewer_envs)
    phases = Phases(address, args.rounds, args.seconds)
    with tempfile.TemporaryDirectory() as folder:
        train(config, RunDir(Path(folder) / "run"), Console(stderr=True), callbacks=(viewer, phases))
    off = phases.rates["off"]
    ratios = {
        phase: [rate / base for rate, base in zip(found, off, strict=True)] for phase, found in phases.rates.items()
    }
    figures = {
        "task": args.task,
        "device": args.device,
        "num_envs": num_envs,
        "viewer_envs": args.viewer_envs,
        "load_before": load,
        "steps_per_second": phases.rates,
        "ratio": {phase: median(found) for phase, found in ratios.items()},
        "messages_per_second": median(phases.messages),
    }
    rates.write(f"viewer_{args.device}", **figures)
    for phase in PHASES:
        steps, ratio = median(phases.rates[phase]), figures["ratio"][phase]
        spread = f"{min(ratios[phase]):.3f} to {max(ratios[phase]):.3f}"
        print(f"{phase:8} {steps:12,.0f} steps/s, {ratio:.3f} of off ({spread})")
    print(f"messages to the client: {figures['messages_per_second']:.0f}/s")


if __name__ == "__main__":
    main()
