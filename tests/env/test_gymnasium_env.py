"""Gymnasium envs as `VecEnv`: every transition is returned once and unchanged, in all autoreset modes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import av
import gymnasium
import numpy as np
import pytest
import torch
from rich.console import Console

from paceline.distributed.group import Group
from paceline.distributed.rank import Rank
from paceline.env.gymnasium_env import GymnasiumEnv
from paceline.errors import UserError
from paceline.evaluate import evaluate
from paceline.export import export
from paceline.learners.learner import LEARNERS
from paceline.learners.ppo.settings import PpoSettings
from paceline.learners.rl_games.settings import RlGamesSettings
from paceline.learners.rollout import RolloutEnv
from paceline.learners.rsl_rl.settings import RslRlSettings
from paceline.learners.skrl.settings import SkrlSettings
from paceline.process import interrupts
from paceline.run import checkpoint
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.tasks import registry
from paceline.train import train
from paceline.training.build import make_env
from paceline.view.play import record
from tests.env.counting import LOCK, TIME_LIMIT
from tests.forked import paceline as forked_paceline
from tests.signals import DEFAULT_SIGNALS, processes_of_group

ROOT = Path(__file__).parents[2]
COUNTING = "gymnasium:tests.env.counting:Counting-v0"
MODES = [(vectors, reset) for vectors in ("sync", "async") for reset in ("next_step", "same_step")]
TINY = PpoSettings(horizon=8, epochs=2, minibatches=2, hidden=(16, 16))


@contextmanager
def env_of(name: str, num_envs: int = 3, seed: int = 0, first_env: int = 0, **options: Any) -> Iterator[GymnasiumEnv]:
    entry = registry.find(name if ":" in name else f"gymnasium:{name}")
    assert isinstance(entry, registry.EnvEntry)
    env = entry.make(
        entry.task(**options), num_envs=num_envs, device=torch.device("cpu"), seed=seed, first_env=first_env
    )
    assert isinstance(env, GymnasiumEnv)
    try:
        yield env
    finally:
        env.close()


class ByHand:
    """One env, stepped as Gymnasium's documentation describes: a reset follows the end of an episode."""

    def __init__(self, name: str, seed: int):
        self.env = gymnasium.make(name, disable_env_checker=True)
        self.space = self.env.observation_space
        self.obs = self.flat(self.env.reset(seed=seed)[0])

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, np.ndarray]:
        obs, reward, terminated, truncated, _ = self.env.step(action)
        final = self.flat(obs)
        self.obs = self.flat(self.env.reset()[0]) if terminated or truncated else final
        return self.obs, float(reward), terminated, truncated and not terminated, final

    def flat(self, obs: Any) -> np.ndarray:
        return np.asarray(gymnasium.spaces.flatten(self.space, obs), dtype=np.float32)


@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize(
    ("name", "steps", "ends"),
    [
        ("tests.env.counting:Counting-v0", 40, "both"),
        ("tests.env.counting:CountingInParts-v0", 15, "both"),
        ("InvertedPendulum-v5", 60, "terminated"),
        ("Pendulum-v1", 205, "truncated"),
    ],
)
def test_every_transition_is_returned_once_and_unchanged(name: str, steps: int, ends: str, mode: tuple[str, str]):
    generator = torch.Generator().manual_seed(0)
    with env_of(f"gymnasium:{name}", vectorization=mode[0], autoreset=mode[1]) as env:
        obs = env.reset()["policy"]
        seeds: Any = env.envs.np_random_seed
        references = [ByHand(name, seed) for seed in seeds]
        np.testing.assert_array_equal(obs, [reference.obs for reference in references])
        sums, seen = np.zeros((3, 2)), set()
        for _ in range(steps):
            actions = torch.randn(3, env.num_actions, generator=generator)
            step, given = env.step(actions), env.scale_actions(actions)
            pairs = zip(references, given, strict=True)
            results = zip(*(reference.step(action) for reference, action in pairs), strict=True)
            obs, reward, terminated, truncated, final = map(np.array, results)
            np.testing.assert_array_equal(step.obs["policy"], obs)
            np.testing.assert_array_equal(step.reward, reward.astype(np.float32))
            np.testing.assert_array_equal(step.terminated, terminated)
            np.testing.assert_array_equal(step.truncated, truncated)
            np.testing.assert_array_equal(step.final_obs["policy"], final)
            sums += np.stack((np.ones(3), reward), axis=1)
            np.testing.assert_allclose(step.log, sums, rtol=1e-5)
            np.testing.assert_array_equal(env.state()["episode_step"], np.where(terminated | truncated, 0, sums[:, 0]))
            sums[terminated | truncated] = 0.0
            seen |= {"terminated"} if terminated.any() else set()
            seen |= {"truncated"} if truncated.any() else set()
    assert seen == ({"terminated", "truncated"} if ends == "both" else {ends})


