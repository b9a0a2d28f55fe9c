"""A run from start to end: files, resume, faults."""

import dataclasses
import json
import subprocess
import time
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from paceline.env.task import EnvState
from paceline.errors import UserError
from paceline.run import checkpoint
from paceline.run.config import TrainConfig, plain
from paceline.run.directory import RunDir
from paceline.run.metrics_file import read_metrics
from paceline.tasks.cartpole import Cartpole
from paceline.tasks.cartpole_camera import CartpoleCamera
from paceline.tasks.reach_camera import ReachCamera
from paceline.train import TrainingFailedError, train
from paceline.training.build import resolve
from paceline.training.session import Session
from tests.cameras.small import SMALL_CAMERA, SMALL_CAMERA_OF_ARM, SMALL_ENCODER
from tests.states import flat

SETTINGS = {"horizon": 8, "epochs": 2, "minibatches": 2, "hidden": (16,)}
CONFIG = TrainConfig(
    task="cartpole",
    env={},
    num_envs=12,
    max_iterations=20,
    seed=5,
    checkpoint_every=10,
    settings=SETTINGS,
)
QUIET = Console(quiet=True)


def run(path: Path, iterations: int, resume: bool = False, **changes) -> RunDir:
    directory = RunDir(path)
    config = dataclasses.replace(CONFIG, max_iterations=iterations, **changes)
    train(config, directory, QUIET, checkpoint.newest(directory.checkpoints) if resume else None)
    return directory


def scalars(directory: RunDir) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(directory.tensorboard))
    events.Reload()
    measured = ("seconds/", "speed/", "memory/", "progress/train_seconds")
    names = [name for name in events.Tags()["scalars"] if not name.startswith(measured)]
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}


# A slow camera and stacked frames: their images are part of the checkpoint.
SLOW_CAMERA = plain(CartpoleCamera(camera=dataclasses.replace(SMALL_CAMERA, every=3, frames=2)))
IMAGES = {"task": "cartpole-camera", "env": SLOW_CAMERA, "settings": SETTINGS | SMALL_ENCODER}
TARGETS = {
    "task": "reach-camera",
    "env": plain(ReachCamera(camera=SMALL_CAMERA_OF_ARM)),
    "settings": SETTINGS | SMALL_ENCODER | {"image_training": "targets"},
}


@pytest.mark.parametrize("changes", [{}, IMAGES, TARGETS], ids=["vectors", "images", "image targets"])
def test_resuming_is_bit_exact(changes: dict[str, Any], tmp_path: Path):
    whole = run(tmp_path / "whole", 20, **changes)
    parts = run(tmp_path / "parts", 10, **changes)
    run(tmp_path / "parts", 20, resume=True, **changes)
    uninterrupted, resumed = (flat(checkpoint.load(checkpoint.newest(d.checkpoints))) for d in (whole, parts))
    assert uninterrupted.keys() == resumed.keys()
    assert {"learner/adam/exp_avg", "learner/envs/sim/qacc_warmstart"} <= uninterrupted.keys()
    assert ("learner/normalizers/policy/mean" in uninterrupted) == (changes is not IMAGES)
    assert ("learner/image_regression/exp_avg" in uninterrupted) == (changes is TARGETS)
    for name, value in uninterrupted.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, resumed[name]), name
        elif name != "totals/seconds":
            assert value == resumed[name], name
    assert scalars(whole) == scalars(parts)
    assert [step for step, _ in scalars(parts)["loss/value"]] == list(range(1, 21))


def test_another_seed_gives_another_run(tmp_path: Path):
    one, other = run(tmp_path / "one", 2), run(tmp_path / "other", 2, seed=6)
    first, second = (checkpoint.load(checkpoint.newest(d.checkpoints))["learner"]["networks"] for d in (one, other))
    assert not torch.equal(first["actor.0.weight"], second["actor.0.weight"])


def test_a_finished_run_leaves_what_the_readme_says(tmp_path: Path):
    directory = run(tmp_path / "run", 20)
    result = json.loads(directory.result_file.read_text())
    assert result["status"] == "completed"
    assert result["env_steps"] == 20 * 12 * 8
    assert result["total_envs"] == 12
    assert (result["engine"], result["device"], result["world_size"]) == ("mujoco", "cpu", 1)
    assert result["steps_per_second"] > 0
    assert result["mean_return"] is not None
    assert {"torch", "mujoco", "paceline"} <= result["versions"].keys()
    assert directory.config() == resolve(CONFIG)[0]
    assert len(checkpoint.listing(directory.checkpoints)) == 2


