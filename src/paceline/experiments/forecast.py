"""Forecast the throughput of a run with more ranks than it was trained with.

An iteration of a rank consists of the collection of samples, the update, the sums over ranks, the wait for the slowest
rank, and other work. The first two depend on the number of envs per rank and are measured. The sums follow from their
number and size and from the network. The wait follows from the variation of a rank's time.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from json import dumps
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from paceline.errors import UserError, counted
from paceline.experiments.findings import Finding
from paceline.experiments.formatting import duration, number, percent
from paceline.experiments.iteration_parts import Measurements, Parts, Sums
from paceline.experiments.network import Network
from paceline.experiments.page import Table, html, markdown
from paceline.experiments.run_data import RunData
from paceline.run.directory import write_atomically

PAGE = "forecast.html"


@dataclass(frozen=True)
class Prediction:
    """A forecast iteration. The parts are times, s."""

    ranks: int
    total_envs: int
    collect: float
    update: float
    synchronization: float
    waiting: float
    """Time for which a rank waits for the slowest one."""
    other: float
    steps_per_second: float
    """Env steps per second of all ranks."""

    @property
    def seconds(self) -> float:
        return self.collect + self.update + self.synchronization + self.waiting + self.other


@dataclass(frozen=True)
class Scaling:
    """Predictions for growing numbers of ranks in one network."""

    kind: Literal["weak", "strong"]
    """weak: the same number of envs on every rank; strong: the same number in total."""
    network: Network
    predictions: list[Prediction]
    worthwhile_ranks: int
    """Largest number of ranks up to which each doubling raises the throughput by the required gain."""

    def efficiency(self, prediction: Prediction) -> float:
        """Return the env steps per second and rank, relative to one rank."""
        return prediction.steps_per_second / prediction.ranks / self.predictions[0].steps_per_second


@dataclass(frozen=True)
class IterationModel:
    """The measured parts of an iteration."""

    parts: Sequence[Parts]
    """Parts for different numbers of envs per rank, ascending."""
    sums: Sums
    steps_per_env: int
    """Number of steps of an env in an iteration."""

    def predict(self, network: Network, ranks: int, total_envs: int) -> Prediction:
        envs = total_envs / ranks
        collect, update, other = (self._at(envs, name) for name in ("collect", "update", "other"))
        # Expected maximum of normally distributed times (Blom 1958).
        slowest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0
        synchronization = self.sums.per_iteration * network.all_reduce_seconds(ranks, self.sums.num_bytes)
        waiting = slowest * self._at(envs, "variation")
        seconds = collect + update + synchronization + waiting + other
        steps_per_second = total_envs * self.steps_per_env / seconds
        return Prediction(ranks, total_envs, collect, update, synchronization, waiting, other, steps_per_second)

    def _at(self, envs: float, name: str) -> float:
        """Return a part for a number of envs: linear between measured numbers, in proportion above the largest one, and
        constant below the smallest one, where fixed costs dominate."""
        known = [part.num_envs for part in self.parts]
        values = [getattr(part, name) for part in self.parts]
        if envs > known[-1]:
            return values[-1] * envs / known[-1]
        return float(np.interp(envs, known, values))

    def scaling(
        self,
        kind: Literal["weak", "strong"],
        network: Network,
        most_ranks: int,
        envs: int,
        min_gain: float,
    ) -> Scaling:
        """Predict 1, 2, 4, ... ranks. `envs` is the number of envs per rank, or in total for strong scaling."""
        largest = most_ranks if kind == "weak" else min(most_ranks, envs)
        counts = sorted({*(2**i for i in range(largest.bit_length()) if 2**i <= largest), largest})
        found = [self.predict(network, ranks, ranks * envs if kind == "weak" else envs) for ranks in counts]
        return Scaling(kind, network, found, _worthwhile(found, min_gain))


def _worthwhile(predictions: list[Prediction], min_gain: float) -> int:
    for fewer, more in pairwise(predictions):
        # The last number of ranks may be less than twice the one before.
        required = 1 + min_gain * (more.ranks / fewer.ranks - 1)
        if more.steps_per_second < required * fewer.steps_per_second:
            return fewer.ranks
    return predictions[-1].ranks


@dataclass(frozen=True)
class Forecast:
    """Forecasts of a run in one or more networks."""

    title: str
    subtitle: str
    model: IterationModel
    scalings: list[tuple[Scaling, Scaling | None]]
    """Weak and strong scaling in each network."""
    min_gain: float

    def statements(self) -> list[str]:
        """State in words up to how many ranks more of them are worthwhile, and what limits them."""
        return [_statement(each, self.min_gain) for each in self._each()]

    def tables(self) -> dict[str, Table]:
        """Return a table for each network, by its name."""
        return {_title(weak.network): _table(weak, strong) for weak, strong in self.scalings}

    def to_json(self) -> str:
        """Return the content of forecast.json."""
        content = {
            "title": self.title,
            "statements": self.statements(),
            "parts": [asdict(part) for part in self.model.parts],
            "sums": asdict(self.model.sums),
            "scalings": [_to_dict(each) for each in self._each()],
        }
        return dumps(content, indent=2) + "\n"

    def write(self, directory: Path) -> None:
        """Write the page, forecast.md, forecast.json and the plots to a directory."""
        from paceline.experiments.plots import draw_forecast

        networks = [weak.network for weak, _ in self.scalings]
        notes = [f"{_title(network)}: {network.description}. Source: {network.source}." for network in networks]
        found, plots = [Finding("Forecast", self.statements())], draw_forecast(self._each())
        texts = {
            "forecast.json": self.to_json(),
            "forecast.md": markdown(self.title, self.subtitle, notes, found, self.tables()),
            PAGE: html(self.title, self.subtitle, notes, found, self.tables(), plots),
        }
        try:
            directory.mkdir(exist_ok=True)
            for plot in plots:
                write_atomically(directory / f"{plot.name}.png", plot.png)
            for name, text in texts.items():
                write_atomically(directory / name, text.encode())
        except OSError as error:
            raise UserError(f"cannot write to {directory}: {error.strerror}") from None

    def _each(self) -> list[Scaling]:
        return [each for pair in self.scalings for each in pair if each]


def make_forecast(
    run: RunData,
    measurements: Measurements,
    networks: Sequence[Network],
    most_ranks: int,
    total_envs: int | None,
    min_gain: float,
) -> Forecast:
    """Forecast weak scaling with the envs per rank of the run, and strong scaling with `total_envs` if it is not
    None. The latter needs short trainings with fewer envs."""
    fewest_envs = None if total_envs is None else max(1, total_envs // most_ranks)
    steps_per_env = run.facts.steps_per_iteration // run.facts.total_envs
    model = IterationModel(measurements.parts(fewest_envs), measurements.sums(), steps_per_env)
    per_rank = run.envs_per_rank
    scalings = [
        (
            model.scaling("weak", network, most_ranks, per_rank, min_gain),
            model.scaling("strong", network, most_ranks, total_envs, min_gain) if total_envs else None,
        )
        for network in networks
    ]
    envs = f"{counted(f'{per_rank:,}', 'env')} per rank (weak scaling)"
    envs += f" or {counted(f'{total_envs:,}', 'env')} in total (strong scaling)" if total_envs else ""
    subtitle = f"{envs}; {run.config.learner}, {run.facts.device_name}. All figures are forecast."
    return Forecast(f"Forecast for {run.config.task}", subtitle, model, scalings, min_gain)


def _statement(scaling: Scaling, min_gain: float) -> str:
    first, last = scaling.predictions[0], scaling.predictions[-1]
    best = next(each for each in scaling.predictions if each.ranks == scaling.worthwhile_ranks)
    if best is last:
        reason = "the largest number that was forecast"
    else:
        reason = f"twice as many raise the throughput by less than {percent(min_gain)}"
    ratio = number(best.steps_per_second / first.steps_per_second)
    gain = f", with {ratio} times the throughput of one" if best.ranks > 1 else ""
    parts = {name: getattr(last, name) for name in _PART_NAMES}
    largest = max(parts, key=lambda name: parts[name])
    return (
        f"{scaling.kind.capitalize()} scaling ({scaling.network.name}) pays up to "
        f"{counted(f'{best.ranks:,}', 'rank')}{gain}: {reason}. With {counted(f'{last.ranks:,}', 'rank')} an iteration "
        f"takes {duration(last.seconds)}; its largest part is "
        f"{_PART_NAMES[largest]}, {percent(parts[largest] / last.seconds)}."
    )


def _title(network: Network) -> str:
    return f"Network {network.name}"


_PART_NAMES = {
    "collect": "the collection",
    "update": "the update",
    "synchronization": "the synchronization",
    "waiting": "the wait for the slowest rank",
    "other": "other work",
}


def _table(weak: Scaling, strong: Scaling | None) -> Table:
    """Return the table of both kinds of scaling in one network."""
    header = ["ranks", "weak: steps/s", "efficiency", "sync"]
    header += ["strong: steps/s", "efficiency", "sync"] if strong else []
    by_ranks = {each.ranks: each for each in strong.predictions} if strong else {}
    rows = []
    for prediction in weak.predictions:
        row = [f"{prediction.ranks:,}", *_cells(weak, prediction)]
        if strong:
            other = by_ranks.get(prediction.ranks)
            row += _cells(strong, other) if other else ["", "", ""]
        rows.append(row)
    return header, rows


def _cells(scaling: Scaling, prediction: Prediction) -> list[str]:
    return [
        number(prediction.steps_per_second),
        f"{scaling.efficiency(prediction):.2f}",
        percent(prediction.synchronization / prediction.seconds),
    ]


def _to_dict(scaling: Scaling) -> dict[str, Any]:
    """Return the content of forecast.json about one scaling."""
    return {
        "kind": scaling.kind,
        "network": asdict(scaling.network),
        "worthwhile_ranks": scaling.worthwhile_ranks,
        "predictions": [
            asdict(each) | {"seconds": each.seconds, "efficiency": scaling.efficiency(each)}
            for each in scaling.predictions
        ],
    }