def test_a_termination_at_the_time_limit_is_no_truncation():
    with env_of(COUNTING, num_envs=20) as env:
        env.reset()
        at_limit = [env.step(torch.zeros(20, 3)) for _ in range(TIME_LIMIT)][-1]
    both = (at_limit.log[:, 0] == TIME_LIMIT) & at_limit.terminated
    assert both.any(), "no env terminates at the time limit"
    assert not (at_limit.terminated & at_limit.truncated).any()
    assert at_limit.truncated.any()


def test_returned_tensors_are_not_overwritten():
    with env_of("gymnasium:tests.env.counting:Together-v0", vectorization="vector_entry_point") as env:
        first = env.reset()["policy"]
        step = env.step(torch.zeros(3, 1))
        kept = [t.clone() for t in (first, step.obs["policy"], step.final_obs["policy"], step.log, step.reward)]
        assert step.obs["policy"].data_ptr() != step.final_obs["policy"].data_ptr()
        for _ in range(5):
            env.step(torch.zeros(3, 1))
        for before, now in zip(kept, (first, step.obs["policy"], step.final_obs["policy"], step.log, step.reward)):  # noqa: B905
            torch.testing.assert_close(now, before, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
def test_a_vector_entry_point_resets_in_its_autoreset_mode(mode: str):
    """Env n takes n + 1 steps from 10, each worth 1, and no step in between."""
    options = {"vectorization": "vector_entry_point", "options": (f"mode={mode}",)}
    with env_of("gymnasium:tests.env.counting:Together-v0", **options) as env:
        assert env.reset()["policy"].tolist() == [[10.0], [10.0], [10.0]]
        for k in range(1, 13):
            step = env.step(torch.zeros(3, 1))
            period = torch.tensor([1, 2, 3])
            place = (k - 1) % period + 1
            torch.testing.assert_close(step.reward, torch.ones(3))
            torch.testing.assert_close(step.final_obs["policy"][:, 0], 10.0 + place)
            torch.testing.assert_close(step.obs["policy"][:, 0], 10.0 + k % period)
            assert step.terminated.tolist() == (place == period).tolist()


def test_a_vector_env_that_cannot_reset_single_envs_is_an_error():
    options = {"vectorization": "vector_entry_point", "options": ("masks=false",)}
    with env_of("gymnasium:tests.env.counting:Together-v0", num_envs=1, **options) as env:
        env.reset()
    with (
        pytest.raises(UserError, match=r"reset_mask.*use --env.vectorization sync or async"),
        env_of("gymnasium:tests.env.counting:Together-v0", **options),
    ):
        pass


def test_actions_are_scaled_to_the_bounds_and_unchanged_without_bounds():
    with env_of(COUNTING, num_envs=2) as env:
        env.reset()
        reward = env.step(torch.tensor([[-7.0, 0.5, 3.0], [1.0, 9.0, -4.0]])).reward
    assert reward.tolist() == pytest.approx([100.0 - 2.0 + 7.5 + 3.0, 100.0 + 2.0 + 10.0 - 4.0])


def test_the_episodes_of_an_env_depend_only_on_the_seed_and_its_global_index():
    def starts(num_envs: int, first_env: int, seed: int = 0) -> np.ndarray:
        with env_of(COUNTING, num_envs, seed, first_env) as env:
            rows = [env.reset()] + [env.step(torch.zeros(num_envs, 3)).obs for _ in range(20)]
            return torch.stack([row["policy"] for row in rows]).numpy()

    together = starts(4, 0)
    np.testing.assert_array_equal(together[:, 2:], starts(2, 2))
    assert len(np.unique(together[0, :, 0])) == 4
    assert not np.isin(starts(4, 0, seed=1)[0, :, 0], together[0, :, 0]).any()


def test_each_reset_starts_other_episodes():
    with env_of(COUNTING) as env:
        first, second = env.reset()["policy"], env.reset()["policy"]
    assert not torch.isin(first[:, 0], second[:, 0]).any()


def test_time_limit_and_frame_rate_are_those_of_the_env():
    with env_of("MountainCarContinuous-v0", num_envs=1) as env:
        assert (env.max_episode_steps, env.step_seconds, env.num_actions) == (999, pytest.approx(1 / 30), 1)
    with env_of("MountainCarContinuous-v0", num_envs=1, options=("max_episode_steps=7",)) as env:
        env.reset()
        ended = [bool(env.step(torch.zeros(1, 1)).truncated) for _ in range(7)]
        assert env.max_episode_steps == 7
        assert ended == [False] * 6 + [True]
    with env_of("gymnasium:tests.env.counting:Endless-v0", num_envs=1) as env:
        assert env.max_episode_steps == 1000


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_the_control_rate_is_that_of_the_time_step(vectorization: str):
    name = "gymnasium:tests.env.counting:Timed-v0"
    with env_of(name, num_envs=1, vectorization=vectorization) as env:
        assert env.step_seconds == 0.015
    with env_of(COUNTING, num_envs=1, vectorization=vectorization) as env:
        assert env.step_seconds == 0.1


def test_the_control_rate_of_a_mujoco_env_is_that_of_its_model():
    # The frame rate of its videos is rounded to 67 Hz.
    with env_of("Humanoid-v5", num_envs=1) as env:
        assert env.step_seconds == pytest.approx(0.015)


@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize(("name", "choices", "start"), [("Switch-v0", (3,), 5), ("Switches-v0", (2, 4), 0)])
def test_discrete_actions_reach_the_env_as_its_space_numbers_them(
    name: str, choices: tuple[int, ...], start: int, mode: tuple[str, str]
):
    with env_of(f"gymnasium:tests.env.counting:{name}", vectorization=mode[0], autoreset=mode[1]) as env:
        assert (env.num_actions, env.action_choices) == (len(choices), choices)
        env.reset()
        for count in (1, 2):
            actions = torch.stack([torch.arange(3) % number for number in choices], dim=1)
            # 100 for each step so far, and the sum of the actions.
            assert env.step(actions).reward.tolist() == (100.0 * count + start + actions.sum(1)).tolist()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("tests.env.counting:Warns-v0", ("UserWarning: made at", "UserWarning: stepped")),
        # MuJoCo's own warning about the model of this env.
        ("HalfCheetah-v5", ("MujocoWarning: compiler attribute 'settotalmass' is deprecated",)),
    ],
)
def test_warnings_of_envs_are_shown_once(name: str, shown: tuple[str, ...], tmp_path: Path):
    path = os.environ.get("PYTHONPATH", "")
    few = ["--gpu-ids", "none", "--max-iterations", "1", "--num-envs", "3", "--ppo.horizon", "8", "--logger", "none"]
    for mode in ("sync", "async"):
        argv = ["train", f"gymnasium:{name}", "--env.vectorization", mode, *few, "--run-dir", mode]
        done = forked_paceline(*argv, cwd=tmp_path, PYTHONPATH=os.pathsep.join(filter(None, (str(ROOT), path))))
        assert done.returncode == 0, done.stderr
        assert [(done.stdout + done.stderr).count(text) for text in shown] == [1] * len(shown)
        assert not (tmp_path / "MUJOCO_LOG.TXT").exists()