def test_tensorboard_shows_no_iteration_twice_after_a_resume_from_an_earlier_checkpoint(tmp_path: Path):
    directory = run(tmp_path / "run", 15)
    earlier = checkpoint.listing(directory.checkpoints)[0]
    assert earlier.name == "iteration_00000010.safetensors"
    train(dataclasses.replace(CONFIG, max_iterations=18), directory, QUIET, earlier)
    values = scalars(directory)["loss/value"]
    assert [step for step, _ in values] == list(range(1, 19))
    iterations, sessions = read_metrics(directory.metrics_file)
    assert [record["iteration"] for record in iterations] == list(range(1, 19))
    assert [record["loss/value"] for record in iterations] == pytest.approx([value for _, value in values])
    assert [session["first_iteration"] for session in sessions] == [1, 11]
    assert [file.name for file in checkpoint.listing(directory.checkpoints)][-1] == "iteration_00000018.safetensors"


class Failing:
    """A callback that fails in the second iteration."""

    name = "display"
    calls: tuple[str, ...] = ()

    def begin(self, session: Session) -> Self:
        self.calls += ("begin",)
        return self

    def after_iteration(self, session: Session) -> None:
        self.calls += (f"iteration {session.learner.iteration}",)
        if session.learner.iteration == 2:
            raise ValueError("no display")

    def close(self, status: str) -> None:
        self.calls += ("close",)


def test_training_continues_without_a_callback_or_logger_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "tensorboard").write_text("a file in place of the directory")
    (tmp_path / "result.json").touch()
    failing = Failing()
    config = dataclasses.replace(CONFIG, max_iterations=4)
    directory = RunDir(tmp_path, given=False)
    assert train(config, directory, Console(), callbacks=(failing,))["status"] == "completed"
    assert failing.calls == ("begin", "iteration 1", "iteration 2")
    output = capsys.readouterr().out
    assert "The display failed: no display. Training continues without it." in output
    assert "The logger tensorboard failed: " in output
    assert len(read_metrics(directory.metrics_file)[0]) == 4


def test_tensorboard_shows_the_resumed_run_also_after_the_clock_was_set_back(tmp_path: Path):
    directory = run(tmp_path / "run", 15)
    (file,) = directory.tensorboard.iterdir()
    tomorrow = int(time.time()) + 86400
    file.rename(file.with_name(f"events.out.tfevents.{tomorrow}.a.1.0"))
    (directory.tensorboard / f"events.out.tfevents.{tomorrow}.a.1.00").touch()
    earlier = checkpoint.listing(directory.checkpoints)[0]
    train(dataclasses.replace(CONFIG, max_iterations=18), directory, QUIET, earlier)
    assert [step for step, _ in scalars(directory)["loss/value"]] == list(range(1, 19))
    assert len(list(directory.tensorboard.iterdir())) == 3


def test_a_resume_from_the_best_checkpoint_is_kept_and_goes_on(tmp_path: Path):
    directory = run(tmp_path / "run", 15, checkpoint_every=5)
    best, early = directory.checkpoints / checkpoint.BEST, checkpoint.listing(directory.checkpoints)[0]
    assert early.name == "iteration_00000005.safetensors"
    best.write_bytes(early.read_bytes())
    (directory.checkpoints / ".iteration_00000006.safetensors.1.part").write_bytes(b"half")
    train(dataclasses.replace(CONFIG, max_iterations=7, checkpoint_every=1), directory, QUIET, best)
    numbers = [checkpoint.load(file)["learner"]["iteration"] for file in checkpoint.listing(directory.checkpoints)]
    assert numbers == [5, 6, 7]
    assert len(list(directory.checkpoints.glob("*.superseded"))) == 2
    assert not list(directory.checkpoints.glob(".*"))


def test_a_damaged_best_checkpoint_does_not_prevent_a_resume(tmp_path: Path):
    directory = run(tmp_path / "run", 5)
    best = directory.checkpoints / checkpoint.BEST
    best.write_bytes(best.read_bytes()[:100])
    run(tmp_path / "run", 6, resume=True)
    assert checkpoint.load(checkpoint.newest(directory.checkpoints))["learner"]["iteration"] == 6


def test_options_that_run_yaml_cannot_hold_leave_no_directory(tmp_path: Path):
    config = dataclasses.replace(CONFIG, env={"dtype": torch.float32})
    with pytest.raises(UserError, match=r"which run\.yaml cannot hold"):
        train(config, RunDir(tmp_path / "run"), QUIET)
    assert not list(tmp_path.iterdir())


