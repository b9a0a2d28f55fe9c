"""Train a task for a given time with the command line, then evaluate the policy without exploration noise.

    python bench/proof.py go1-velocity --seconds 300              on a GPU
    python bench/proof.py shadow-hand-repose --seconds 600 --run-dir DIR     resumes if DIR holds a run
    python bench/proof.py g1-velocity --seconds 0 --run-dir DIR   only evaluates, on any machine
    python bench/proof.py cartpole-camera --name cartpole-camera-depth -- --env.camera.streams depth
    python bench/proof.py --plot                                  plots bench/results into docs/images

`--seconds` includes start-up, compilation and graph capture. Arguments after `--` are passed to `paceline train`.
"""

import argparse
import signal
import subprocess
import sys
from dataclasses import asdict
from json import loads
from pathlib import Path
from typing import Any

import rates

from paceline.evaluate import evaluate
from paceline.learners.learner import settings_of
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir

IMAGES = Path(__file__).parent.parent / "docs" / "images"
POINTS = 80
"""Number of points kept of a curve."""
KEPT = (
    "device_name",
    "iterations",
    "env_steps",
    "wall_seconds",
    "train_seconds",
    "mean_return",
    "measures",
    "versions",
)
"""Fields kept of result.json."""
KEPT_CURVES = ("episode/", "measure/", "speed/", "images/")
# From the palette of Okabe and Ito.
COLOR, PUBLISHED_COLOR = "#0072B2", "#D55E00"
PLOTTED_METRIC = {
    "ant": "episode/return",
    "humanoid": "episode/return",
    "go1-velocity-rough": "measure/terrain_level",
    "shadow-hand-repose": "measure/successes",
}
# Plots of the tasks with cameras: title, curve of the results, label of the axis, and the results by the names of the
# lines.
CAMERA_PLOTS = (
    (
        "cartpole-camera",
        "episode/length",
        "episode length",
        {"rgb": "cartpole-camera", "depth": "cartpole-camera-depth"},
    ),
    ("reach-camera", "measure/success", "success rate", {"rgb": "reach-camera"}),
    (
        "go1-velocity-rough-camera",
        "measure/terrain_level",
        "terrain level",
        {"depth camera": "go1-velocity-rough-camera", "height scan": "go1-velocity-rough-scan"},
    ),
    (
        "shadow-hand-repose-camera",
        "images/target_error",
        "error of a keypoint coordinate, m",
        {"rgb, depth, classes": "shadow-hand-repose-camera"},
    ),
    (
        "shadow-hand-repose-camera",
        "episode/return",
        "return",
        {"rgb, depth, classes": "shadow-hand-repose-camera"},
    ),
    (
        "shadow-hand-repose-camera",
        "measure/successes",
        "consecutive successes",
        {"rgb, depth, classes": "shadow-hand-repose-camera"},
    ),
)
# Thresholds of Isaac Lab's benchmark for its direct tasks after 500 iterations.
PUBLISHED = {"ant": ("Isaac Lab's threshold", 7000.0), "humanoid": ("Isaac Lab's threshold", 6000.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--name", help="name of the result, by default that of the task")
    parser.add_argument("--episodes", type=int, default=512, help="number of evaluation episodes per engine")
    parser.add_argument(
        "--engines", nargs="*", default=["mujoco"], help="engines of the evaluation; none without names"
    )
    parser.add_argument("--plot", action="store_true")
    args, options = parser.parse_known_args()
    if args.plot:
        plot()
        plot_cameras()
        return
    if not args.task:
        parser.error("name a task, or use --plot")
    name = args.name or args.task
    run = RunDir(args.run_dir or Path("runs") / f"proof-{name}")
    command = ["paceline", "train", args.task, *(option for option in options if option != "--")]
    if args.seconds:
        train(command, run, args.seconds)
    config = run.config()
    rates.write(
        f"proof_{name}",
        task=args.task,
        command=" ".join(command),
        seed=config.seed,
        num_envs=config.num_envs,
        trained={name: value for name, value in run.result().items() if name in KEPT},
        curve=curve(run, config),
        evaluated={engine: evaluated(run, engine, args.episodes) for engine in args.engines},
    )


def train(command: list[str], run: RunDir, seconds: float) -> None:
    """Train for the given time, then interrupt the run with SIGINT."""
    argv = [*command[1:], "--run-dir", str(run.path)]
    if run.config_file.exists():
        argv = ["train", "--resume", str(run.path)]
    process = subprocess.Popen([sys.executable, "-m", "paceline", *argv])
    try:
        if process.wait(seconds):
            sys.exit(f"training failed, exit code {process.returncode}")
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait(120)
    finally:
        process.kill()


def curve(run: RunDir, config: TrainConfig) -> dict[str, list[float]]:
    """Return about `POINTS` points of the logged curves. Seconds count iterations only, without start-up."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    per_iteration = config.total(max(1, len(config.gpu_ids))) * settings_of(config.learner, config.settings).horizon
    rows: list[tuple[int, float, dict[str, float]]] = []
    for path in sorted(run.tensorboard.iterdir()):
        events = EventAccumulator(str(path)).Reload()
        names = [name for name in events.Tags()["scalars"] if name.startswith(KEPT_CURVES)]
        values = {name: {event.step: event.value for event in events.Scalars(name)} for name in names}
        # A resumed run continues from a checkpoint: drop the iterations that it repeats.
        rows = [row for row in rows if row[0] < min(values["speed/steps_per_second"])]
        for iteration, rate in values["speed/steps_per_second"].items():
            seen = {
                name: values[name].get(iteration, float("nan")) for name in names if name != "speed/steps_per_second"
            }
            rows.append((iteration, per_iteration / rate, seen))
    clock, found = 0.0, []
    for iteration, seconds, seen in rows:
        clock += seconds
        found.append((iteration, clock, seen))
    chosen = (found[:0:-1] or found)[:: max(1, len(found) // POINTS)][::-1]
    return {
        "env_steps": [iteration * per_iteration for iteration, _, _ in chosen],
        "seconds": [round(at, 1) for _, at, _ in chosen],
        **{name: [round(values[name], 4) for _, _, values in chosen] for name in chosen[0][2]},
    }


def evaluated(run: RunDir, engine: str, episodes: int) -> dict[str, Any]:
    """Return the estimates for the policy of the newest checkpoint, without those of the reward terms."""
    found, _ = evaluate(str(run.path), episodes, engine)
    kinds = {"nominal": found.nominal, "randomized": found.randomized}
    return {"episodes": found.episodes} | {
        kind: {name: asdict(each) for name, each in estimates.items() if not name.startswith("reward/")}
        for kind, estimates in kinds.items()
        if estimates
    }


def plot() -> None:
    """Plot the main metric of each task over env steps."""
    from matplotlib.figure import Figure

    tasks = sorted({*PLOTTED_METRIC, "go1-velocity", "g1-velocity"})
    found = [loads((rates.RESULTS / f"proof_{task}.json").read_text()) for task in tasks]
    columns = min(3, len(found))
    figure = Figure(figsize=(4.0 * columns, 2.8 * -(-len(found) // columns)), layout="constrained")
    for place, proof in enumerate(found, start=1):
        axes = figure.add_subplot(-(-len(found) // columns), columns, place)
        task, curve = proof["task"], proof["curve"]
        name = PLOTTED_METRIC.get(task, "measure/velocity_error")
        axes.plot([steps / 1e6 for steps in curve["env_steps"]], curve[name], color=COLOR, label="Paceline")
        if task in PUBLISHED:
            what, value = PUBLISHED[task]
            axes.axhline(value, color=PUBLISHED_COLOR, linestyle="--", label=what)
            axes.legend(fontsize=8, frameon=False, loc="lower right")
        axes.set_title(f"{task} ({curve['seconds'][-1]:.0f} s)", fontsize=10)
        axes.set_xlabel("million env steps", fontsize=9)
        axes.set_ylabel(name.split("/")[1].replace("_", " "), fontsize=9)
        axes.set_ylim(bottom=0.0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(IMAGES / "robots_learning.png", dpi=90)


def plot_cameras() -> None:
    """Plot the curves of the tasks with cameras over the seconds of training."""
    from matplotlib.figure import Figure

    missing = [
        n for *_, lines in CAMERA_PLOTS for n in lines.values() if not (rates.RESULTS / f"proof_{n}.json").exists()
    ]
    if missing:
        print(f"no plot of the tasks with cameras: there are no results of {', '.join(dict.fromkeys(missing))}")
        return
    figure = Figure(figsize=(12.0, 5.6), layout="constrained")
    for place, (title, metric, label, lines) in enumerate(CAMERA_PLOTS, start=1):
        axes = figure.add_subplot(2, 3, place)
        for (line, name), color in zip(lines.items(), (COLOR, PUBLISHED_COLOR), strict=False):
            curve = loads((rates.RESULTS / f"proof_{name}.json").read_text())["curve"]
            axes.plot(curve["seconds"], curve[metric], color=color, label=line)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("seconds of training", fontsize=9)
        axes.set_ylabel(label, fontsize=9)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        axes.legend(fontsize=8, frameon=False)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(IMAGES / "cameras_learning.png", dpi=90)


if __name__ == "__main__":
    main()