def test_options_reach_the_environment():
    with env_of(COUNTING, num_envs=1, options=("bonus=0.25",)) as env:
        env.reset()
        # A Gaussian's mean, zero, is the middle of bounds: 0 and 5.
        assert env.step(torch.zeros(1, 3)).reward.item() == pytest.approx(105.25)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Pendulm-v1", {}, "no environment 'Pendulm-v1': did you mean 'Pendulum-v1'?"),
        ("no_such_module:Env-v0", {}, "the module no_such_module cannot be imported"),
        ("tests.env.counting:Bits-v0", {}, r"actions of MultiBinary\(2\), but learners need a Box of floats, Discrete"),
        ("CartPole-v9", {}, "no environment 'CartPole-v9': .*VersionNotFound: .* versioned environments: .*v0"),
        (
            "tests.env.counting:Broken-v0",
            {},
            "AssertionError: assert self.action_space is None, line [0-9]+ of counting.py, in __init__",
        ),
        (
            "tests.env.counting:BrokenInside-v0",
            {},
            "RuntimeError: no license; caused by ValueError: invalid literal for int",
        ),
        ("tests.env.counting:Named-v0", {}, r"observations of Dict.*Discrete\(3\).*FlattenObservation"),
        ("Pendulum-v1", {"options": ("g",)}, "--env.options g: give KEY=VALUE"),
        ("Pendulum-v1", {"options": ("g=[1",)}, r"--env.options g=\[1: not a value"),
        ("Pendulum-v1", {"options": ("gravity=1",)}, "cannot make Pendulum-v1 with gravity=1: TypeError"),
        ("Pendulum-v1", {"vectorization": "vector_entry_point"}, "registers no vector environment"),
    ],
)
def test_an_env_that_cannot_be_trained_is_an_error_with_a_reason(name: str, options: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message), env_of(f"gymnasium:{name}", **options):
        pass