def test_random_numbers_are_not_repeated_when_the_horizon_changes_on_the_way(tmp_path: Path):
    directory = run(tmp_path / "run", 2)
    run(tmp_path / "run", 3, resume=True, settings=SETTINGS | {"horizon": 4})
    state = checkpoint.load(checkpoint.newest(directory.checkpoints))
    assert state["learner"]["steps"] == 2 * 8 + 4
    assert state["totals"]["env_steps"] == 12 * (2 * 8 + 4)


@pytest.mark.root
def test_a_full_disk_ends_the_run_and_names_the_cause(tmp_path: Path):
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", str(small)], check=True)
    try:
        with pytest.raises(TrainingFailedError, match=r"No space left on device: '.*\.safetensors'"):
            run(small / "run", 20, logger=("none",))
        assert RunDir(small / "run").result()["status"] == "failed"
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.root
def test_a_disk_that_becomes_read_only_ends_the_run_with_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    save = checkpoint.save

    def remount_and_save(*arguments: Any) -> Path:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        return save(*arguments)

    monkeypatch.setattr(checkpoint, "save", remount_and_save)
    try:
        with pytest.raises(TrainingFailedError, match="Read-only file system") as failure:
            run(disk / "run", 20, logger=("none",))
        assert "error.log" not in str(failure.value)
        assert "Traceback" in capsys.readouterr().err
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_loss_that_is_not_finite_ends_the_run_and_says_so(tmp_path: Path):
    ppo = SETTINGS | {"learning_rate": 1e30, "desired_kl": 0.0}
    with pytest.raises(TrainingFailedError, match=r"smaller --ppo\.learning-rate.*rank 0 on .*error\.log"):
        run(tmp_path / "run", 20, settings=ppo)
    assert "NonFiniteError" in (tmp_path / "run" / "error.log").read_text()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "failed"
    assert "became" in result["cause"]


@pytest.mark.parametrize("learner", ["ppo", "rsl_rl"])
def test_a_reward_that_is_not_finite_is_blamed_on_the_task(
    learner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    reward = Cartpole.reward

    def broken(task: Cartpole, state: EnvState, terminated: Tensor) -> dict[str, Tensor]:
        terms = reward(task, state, terminated)
        late = (state.episode_step == 3) & (torch.arange(len(state.qpos)) == 7)
        return terms | {"cart_vel": terms["cart_vel"].masked_fill(late, torch.inf)}

    monkeypatch.setattr(Cartpole, "reward", broken)
    message = (
        r"reward term 'cart_vel' of env 7 became inf in step 3 of the rollout of iteration 1: check how the task "
        r"cartpole computes it"
    )
    with pytest.raises(TrainingFailedError, match=message) as failed:
        run(tmp_path / "run", 5, learner=learner, settings={})
    assert "learning-rate" not in str(failed.value)


@pytest.mark.parametrize(
    ("learner", "settings", "message"),
    [
        (
            "rsl_rl",
            {"num_steps_per_env": 2, "num_mini_batches": 9, "hidden_dims": (8,)},
            r"--rsl-rl\.num-mini-batches 9 is more than 8 samples, .* \(envs x steps: 4 x 2\): use at most 8, or more "
            r"envs \(--num-envs, --total-envs\) or steps \(--rsl-rl\.num-steps-per-env\)",
        ),
        (
            "skrl",
            {"rollouts": 2, "mini_batches": 9, "layers": (8,)},
            r"--skrl\.mini-batches 9 is more than 8 samples, .* or steps \(--skrl\.rollouts\)",
        ),
    ],
)
def test_fewer_samples_than_minibatches_are_refused_before_training(
    learner: str, settings: dict[str, Any], message: str, tmp_path: Path
):
    with pytest.raises(UserError, match=message):
        run(tmp_path / "run", 2, num_envs=4, learner=learner, settings=settings)
    assert not list(tmp_path.iterdir())


def test_as_many_samples_as_minibatches_are_enough(tmp_path: Path):
    settings = {"num_steps_per_env": 2, "num_mini_batches": 8, "hidden_dims": (8,)}
    assert run(tmp_path / "run", 2, num_envs=4, learner="rsl_rl", settings=settings).result()["status"] == "completed"


def test_a_checkpoint_of_other_sizes_is_refused_with_the_remedy(tmp_path: Path):
    run(tmp_path / "run", 2)
    with pytest.raises(UserError, match="--num-envs 12"):
        run(tmp_path / "run", 4, resume=True, num_envs=16)


def test_a_finished_run_asks_for_more_iterations(tmp_path: Path):
    run(tmp_path / "run", 2)
    with pytest.raises(UserError, match="completed 2 iterations: set --max-iterations"):
        run(tmp_path / "run", 2, resume=True)
