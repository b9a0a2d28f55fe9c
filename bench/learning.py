"""Compare learning curves of Paceline's PPO and RSL-RL's on cartpole: same env, sizes and settings, several seeds.

    nice .venv/bin/python bench/learning.py

RSL-RL's runner is unmodified. What is not a setting of both (weight initialization, parametrization of the standard
deviation, bootstrapping at time limits) differs. Fails if Paceline's area under the curve of episode lengths is below
0.97 of RSL-RL's.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict
from importlib.metadata import version
from io import BytesIO, StringIO
from pathlib import Path
from statistics import fmean, median
from typing import Any

import rates
import torch
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from rich.table import Table
from rsl_rl.env import VecEnv as RslRlVecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict
from torch import Tensor

from paceline.device.cpu import tune_torch
from paceline.env.robot_env import RobotEnv
from paceline.env.vec_env import Step
from paceline.learners.ppo import Ppo
from paceline.learners.ppo.settings import PpoSettings
from paceline.tasks.cartpole import ENTRY

PLOT = Path(__file__).parent.parent / "docs" / "images" / "learning.png"
NOT_WORSE = 0.97
LEARNED = 0.95
"""Fraction of the longest possible episode at which the task counts as learned."""
FEWEST_EPISODES = 100
# From the palette of Okabe and Ito, which color-blind readers can distinguish.
COLORS = {"Paceline": "#0072B2", "RSL-RL": "#D55E00"}


class RecordedEnv(RobotEnv):
    """Env that records the learning curve, so that it is computed the same way for both learners."""

    def __init__(self, num_envs: int, seed: int, horizon: int):
        super().__init__(ENTRY.task(), num_envs, "mujoco", seed=seed)
        self.lengths: list[float] = []
        """Mean over the episodes that ended in each iteration, or over the latest 100 if fewer did."""
        self.returns: list[float] = []
        self._columns = [self.log_names.index(name) for name in ("length", "return")]
        self._horizon, self._taken_steps = horizon, 0
        self._before, self._now = torch.empty(0, 2), torch.empty(0, 2)

    def step(self, actions: Tensor) -> Step:
        result = super().step(actions)
        ended = result.log[result.terminated | result.truncated]
        self._now = torch.cat((self._now, ended[:, self._columns]))
        self._taken_steps += 1
        if self._taken_steps % self._horizon == 0:
            self._end_iteration()
        return result

    def _end_iteration(self) -> None:
        if len(self._now) < FEWEST_EPISODES:
            self._now = torch.cat((self._before, self._now))[-FEWEST_EPISODES:]
        if not len(self._now):
            sys.exit(f"no episode ended in {self._taken_steps} steps of {self.num_envs} envs: use a larger --num-envs")
        length, return_ = self._now.mean(0).tolist()
        self.lengths.append(length)
        self.returns.append(return_)
        self._before, self._now = self._now, self._now[:0]


class RslRlEnv(RslRlVecEnv):
    """Adapts an env to RSL-RL's VecEnv interface."""

    def __init__(self, env: RobotEnv):
        self.env, self.cfg, self.device = env, {}, env.device
        self.num_envs, self.num_actions, self.max_episode_length = env.num_envs, env.num_actions, env.max_episode_steps
        # The runner writes it only for random initial episode lengths, which neither side uses here.
        self.episode_length_buf = torch.zeros(env.num_envs, dtype=torch.int64)
        # The runner never calls reset(), so the first observations must exist before learn().
        self._obs = self._tensordict(env.reset())

    def get_observations(self) -> TensorDict:
        return self._obs

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Tensor]]:
        result = self.env.step(actions)
        self._obs = self._tensordict(result.obs)
        done = result.terminated | result.truncated
        return self._obs, result.reward, done.long(), {"time_outs": result.truncated}

    def _tensordict(self, obs: dict[str, Tensor]) -> TensorDict:
        return TensorDict(dict(obs), batch_size=[self.num_envs])


