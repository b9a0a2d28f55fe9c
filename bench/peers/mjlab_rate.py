"""Measure how fast mjlab trains a task of its own, Mjlab-Cartpole-Balance by default, as the peer in our comparisons.

Task, environment, vecenv wrapper and RSL-RL runner are mjlab's own, set up as its train command does it; only the
sizes named on the command line differ. A step is one environment step, `decimation` physics steps of `timestep`
seconds. Collection and learning are the seconds that the runner's loop itself reports, with the GPU idle at both
boundaries; writing logs and checkpoints lies outside both, as in the rate mjlab prints. With --stepping, env steps with
random actions are measured first.

Run it in an environment of its own, because mjlab's pins exclude Paceline's MuJoCo:

    python -m venv .venv-mjlab && .venv-mjlab/bin/pip install -r bench/peers/requirements-mjlab.lock
    .venv-mjlab/bin/python bench/peers/mjlab_rate.py --num-envs 1024 --output mjlab.json
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import mjlab.tasks  # noqa: F401  fills the task registry
import torch
from mjlab.envs import ManagerBasedRlEnv
from mjlab.rl import MjlabOnPolicyRunner, RslRlVecEnvWrapper
from mjlab.tasks.registry import load_env_cfg, load_rl_cfg, load_runner_cls
from mjlab.utils.torch import configure_torch_backends

LIBRARIES = {
    "torch": "torch",
    "mujoco": "mujoco",
    "mujoco_warp": "mujoco-warp",
    "warp": "warp-lang",
    "rsl_rl": "rsl-rl-lib",
}


@dataclass(frozen=True)
class IterationTime:
    collection_seconds: float
    learning_seconds: float


def parse_arguments() -> argparse.Namespace:
    """Sizes that are not given are the task's own, except for the number of environments, which mjlab leaves to its
    user."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="Mjlab-Cartpole-Balance", help="as mjlab calls it")
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--horizon", type=int, help="steps per environment and iteration")
    parser.add_argument("--hidden", type=int, nargs="+", help="layer widths of actor and critic")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--minibatches", type=int)
    parser.add_argument("--stepping", type=int, default=0, help="steps with random actions that are measured")
    parser.add_argument("--iterations", type=int, default=10, help="iterations measured, after the warm-up")
    parser.add_argument("--warmup", type=int, default=3, help="iterations run first and left out")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    if args.iterations < 1:
        parser.error(f"--iterations is {args.iterations}; measure at least 1")
    return args


def make_runner(args: argparse.Namespace, log_dir: str) -> MjlabOnPolicyRunner:
    """Set up a runner, and set the sizes of `args` that are not given to the task's own."""
    env_cfg, agent_cfg = load_env_cfg(args.task), load_rl_cfg(args.task)
    env_cfg.scene.num_envs = args.num_envs
    env_cfg.seed = agent_cfg.seed = args.seed
    args.horizon = agent_cfg.num_steps_per_env = args.horizon or agent_cfg.num_steps_per_env
    if args.hidden:
        agent_cfg.actor.hidden_dims = agent_cfg.critic.hidden_dims = tuple(args.hidden)
    args.hidden = list(agent_cfg.actor.hidden_dims)
    algorithm = agent_cfg.algorithm
    args.epochs = algorithm.num_learning_epochs = args.epochs or algorithm.num_learning_epochs
    args.minibatches = algorithm.num_mini_batches = args.minibatches or algorithm.num_mini_batches
    if args.num_envs * args.horizon % args.minibatches:
        # RSL-RL drops the remainder, so the update would do less work than the result claims.
        sys.exit(f"{args.minibatches} minibatches do not divide {args.num_envs} x {args.horizon} samples")
    agent_cfg.logger = "tensorboard"  # its default, wandb, needs an account and a network
    env = RslRlVecEnvWrapper(ManagerBasedRlEnv(env_cfg, device=args.device), clip_actions=agent_cfg.clip_actions)
    runner_class = load_runner_cls(args.task) or MjlabOnPolicyRunner
    return runner_class(env, asdict(agent_cfg), log_dir, args.device)