def test_a_word_is_a_tasks_name_where_it_names_a_family_and_a_member():
    argv = ("cartpole", "gymnasium:Pendulum-v1", "gymnasium:", "gymnasium", "--seed", "run:1")
    assert [word for word in argv if registry.is_name(word)] == ["cartpole", "gymnasium:Pendulum-v1"]


def test_a_physics_engine_is_an_error():
    config = TrainConfig(task=COUNTING, env={}, engine="mujoco", settings=asdict(TINY))
    with pytest.raises(UserError, match=r"--engine mujoco: .* has its own engine; leave --engine out"):
        make_env(config, Rank(), range(2))


# With learners


def test_after_a_resume_the_learner_acts_on_new_episodes():
    group = Group(Rank())
    with env_of(COUNTING, num_envs=4) as env, env_of(COUNTING, num_envs=4) as again:
        before = RolloutEnv(env, 0, group)
        before.begin_iteration(0)
        before.begin_rollout(3)
        for _ in range(3):
            before.step(torch.zeros(4, 3))
        after = RolloutEnv(again, 0, group)
        after.load_state(env.state())
        seen = after.obs["policy"]
        assert seen[:, 1].tolist() == [0.0] * 4
        assert not torch.isin(seen[:, 0], before.obs["policy"][:, 0]).any()
        step = after.step(torch.zeros(4, 3))
        torch.testing.assert_close(step.final_obs["policy"], seen + torch.tensor([0.0, 1.0]))


SKRL = SkrlSettings(rollouts=8, layers=(16, 16))
SETTINGS = {
    "ppo": TINY,
    "rsl_rl": RslRlSettings(num_steps_per_env=8, hidden_dims=(16, 16)),
    "rl_games": RlGamesSettings(horizon_length=8, minibatch_size_per_env=4, units=(16, 16)),
    "skrl": SKRL,
    "skrl_jax": SKRL,
}