def learn_paceline(env: RobotEnv, ppo: PpoSettings, seed: int, iterations: int) -> None:
    learner = Ppo(env, ppo, seed)
    for _ in range(iterations):
        learner.learn()


def learn_rsl_rl(env: RobotEnv, ppo: PpoSettings, seed: int, iterations: int) -> None:
    torch.manual_seed(seed)
    with redirect_stdout(StringIO()):  # the runner prints its networks
        OnPolicyRunner(RslRlEnv(env), rsl_rl_config(ppo), log_dir=None, device="cpu").learn(iterations)


def rsl_rl_config(ppo: PpoSettings) -> dict[str, Any]:
    """Return a new configuration; the runner modifies it."""
    network = {
        "class_name": "MLPModel",
        "hidden_dims": list(ppo.hidden),
        "activation": ppo.activation,
        "obs_normalization": ppo.normalize_observations,
    }
    return {
        "num_steps_per_env": ppo.horizon,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": network | {"distribution_cfg": {"class_name": "GaussianDistribution", "init_std": ppo.initial_std}},
        "critic": dict(network),
        "algorithm": {
            "class_name": "PPO",
            "num_learning_epochs": ppo.epochs,
            "num_mini_batches": ppo.minibatches,
            "learning_rate": ppo.learning_rate,
            "schedule": "adaptive" if ppo.desired_kl else "fixed",
            "desired_kl": ppo.desired_kl,
            "gamma": ppo.discount,
            "lam": ppo.gae_lambda,
            "clip_param": ppo.clip,
            "use_clipped_value_loss": ppo.clip_value,
            "value_loss_coef": ppo.value_weight,
            "entropy_coef": ppo.entropy_weight,
            "max_grad_norm": ppo.max_gradient_norm,
        },
    }


