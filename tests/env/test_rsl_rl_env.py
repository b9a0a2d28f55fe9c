"""Envs with the interface of RSL-RL, and tasks of mjlab, whose interface `mjlab_interface` has."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from tensordict import TensorDict
from torch import Tensor

from paceline.env.rsl_rl_env import RslRlEnv
from paceline.env.vec_env import Step
from paceline.errors import UserError
from paceline.evaluate import evaluate
from paceline.learners.learner import LEARNERS
from paceline.run import checkpoint
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.tasks import registry
from paceline.train import train
from tests.distributed.ranks import paceline_on_ranks

INTERFACE = Path(__file__).parent / "mjlab_interface"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _mjlab(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(INTERFACE)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "mjlab"]:
        del sys.modules[name]


def make(num_envs: int = 4, seed: int = 0, first_env: int = 0, options: tuple[str, ...] = ()) -> RslRlEnv:
    entry = registry.find("mjlab:Mjlab-Rail")
    assert isinstance(entry, registry.EnvEntry)
    env = entry.make(entry.task(options), num_envs=num_envs, device=CPU, seed=seed, first_env=first_env)
    assert isinstance(env, RslRlEnv)
    return env


def rollout(env: RslRlEnv, steps: int, action: float = 0.0) -> list[Step]:
    return [env.step(torch.full((env.num_envs, 1), action)) for _ in range(steps)]


def test_sizes_groups_and_settings_are_those_of_the_mjlab_task():
    env, entry = make(), registry.find("mjlab:Mjlab-Rail")
    assert (env.num_actions, env.max_episode_steps, env.step_seconds) == (1, 10, 0.1)
    assert {name: spec.shape for name, spec in env.observation_spec.items()} == {"policy": (2,), "critic": (5,)}
    assert env.log_names == ("length", "return", "Episode_Reward/center", "Curriculum/step")
    training = entry.training
    assert (training.horizon, training.discount, training.hidden_layers) == (6, 0.9, (16, 16))
    # A constant learning rate, and a number of minibatches that divides the horizon.
    assert (training.desired_kl, training.minibatches, training.initial_std) == (0.0, 3, 0.5)
    assert entry.max_iterations == 7
    settings: Any = LEARNERS["rsl_rl"].settings.from_training(training)
    assert (settings.hidden_dims, settings.critic_hidden_dims) == ((16, 16), (32, 16))


def test_a_time_limit_truncates_and_has_the_observations_before_the_step_as_the_final_ones():
    env = make()
    first = env.reset()
    *steps, last = rollout(env, 10)
    assert not any(step.truncated.any() or step.terminated.any() for step in steps)
    assert last.truncated.all()
    assert not last.terminated.any()
    assert torch.equal(last.final_obs["policy"], steps[-1].obs["policy"])
    assert not torch.equal(last.obs["policy"], first["policy"]), "no new episode"
    assert torch.equal(last.obs["critic"][:, 2], torch.zeros(4))
    # Without actions the point stays where it started.
    expected = 10.0 * (1.0 - first["policy"][:, 0].abs())
    torch.testing.assert_close(last.log[:, :2], torch.stack((torch.full((4,), 10.0), expected), dim=1))
    # The mean that the env reports of the episodes that ended.
    assert last.log[:, 2].tolist() == [10.0] * 4


def test_an_end_before_the_time_limit_is_terminal_and_so_is_every_end_of_a_finite_horizon():
    env = make()
    env.reset()
    done = next(step for step in rollout(env, 9, action=20.0) if step.terminated.any())
    assert not (done.terminated & done.truncated).any()
    env = make(options=("is_finite_horizon=true",))
    env.reset()
    assert rollout(env, 10)[-1].terminated.all()


def test_tensors_that_were_returned_are_not_written_again():
    env = make()
    start = env.reset()
    steps = rollout(env, 2, action=1.0)
    seen = [start["policy"], *(part for s in steps for part in (*s.obs.values(), *s.final_obs.values(), s.log))]
    before = [tensor.clone() for tensor in seen]
    rollout(env, 12, action=1.0)
    assert all(map(torch.equal, seen, before))


def test_ranks_have_different_random_numbers_and_the_same_seed_has_the_same():
    first, again, other = (make(first_env=index).reset()["policy"] for index in (0, 0, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_options_change_the_configuration():
    env = make(options=("episode_length_s=2", "rewards.center.weight=0", "start=[0.25, 0.25]"))
    assert env.max_episode_steps == 20
    assert env.reset()["policy"][:, 0].tolist() == [0.25] * 4
    assert rollout(env, 1)[0].reward.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("episode_length_s", "give KEY=VALUE"),
        ("episode_length=1", "unknown key 'episode_length': did you mean 'episode_length_s'"),
        ("rewards.centre.weight=1", "unknown key 'centre': did you mean 'center'"),
        ("seed.value=1", "unknown key 'value'"),
        ("episode_length_s=long", "episode_length_s is 1.0: give a float"),
        ("scene=5", "give a SceneCfg"),
        ("start=[", "not a value"),
    ],
)
def test_a_bad_option_is_refused_in_one_line(option: str, message: str):
    with pytest.raises(UserError, match=message) as error:
        make(options=(option,))
    assert str(error.value).startswith(f"--env.options {option}: ")
    assert "\n" not in str(error.value)


def test_an_unknown_task_and_a_missing_package_are_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="unknown mjlab task 'Mjlab-Rial': did you mean 'Mjlab-Rail'"):
        registry.find("mjlab:Mjlab-Rial")
    with pytest.raises(UserError, match="mjlab:nothing:Mjlab-Rail: the module nothing cannot be imported: it was not"):
        registry.find("mjlab:nothing:Mjlab-Rail")
    for name in [name for name in sys.modules if name.split(".")[0] == "mjlab"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(INTERFACE)])
    with pytest.raises(UserError, match="it was not found; install Paceline in an environment of mjlab"):
        registry.find("mjlab:Mjlab-Rail")


class Plain:
    """An env with the members that RSL-RL itself requires: no reset, no logs, and no time limits."""

    num_envs, num_actions, device, cfg = 2, 1, "cpu", None
    max_episode_length = torch.tensor([5, 7])

    def __init__(self, obs: Any = None):
        self.obs = TensorDict(cast("Any", {"policy": torch.ones(2, 3)}), [2]) if obs is None else obs

    def get_observations(self) -> Any:
        return self.obs

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, dict[str, Any]]:
        return self.obs, torch.ones(2), torch.tensor([0, 1]), {}


def test_an_env_with_only_the_members_of_rsl_rl_is_enough():
    env = RslRlEnv(Plain(), step_seconds=0.5)
    assert (env.max_episode_steps, env.step_seconds, env.log_names) == (7, 0.5, ("length", "return"))
    assert env.reset()["policy"].shape == (2, 3)
    step = env.step(torch.zeros(2, 1))
    assert (step.terminated.tolist(), step.truncated.tolist()) == ([False, True], [False, False])
    env.load_state(env.state())
    assert env.state()["episode_step"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("obs", "groups", "message"),
    [
        ((torch.ones(2, 3), {}), None, "the observations are a tuple, not a TensorDict: RSL-RL 3 or newer is needed"),
        (
            {"state": torch.ones(2, 3)},
            None,
            "no group of observations for the policy: the env has state; give `groups`",
        ),
        ({"policy": torch.ones(2, 3)}, {"policy": ["policy", "map"]}, "no group 'map' of observations: the env has"),
        ({"policy": torch.ones(2, 3, 8, 8)}, None, r"'policy' of observations has shape \(3, 8, 8\): only vectors"),
        ({"policy": {"a": torch.ones(2, 3)}}, None, "'policy' of observations has several terms: only vectors"),
        ({"policy": torch.ones(2, 3)}, {"policy": ["policy"], "camera": []}, "observations 'camera': learners have"),
    ],
)
def test_observations_that_learners_cannot_use_are_refused(obs: Any, groups: Any, message: str):
    with pytest.raises(UserError, match=message):
        RslRlEnv(Plain(obs), groups=groups, step_seconds=0.5)
    with pytest.raises(UserError, match="Plain has no step_dt: give RslRlEnv the time of a step as step_seconds"):
        RslRlEnv(Plain())


def test_a_resumed_run_keeps_its_counts_and_starts_new_episodes(tmp_path: Path):
    config = TrainConfig(task="mjlab:Mjlab-Rail", env={}, num_envs=64, max_iterations=40, logger=("none",))
    console, run = Console(quiet=True), RunDir(tmp_path / "run")
    early = train(replace(config, max_iterations=4), run, console)
    later = train(config, run, console, checkpoint.newest(run.checkpoints))
    # The env counts its steps of all sessions, of 6 steps in each iteration, from which its curricula follow.
    envs = checkpoint.load_envs(checkpoint.newest(run.checkpoints), range(64))
    assert int(envs["steps"]) == 40 * 6
    assert (later["iterations"], later["engine"]) == (40, "mjlab")
    assert early["mean_return"] < 8.0 < later["mean_return"], "it does not learn"
    found, _ = evaluate(str(run.path), episodes=64)
    assert found.nominal is not None
    assert found.nominal["length"].mean == pytest.approx(10.0)


def test_two_ranks_train_an_mjlab_task(tmp_path: Path):
    argv = ["train", "mjlab:Mjlab-Rail", "--gpu-ids", "none", "--num-envs", "4", "--max-iterations", "2"]
    argv += ["--logger", "none", "--run-dir", "run"]
    variables = {"PYTHONPATH": str(INTERFACE)}
    for done in paceline_on_ranks(tmp_path, (argv, variables), (argv, variables)):
        assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (found["status"], found["world_size"], found["task"]) == ("completed", 2, "mjlab:Mjlab-Rail")


def test_the_pages_file_for_isaac_lab_runs_with_its_documented_interface(monkeypatch: pytest.MonkeyPatch):
    page = (Path(__file__).parents[2] / "docs" / "bring_your_env.md").read_text()
    source = re.search(r'^```python title="my_envs/isaac_lab.py"\n(.*?)^```$', page, re.MULTILINE | re.DOTALL)
    assert source
    envs, rl = import_module("mjlab.envs"), import_module("mjlab.rl")
    started = []

    def stand_in(name: str, **members: Any) -> None:
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)

    stand_in("isaaclab")
    stand_in("isaaclab.app", AppLauncher=lambda **arguments: started.append(arguments))
    stand_in("isaaclab_tasks")
    config = envs.ManagerBasedRlEnvCfg()

    def parse_env_cfg(name: str, device: str, num_envs: int) -> Any:
        config.scene.num_envs = num_envs
        return config

    stand_in("isaaclab_tasks.utils", parse_env_cfg=parse_env_cfg)
    stand_in("isaaclab_rl")
    stand_in("isaaclab_rl.rsl_rl", RslRlVecEnvWrapper=rl.RslRlVecEnvWrapper)
    made = {}

    def gym_make(name: str, cfg: Any) -> Any:
        made[name] = cfg.seed
        return envs.ManagerBasedRlEnv(cfg, "cpu")

    monkeypatch.setattr("gymnasium.make", gym_make)
    stand_in("isaac_lab_page")
    content = vars(sys.modules["isaac_lab_page"])
    exec(compile(source[1], "isaac_lab.py", "exec"), content)
    entry = content["ENTRY"]
    env = entry.make(entry.task(name="Isaac-Rail-v0"), num_envs=3, device=CPU, seed=5, first_env=6)
    assert (started, made) == ([{"headless": True, "device": "cpu"}], {"Isaac-Rail-v0": 11})
    assert env.reset()["policy"].shape == (3, 2)
    assert env.step(torch.zeros(3, 1)).obs["critic"].shape == (3, 3)


WITHOUT_MUJOCO = """
import importlib.abc, pkgutil, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("mujoco", "mujoco_warp", "warp"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
import paceline.distributed, paceline.learners, paceline.launch, paceline.run, paceline.training
from paceline.cli.main import main

for package in (paceline.distributed, paceline.learners, paceline.launch, paceline.run, paceline.training):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        __import__(module.name)
few = ["--num-envs", "4", "--max-iterations", "1", "--logger", "none", "--gpu-ids", "none"]
task = ["train", "mjlab:Mjlab-Rail", *few, "--run-dir", "run"]
for argv in (task, ["export", "run", "--format", "torchscript", "--check"], ["eval", "run", "--episodes", "4"]):
    sys.argv = ["paceline", *argv]
    assert main() == 0, argv
# A run with an env of RSL-RL depends on the number of ranks.
sys.argv = ["paceline", "check", "mjlab:Mjlab-Rail"]
assert main() == 1
sys.argv = ["paceline", "train", "cartpole", *few]
sys.exit(main())
"""


def test_learners_ranks_and_launch_need_no_mujoco(tmp_path: Path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(INTERFACE), *sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_MUJOCO], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    message = "paceline: task 'cartpole' needs MuJoCo, which is not installed: pip install 'mujoco>=4'"
    assert done.stderr.strip() == message
    assert "mjlab:Mjlab-Rail: 1 finding" in done.stdout
    assert (tmp_path / "run" / "policy.pt").exists()
    assert list((tmp_path / "run" / "eval").iterdir())