@pytest.mark.parametrize("learner", LEARNERS)
def test_a_run_is_trained_resumed_rendered_and_exported(learner: str, tmp_path: Path):
    config = TrainConfig(
        COUNTING, {}, learner, asdict(SETTINGS[learner]), num_envs=4, max_iterations=2, logger=("none",)
    )
    run = RunDir(tmp_path / "run")
    result = train(config, run, Console(quiet=True))
    assert (result["status"], result["engine"], result["max_length"]) == ("completed", "gymnasium", TIME_LIMIT)
    assert 2.0 <= result["mean_length"] <= TIME_LIMIT
    # 100 for the first step, 200 for the second, and so on.
    assert 300.0 < result["mean_return"] < 1600.0

    more = replace(config, max_iterations=3)
    newest = run.checkpoints / "iteration_00000002.safetensors"
    assert train(more, run, Console(quiet=True), newest)["iterations"] == 3

    shown = record(str(run.path), tmp_path / "video.mp4", 2.0, 64, 64, 0)
    assert shown.seconds == pytest.approx(2.0)
    assert shown.num_ended >= 3
    with av.open(str(shown.file)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    assert frames.shape == (20, 64, 64, 3)
    assert frames[:, :12].max() < 20, "no black above a picture that is wider than high"
    assert len({round(float(frame[32, 32, 0]) / 50) for frame in frames}) > 2, "the count does not show"
    policy = torch.jit.load(export(str(run.path), "torchscript", None))
    evaluation, _ = evaluate(str(run.path), episodes=2)
    assert evaluation.nominal is not None
    assert evaluation.nominal["length"].mean > 0
    assert policy(torch.zeros(5, 2)).shape == (5, 3)


def paceline(*argv: str, cwd: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*DEFAULT_SIGNALS, sys.executable, "-m", "paceline", *argv]
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_two_ranks_learn_what_one_does(tmp_path: Path):
    few = ["--gpu-ids", "none", "--max-iterations", "2", "--total-envs", "4", "--ppo.horizon", "8", "--logger", "none"]
    results = []
    for ranks in ("1", "2"):
        run = tmp_path / ranks
        process = paceline("train", COUNTING, *few, "--ranks", ranks, "--run-dir", str(run), cwd=tmp_path)
        said = process.communicate(timeout=100)
        assert process.returncode == 0, said
        results.append(json.loads((run / "result.json").read_text()))
    assert [result["world_size"] for result in results] == [1, 2]
    # Two iterations do not suffice for rounding to change an action by much.
    assert results[0]["mean_length"] == results[1]["mean_length"]
    assert results[0]["mean_return"] == pytest.approx(results[1]["mean_return"], rel=1e-3)


def test_an_env_starts_while_a_thread_of_the_trainer_holds_a_lock():
    with LOCK, env_of("gymnasium:tests.env.counting:Locking-v0", vectorization="async") as env:
        assert env.reset()["policy"].shape == (3, 2)


@contextmanager
def training_slowly(cwd: Path, *argv: str) -> Iterator[subprocess.Popen[str]]:
    """A run whose iterations take more than a second each, after the first of them."""
    argv = ("--num-envs", "2", "--gpu-ids", "none", "--max-iterations", "100000", "--logger", "none", *argv)
    process = paceline("train", "gymnasium:tests.env.counting:Slow-v0", "--run-dir", "run", *argv, cwd=cwd)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("iteration"):
                break
        yield process
    finally:
        process.kill()
        for pid in processes_of_group(process.pid):
            os.kill(pid, signal.SIGKILL)


def ended_without_processes_left(process: subprocess.Popen[str]) -> str:
    """Wait for a run that received a stop signal; return what it printed to standard error."""
    _, said = process.communicate(timeout=60.0)
    deadline = time.monotonic() + 10.0
    while processes_of_group(process.pid):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.05)
    assert process.returncode == interrupts.EXIT_CODE, said
    return said


@pytest.mark.parametrize(
    ("vectorization", "number", "to_group"),
    [
        ("sync", signal.SIGINT, False),
        ("async", signal.SIGINT, False),
        ("async", signal.SIGINT, True),
        ("async", signal.SIGTERM, True),
        ("async", signal.SIGHUP, True),
    ],
)
def test_a_stop_request_in_a_long_iteration_leaves_a_checkpoint(
    vectorization: str, number: signal.Signals, to_group: bool, tmp_path: Path
):
    with training_slowly(tmp_path, "--env.vectorization", vectorization) as process:
        # A terminal sends Ctrl-C to all processes of the group, a scheduler SIGTERM to all processes of a job.
        (os.killpg if to_group else os.kill)(process.pid, number)
        assert ended_without_processes_left(process) == f"{interrupts.STOP_NOTICE}\n"
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "interrupted"
    newest = checkpoint.load(checkpoint.newest(tmp_path / "run" / "checkpoints"))
    assert newest["learner"]["iteration"] == result["iterations"]


def test_a_second_ctrl_c_ends_a_run_at_once_and_result_json_says_so(tmp_path: Path):
    with training_slowly(tmp_path, "--env.vectorization", "async") as process:
        os.killpg(process.pid, signal.SIGINT)
        assert process.stderr is not None
        assert process.stderr.readline() == f"{interrupts.STOP_NOTICE}\n"
        time.sleep(1.0)  # two signals that follow each other at once are one request
        os.killpg(process.pid, signal.SIGINT)
        assert "Traceback" not in ended_without_processes_left(process)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize("name", ["Pendulum-v1", "InvertedPendulum-v5"])
def test_envs_of_gymnasium_can_be_rendered(name: str, tmp_path: Path):
    if name == "Pendulum-v1":
        pytest.importorskip("pygame")  # pygame, which classic control renders with, is not part of the extra
    run = RunDir(tmp_path / "run")
    config = TrainConfig(
        task=f"gymnasium:{name}", env={}, settings=asdict(TINY), num_envs=2, max_iterations=1, logger=("none",)
    )
    train(config, run, Console(quiet=True))
    shown = record(str(run.path), None, 0.5, 64, 48, 0)
    with av.open(str(shown.file)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    assert frames.shape[1:] == (48, 64, 3)
    assert frames.std() > 10.0, "one color"
    assert np.abs(frames[-1].astype(float) - frames[0]).max() > 30.0, "all frames alike"