LEARNERS: dict[str, Callable[[RobotEnv, PpoSettings, int, int], None]] = {
    "Paceline": learn_paceline,
    "RSL-RL": learn_rsl_rl,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--num-envs", type=int, default=256)
    args = parser.parse_args()
    tune_torch(torch.device("cpu"))
    ppo, console = PpoSettings.from_training(ENTRY.training), Console()
    runs: dict[str, list[RecordedEnv]] = {side: [] for side in LEARNERS}
    for seed in range(args.seeds):
        for side, learn in LEARNERS.items():
            env = RecordedEnv(args.num_envs, seed, ppo.horizon)
            learn(env, ppo, seed, args.iterations)
            runs[side].append(env)
            console.print(f"seed {seed}, {side}: length {env.lengths[-1]:.1f}, return {env.returns[-1]:.1f}")
    longest = runs["Paceline"][0].max_episode_steps
    summary = {side: summarize(envs, longest) for side, envs in runs.items()}
    ratios = compare(summary["Paceline"], summary["RSL-RL"])
    write(args, ppo, longest, runs, summary, ratios)
    plot(runs, args.num_envs * ppo.horizon, longest)
    console.print(table(summary, ratios))
    if ratios["area"] < NOT_WORSE:
        sys.exit(f"Paceline's area under the curve of lengths is {ratios['area']:.3f} of RSL-RL's, below {NOT_WORSE}")


def summarize(envs: list[RecordedEnv], longest: int) -> dict[str, Any]:
    learned = [iterations_until(env.lengths, LEARNED * longest) for env in envs]
    areas = [round(fmean(env.lengths) / longest, 4) for env in envs]
    returns = [round(env.returns[-1], 2) for env in envs]
    middle = median(math.inf if n is None else n for n in learned)
    return {
        "iterations_to_learn": learned,
        "iterations_to_learn_median": middle if math.isfinite(middle) else None,
        "area": areas,
        "area_mean": round(fmean(areas), 4),
        "final_return": returns,
        "final_return_mean": round(fmean(returns), 2),
    }


def iterations_until(curve: list[float], goal: float) -> int | None:
    """Return the first iteration at which the curve reaches the goal, or None."""
    return next((i for i, value in enumerate(curve, start=1) if value >= goal), None)


def compare(paceline: dict[str, Any], rsl_rl: dict[str, Any]) -> dict[str, Any]:
    """Return ratios of Paceline to RSL-RL. Fewer iterations are better; a larger area and return are better."""
    names = {"iterations_to_learn": "median", "area": "mean", "final_return": "mean"}
    pairs = {name: (paceline[f"{name}_{kind}"], rsl_rl[f"{name}_{kind}"]) for name, kind in names.items()}
    return {name: round(a / b, 3) if a is not None and b is not None else None for name, (a, b) in pairs.items()}


def write(
    args: argparse.Namespace,
    ppo: PpoSettings,
    longest: int,
    runs: dict[str, list[RecordedEnv]],
    summary: dict[str, Any],
    ratios: dict[str, Any],
) -> None:
    rates.write(
        "learning",
        versions={package: version(package) for package in ("torch", "mujoco", "rsl-rl-lib")},
        task="cartpole",
        num_envs=args.num_envs,
        iterations=args.iterations,
        seeds=args.seeds,
        longest_episode_steps=longest,
        learned_at_share_of_longest=LEARNED,
        settings={"Paceline": asdict(ppo), "RSL-RL": rsl_rl_config(ppo)},
        summary=summary,
        paceline_over_rsl_rl=ratios,
        curves={
            side: [
                {"length": [round(n, 1) for n in env.lengths], "return": [round(r, 1) for r in env.returns]}
                for env in envs
            ]
            for side, envs in runs.items()
        },
    )
    # Write each curve on one line.
    file = rates.RESULTS / "learning.json"
    file.write_text(re.sub(r"\[[^][{}]*\]", lambda found: json.dumps(json.loads(found[0])), file.read_text()))


def plot(runs: dict[str, list[RecordedEnv]], steps_per_iteration: int, longest: int) -> None:
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for side, envs in runs.items():
        for axes, curves in ((left, [env.lengths for env in envs]), (right, [env.returns for env in envs])):
            values = torch.tensor(curves)
            thousand_steps = torch.arange(1, values.shape[1] + 1) * steps_per_iteration / 1000.0
            low, high = values.amin(0), values.amax(0)
            axes.fill_between(thousand_steps, low, high, color=COLORS[side], alpha=0.2, linewidth=0)
            axes.plot(thousand_steps, values.mean(0), color=COLORS[side], linewidth=2, label=side)
    left.axhline(longest, color="0.35", linewidth=1, linestyle="--")
    left.annotate("time limit", (0, longest), (6, -12), textcoords="offset points", color="0.35")
    left.set(ylabel="episode length (steps)", ylim=(0, 1.06 * longest))
    right.set(ylabel="episode return (sum of rewards)")
    for axes in (left, right):
        axes.set(xlabel="env steps (thousands)", xlim=(0, None))
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    seeds = len(runs["Paceline"])
    right.legend(title=f"mean and range of {seeds} seeds", loc="lower right", frameon=False, alignment="left")

    # A palette is sufficient for two colors and a third of the size.
    image = BytesIO()
    figure.savefig(image, dpi=180)
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    Image.open(image).convert("RGB").quantize(128).save(PLOT, optimize=True)


def table(summary: dict[str, Any], ratios: dict[str, Any]) -> Table:
    rows = {
        f"iterations to {LEARNED:.0%} of the longest episode, median": ("iterations_to_learn", "median", "g"),
        "area under the curve of lengths, mean": ("area", "mean", ".3f"),
        "final return, mean": ("final_return", "mean", ".1f"),
    }
    result = Table("", *summary, "ratio", title="cartpole, PPO")
    for title, (name, kind, form) in rows.items():
        figures = [side[f"{name}_{kind}"] for side in summary.values()]
        shown = ["never" if figure is None else format(figure, form) for figure in figures]
        result.add_row(title, *shown, "" if ratios[name] is None else f"{ratios[name]:.2f}")
    return result


if __name__ == "__main__":
    main()
