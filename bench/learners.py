"""Measure the training rate of every learner against the bare physics and against mjlab's RSL-RL loop, in one run.

    python bench/learners.py --peer PYTHON        PYTHON has mjlab
    python bench/learners.py --device cpu --num-envs 16 --iterations 2        a dry run without a GPU

All use mjlab's physics, horizon, network, epochs and minibatches.
"""

import argparse
from dataclasses import asdict

import rates
import torch
from rich.console import Console
from rich.table import Table

from paceline.device.cpu import tune_torch
from paceline.distributed.group import Group
from paceline.distributed.rank import Rank
from paceline.env.robot_env import RobotEnv
from paceline.learners.learner import LEARNERS
from paceline.learners.ppo.settings import PpoSettings
from paceline.learners.rl_games.settings import RlGamesSettings
from paceline.learners.rsl_rl.settings import RslRlSettings
from paceline.learners.settings import Settings
from paceline.learners.skrl.settings import SkrlSettings
from paceline.tasks.cartpole import Cartpole

TASK = Cartpole(decimation=5, physics_hz=100.0)
PPO = PpoSettings(horizon=32, epochs=5, minibatches=4, hidden=(64, 64))
SKRL = SkrlSettings(rollouts=32, learning_epochs=5, mini_batches=4, layers=(64, 64))
SETTINGS: dict[str, Settings] = {
    "ppo": PPO,
    "rsl_rl": RslRlSettings(num_steps_per_env=32, num_learning_epochs=5, num_mini_batches=4, hidden_dims=(64, 64)),
    "rl_games": RlGamesSettings(horizon_length=32, mini_epochs=5, minibatch_size_per_env=8, units=(64, 64)),
    "skrl": SKRL,
    "skrl_jax": SKRL,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--peer", help="Python interpreter with mjlab; omit to skip the peer")
    parser.add_argument("--name", default="learners", help="name of the file in bench/results")
    args = parser.parse_args()
    device = torch.device(args.device)
    tune_torch(device)
    group = Group(Rank(device=device))

    physics = rates.physics(TASK, args.num_envs, device, PPO.horizon, max(2, args.iterations // 4))
    rows = [{"learner": "physics only", "train": physics}]
    peer = None
    if args.peer:
        found = rates.mjlab(args.peer, args.num_envs, PPO, args.device, 4 + args.iterations).rates(rates.WARM)
        peer = found["train"]
        rows.append({"learner": "mjlab's RSL-RL", **found})
    for name in args.learners:
        settings = SETTINGS[name]
        env = RobotEnv(TASK, args.num_envs, "auto", device)
        learner = LEARNERS[name].make(env, settings, 0, group)
        rows.append(
            {
                "learner": name,
                **rates.learning(learner, args.num_envs * settings.horizon, 4 + args.iterations).rates(rates.WARM),
            }
        )
    for row in rows:
        row["train/physics"] = row["train"] / physics
        if peer:
            row["train/mjlab"] = row["train"] / peer
    settings = {"task": asdict(TASK), **{name: asdict(SETTINGS[name]) for name in args.learners}}
    rates.write(args.name, num_envs=args.num_envs, unit="env steps per second", settings=settings, rows=rows)
    columns = max(rows, key=len)
    table = Table(*columns, title=f"cartpole, {args.num_envs} envs on {args.device}, env steps/s")
    for row in rows:
        table.add_row(*(rates.show(row.get(column, "")) for column in columns))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