def stepping_rate(env: RslRlVecEnvWrapper, steps: int, synchronize: Callable[[], None]) -> float:
    """Return env steps per second with uniform random actions, after a quarter as many steps to warm up."""

    def step(count: int) -> float:
        synchronize()
        began = time.perf_counter()
        for _ in range(count):
            env.step(2.0 * torch.rand(env.num_envs, env.num_actions, device=env.device) - 1.0)
        synchronize()
        return time.perf_counter() - began

    step(max(1, steps // 4))
    return env.num_envs * steps / step(steps)


def record_times(runner: MjlabOnPolicyRunner, horizon: int, synchronize: Callable[[], None]) -> list[IterationTime]:
    """The returned list grows by one entry per iteration of `runner.learn`."""
    times: list[IterationTime] = []
    steps = 0
    process_env_step, update, log = runner.logger.process_env_step, runner.alg.update, runner.logger.log

    def synchronized_process_env_step(*args, **kwargs) -> None:
        # The runner reads its clock right after the last call of a rollout.
        nonlocal steps
        process_env_step(*args, **kwargs)
        steps += 1
        if steps % horizon == 0:
            synchronize()

    def synchronized_update() -> dict[str, float]:
        losses = update()
        synchronize()
        return losses

    def recording_log(*, collect_time: float, learn_time: float, **rest) -> None:
        times.append(IterationTime(collect_time, learn_time))
        log(collect_time=collect_time, learn_time=learn_time, **rest)

    runner.logger.process_env_step = synchronized_process_env_step
    runner.alg.update = synchronized_update
    runner.logger.log = recording_log
    return times


def measure(args: argparse.Namespace) -> dict:
    configure_torch_backends()
    with tempfile.TemporaryDirectory() as log_dir:
        runner = make_runner(args, log_dir)
        env_cfg = runner.env.unwrapped.cfg
        on_gpu = torch.device(args.device).type == "cuda"

        def synchronize() -> None:
            if on_gpu:
                torch.cuda.synchronize(args.device)

        stepping = stepping_rate(runner.env, args.stepping, synchronize) if args.stepping else None
        times = record_times(runner, args.horizon, synchronize)
        runner.learn(args.warmup + args.iterations, init_at_random_ep_len=True)
        runner.logger.writer.close()  # RSL-RL leaves it open, and its thread would outlive the folder
        runner.env.close()
    collection = [time.collection_seconds for time in times[args.warmup :]]
    learning = [time.learning_seconds for time in times[args.warmup :]]
    steps = args.num_envs * args.horizon * args.iterations
    return {
        "peer": "mjlab",
        "version": version("mjlab"),
        "task": args.task,
        "device": torch.cuda.get_device_name(args.device) if on_gpu else "cpu",
        "num_envs": args.num_envs,
        "horizon": args.horizon,
        "decimation": env_cfg.decimation,
        "timestep": env_cfg.sim.mujoco.timestep,
        "hidden": args.hidden,
        "epochs": args.epochs,
        "minibatches": args.minibatches,
        "seed": args.seed,
        "warmup": args.warmup,
        "stepping_steps_per_second": stepping,
        "collect_steps_per_second": steps / sum(collection),
        "train_steps_per_second": steps / (sum(collection) + sum(learning)),
        "iteration_seconds": [c + u for c, u in zip(collection, learning, strict=True)],
        "collection_seconds": collection,
        "learning_seconds": learning,
        "versions": {name: version(package) for name, package in LIBRARIES.items()},
    }


def main() -> None:
    args = parse_arguments()
    with redirect_stdout(sys.stderr):  # mjlab and RSL-RL print tables
        result = measure(args)
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{result['train_steps_per_second']:.0f} steps/s, written to {args.output}")


if __name__ == "__main__":
    main()
