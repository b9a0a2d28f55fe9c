"""`paceline check` finds what breaks the contract of a task or an env, and says what to change."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from paceline.check import Check, check
from paceline.cli.check import check as command
from paceline.env.task import EnvState, ResetState
from paceline.env.training_settings import TrainingSettings
from paceline.env.vec_env import Step, TensorSpec
from paceline.errors import UserError
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.tasks.cartpole import Cartpole
from paceline.tasks.registry import EnvEntry, TaskEntry
from paceline.tensors import random
from paceline.train import train
from tests.tasks.test_registry import installed


@dataclass(frozen=True)
class Walk:
    """Options of an env with one fault."""

    fault: str = ""


class WalkEnv:
    """A point that walks by its actions, and episodes of 5 steps. `fault` breaks the contract in one way."""

    num_actions, max_episode_steps, step_seconds, capturable = 2, 5, 0.1, False
    log_names: tuple[str, ...] = ("length", "return")

    def __init__(self, options: Walk, num_envs: int, device: torch.device, seed: int, first_env: int):
        self.fault, self.num_envs, self.device, self.first_env = options.fault, num_envs, device, first_env
        self.seed, self.steps, self.point = seed, 0, torch.zeros(num_envs, 2)
        self.sums, self.buffer = torch.zeros(num_envs, 2), torch.zeros(num_envs, 2)
        self.observation_spec: Any = {"policy": TensorSpec((2,))}
        match self.fault:
            case "no group":
                self.observation_spec = {"proprioception": TensorSpec((2,))}
            case "a list of sizes":
                self.observation_spec = {"policy": TensorSpec([2])}  # pyright: ignore[reportArgumentType]
            case "log names":
                self.log_names = ("return", "length")
            case "no step time":
                self.step_seconds = 0.0
            case "one number of choices":
                self.action_choices = 3
            case "other first env":
                self.first_env = 3
            case "an exception":
                raise ValueError("no such file: walk.urdf")
            case "captured" | "capturable":
                self.capturable = True

    def start(self, mask: Tensor) -> None:
        index = torch.arange(self.num_envs) + (0 if self.fault == "local index" else self.first_env)
        step = torch.tensor(self.steps)
        point = random.uniform(self.seed, index, step, random.Stream.RESET, 2)
        if self.fault == "global random numbers":
            point = torch.rand(self.num_envs, 2)
        self.point = torch.where(mask[:, None], point, self.point)
        self.sums = self.sums.masked_fill(mask[:, None], 0.0)
        self.steps += 1

    def observe(self) -> dict[str, Tensor]:
        if self.fault == "one buffer":
            return {"policy": self.buffer.copy_(self.point)}
        return {"policy": self.point.clone()}

    def reset(self) -> Any:
        self.start(torch.ones(self.num_envs, dtype=torch.bool))
        obs = self.observe()["policy"]
        match self.fault:
            case "narrow reset":
                return {"policy": obs[:, :1]}
            case "doubles":
                return {"policy": obs.double()}
            case "one more group":
                return {"policy": obs, "state": obs}
            case "a tensor":
                return obs
        return {"policy": obs}

    def step(self, actions: Tensor) -> Any:
        if self.fault == "captured" and actions.max() > 0.0:
            actions = actions.clone()
        if self.fault == "an exception in a step":
            raise KeyError("left_foot")
        if self.fault == "clamped actions":
            actions.clamp_(-0.1, 0.1)
        self.point = self.point + 0.1 * actions
        reward = -self.point.norm(dim=1)
        if self.fault == "infinite reward":
            reward = reward / (self.sums[:, 0] != 3.0).float()
        self.sums = self.sums + torch.stack((torch.ones_like(reward), reward), dim=1)
        terminated = self.point[:, 0] > 0.8
        limit = 7 if self.fault == "late time limit" else 5
        truncated = (self.sums[:, 0] >= limit) & ~terminated
        if self.fault == "both":
            truncated = truncated | terminated
        final, log = self.observe(), self.sums
        self.start(terminated | truncated)
        if self.fault == "log of the next episode":
            log = self.sums.clone()
        if self.fault == "wide reward":
            reward = reward[:, None]
        if self.fault == "integers":
            terminated = terminated.int()
        step = Step(self.observe(), reward, terminated, truncated, final, log)
        return (step.obs, reward) if self.fault == "a tuple" else step

    def prefetch_random(self, steps: int) -> None:
        pass

    def faults(self) -> Tensor:
        return torch.zeros(2)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"point": self.point, "sums": self.sums, "steps": torch.tensor(self.steps)}
        state["episode_step"] = self.sums[:, 0].long()
        match self.fault:
            case "no episode_step":
                del state["episode_step"]
            case "no steps in the state":
                del state["steps"]
            case "a number in the state":
                state["steps"] = self.steps
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.point, self.sums = state["point"], state["sums"]
        self.steps = int(state.get("steps", 0))
        if self.fault == "new episodes":
            self.reset()


ENV = EnvEntry(
    Walk,
    summary="walks",
    engine="walk",
    make=WalkEnv,
    training=TrainingSettings(horizon=8, minibatches=2, epochs=1, hidden_layers=(4,)),
)
NOTHING = replace(ENV, make=lambda options, **placed: None)
MEMBERS, RESET, STEPS = "members of the env", "shapes and dtypes of reset()", "shapes and dtypes of step()"
FAULTS = {
    "no group": (MEMBERS, "has 'proprioception': it needs the group 'policy' or an image"),
    "no step time": (MEMBERS, "step_seconds is 0.0: make it the simulated time of a step in seconds, above 0"),
    "a list of sizes": (MEMBERS, "['policy'].shape is [2]: give a tuple of the sizes for one env, each at least 1"),
    "one number of choices": (
        MEMBERS,
        "'action_choices' is 3, but must be a tuple of numbers of choices, each above 0",
    ),
    "other first env": (MEMBERS, "first_env is 3, but `make` received 0: keep the argument"),
    "an exception": (MEMBERS, '`raise ValueError("no such file: walk.urdf")`: no such file: walk.urdf'),
    "log names": ("log names and sums", "the first two must be 'length' and 'return'"),
    "narrow reset": (RESET, "reset()['policy'] has shape [4, 1]: make it [4, 2], one row per env"),
    "doubles": (RESET, "reset()['policy'] is torch.float64: convert it to torch.float32"),
    "one more group": (RESET, "reset() has the group 'state': add it to observation_spec, or remove it"),
    "a tensor": (RESET, "reset() is Tensor: make it a dict of observation groups"),
    "wide reward": (STEPS, "step().reward has shape [4, 1]: make it [4], one row per env"),
    "integers": (STEPS, "step().terminated is torch.int32: convert it to torch.bool"),
    "a tuple": (STEPS, "step(actions) returns tuple: return a paceline.env.vec_env.Step"),
    "captured": (
        "no host syncs",
        '`if self.fault == "captured" and actions.max() > 0.0:`: takes the value of a tensor',
    ),
    "infinite reward": ("finite values", "the reward of env 0 became -inf in step 4 of the rollout: end the episode"),
    "both": ("terminated and truncated never both", "in an env: use truncated & ~terminated"),
    "one buffer": ("fresh tensors", "a later step writes to reset()['policy']: return a copy, for example by clone()"),
    "clamped actions": ("fresh tensors", "step(actions) writes to the actions: copy them before you change them"),
    "log of the next episode": ("log names and sums", "log the sums since its start, and for an episode that ends"),
    "late time limit": ("time limit", "an episode is longer than max_episode_steps, 5: truncate it there"),
    "no episode_step": ("state round trip", "state() has no 'episode_step' of shape [env]"),
    "no steps in the state": (
        "state round trip",
        "differs in step 1 between an env and one that",
    ),
    "a number in the state": ("state round trip", "state()['steps'] is int: make it a tensor"),
    "global random numbers": ("same results with the same seed", "differs before the first step between two envs with"),
    "local index": ("same results on 1 and 2 ranks", "its global index, first_env + n"),
}


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = {"walk": "ENV", "nothing": "NOTHING", "faulty-task": "TASK"}
    installed(tmp_path, monkeypatch, **{name: f"tests.test_check:{entry}" for name, entry in tasks.items()})


def findings(checks: list[Check]) -> dict[str, list[str]]:
    assert all((each.state == "fails") == bool(each.findings) for each in checks)
    return {each.name: each.findings for each in checks if each.findings}


def test_a_correct_env_has_no_findings(registered: None):
    checks = check("walk", num_envs=4, steps=30)
    assert findings(checks) == {}
    states = {each.name: each.state for each in checks}
    assert states.pop("no host syncs") == "not run"
    assert set(states.values()) == {"ok"}
    assert {each.state for each in check("walk", {"fault": "capturable"}, num_envs=4, steps=30)} == {"ok"}


def test_a_function_make_that_returns_nothing_is_found(registered: None):
    found = findings(check("nothing"))
    assert found[MEMBERS][0] == "it has no member 'num_envs': define it as VecEnv in paceline.env.vec_env does"


def test_checks_after_a_fault_are_not_run(registered: None):
    states = {each.name: each.state for each in check("walk", {"fault": "narrow reset"}, num_envs=4)}
    assert (states[MEMBERS], states[RESET], states[STEPS]) == ("ok", "fails", "not run")
    checks = {each.name: each for each in check("walk", {"fault": "an exception in a step"}, num_envs=4)}
    assert (checks[RESET].state, checks[STEPS].state, checks["fresh tensors"].state) == ("ok", "fails", "not run")
    assert re.fullmatch(r"KeyError in test_check.py:\d+, `raise KeyError.*`: 'left_foot'", checks[STEPS].findings[0])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_an_env_is_found_with_a_remedy(fault: str, registered: None):
    name, text = FAULTS[fault]
    found = findings(check("walk", {"fault": fault}, num_envs=4, steps=30))
    assert text in found[name][0]
    assert "\n" not in found[name][0]
    assert {name: len(texts) for name, texts in found.items()} == {name: 2 if fault == "one buffer" else 1}


def test_an_env_that_starts_new_episodes_when_it_is_restored_is_accepted(registered: None):
    checks = {each.name: each for each in check("walk", {"fault": "new episodes"}, num_envs=4)}
    restored = checks["state round trip"]
    assert (restored.state, "starts new episodes" in restored.note) == ("ok", True)


@dataclass(frozen=True)
class FaultyTask(Cartpole):
    """A task with one fault."""

    fault: str = ""

    def reset(self, state: EnvState, uniform: Tensor) -> ResetState:
        if self.fault == "another env":
            uniform = uniform.roll(1, 0)
        start = super().reset(state, uniform)
        match self.fault:
            case "narrow reset":
                return start._replace(qpos=start.qpos[:, :1])
            case "one row":
                return start._replace(qvel=start.qvel[:1])
        return start

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        CALLS.append(self.fault)
        if self.fault == "an exception" and CALLS.count(self.fault) > 10:
            raise KeyError("left_foot")
        return super().observe(state)

    def terminated(self, state: EnvState) -> Tensor:
        # A CPU trains a task that waits for the host, and a GPU does not.
        ended = super().terminated(state)
        return ended | (float(state.qpos.max()) > 1e6) if self.fault == "a host sync" else ended

    def reward(self, state: EnvState, terminated: Tensor) -> dict[str, Tensor]:
        terms = super().reward(state, terminated)
        match self.fault:
            case "a write":
                state.qvel.mul_(0.5)
            case "a new term" if CALLS.count(self.fault) > 10:
                terms["late"] = terms["alive"]
            case "a counter":
                terms["alive"] = terms["alive"] + len(CALLS)
            case "an infinite term":
                terms["alive"] = terms["alive"] / (state.episode_step != 3).float()
            case "the mean of all envs":
                terms["alive"] = terms["alive"] - state.qpos[:, 0].mean()
        return terms


CALLS = list[str]()
"""Fault of the task in each call of `observe`."""
TASK = TaskEntry(FaultyTask, summary="is faulty")
MEMBERS_OF_TASK, RANKS = "members and results of the task", "same results on 1 and 2 ranks"
TASK_FAULTS = {
    "narrow reset": (MEMBERS_OF_TASK, "qpos of reset(state, uniform) is a float32 tensor of shape [4, 1], but must be"),
    "one row": (
        MEMBERS_OF_TASK,
        "qvel of reset(state, uniform) is a float32 tensor of shape [1, 2], but must be a flo",
    ),
    "an exception": (MEMBERS_OF_TASK, """`raise KeyError("left_foot")`: 'left_foot'"""),
    "a host sync": ("no host syncs", "torch.where(condition, a, b)"),
    "a write": (
        "read-only state and fixed shapes",
        "reward(state, terminated) writes to state.qvel: the state is read",
    ),
    "a new term": ("read-only state and fixed shapes", "names, shapes and dtypes must be the same in every step"),
    "an infinite term": ("finite values", "reward term 'alive' of env 0 became inf in step 3 of the rollout: end the"),
    "a counter": ("same results with the same seed", "keep values that change between steps in the task state"),
    "the mean of all envs": (
        RANKS,
        "reward of env 0 differs in step 1 between 1 and 2 ranks: compute the values of an",
    ),
    "another env": (RANKS, "compute the values of an env from its own rows only"),
}


@pytest.mark.parametrize("fault", TASK_FAULTS)
def test_a_fault_of_a_task_is_found_once_with_a_remedy(fault: str, registered: None):
    name, text = TASK_FAULTS[fault]
    CALLS.clear()
    ((found, (finding,)),) = findings(check("faulty-task", {"fault": fault}, num_envs=4, steps=20)).items()
    assert found == name
    assert text in finding
    assert "\n" not in finding


SYNCING = ("faulty-task", "--env.fault", "a host sync")


def test_the_command_prints_one_line_per_check_then_findings(registered: None, capsys: pytest.CaptureFixture[str]):
    assert command([*SYNCING, "--num-envs", "4", "--steps", "20"], Console(soft_wrap=True)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split(maxsplit=1) == ["ok", "members and results of the task"]
    assert lines[1].split(maxsplit=1) == ["fails", "no host syncs"]
    assert all(line.startswith("ok ") for line in lines[2:14])
    assert lines[15].startswith("no host syncs: terminated(state) in test_check.py:")
    assert lines[-1] == "faulty-task: 1 finding"


def test_checks_that_cannot_run_say_so_in_json(registered: None, capsys: pytest.CaptureFixture[str]):
    assert command(["faulty-task", "--env.fault", "narrow reset", "--json"], Console()) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["task"], found["ok"]) == ("faulty-task", False)
    first, *others = found["checks"]
    assert "qpos of reset(state, uniform) is a float32 tensor of shape [8, 1]" in first["findings"][0]
    assert {each["state"] for each in others} == {"not run"}


def test_the_command_takes_the_options_of_the_task(registered: None, capsys: pytest.CaptureFixture[str]):
    assert command(["walk", "--env.fault", "both", "--steps", "30", "--json"], Console()) == 1
    capsys.readouterr()
    assert command(["Isaac-Cartpole-Direct-v0", "--steps", "9", "--env.max-force", "50"], Console()) == 0
    assert capsys.readouterr().out.startswith("Isaac-Cartpole-Direct-v0 is the task cartpole. The cart and the pole")
    with pytest.raises(UserError, match=r"unknown option '--env.fult': did you mean '--env.fault'"):
        command(["walk", "--env.fult", "both"], Console())
    with pytest.raises(UserError, match="--num-envs 1 must be at least 2"):
        command(["walk", "--num-envs", "1"], Console())
    with pytest.raises(UserError, match="no task given: use paceline check TASK"):
        command([], Console())


CONFIG = TrainConfig(task="walk", env={}, num_envs=4, max_iterations=4, logger=("none",))


@pytest.mark.parametrize(
    "fault", ["narrow reset", "doubles", "wide reward", "both", "log names", "one buffer", "late time limit"]
)
def test_a_training_refuses_an_env_that_breaks_its_contract(fault: str, registered: None, tmp_path: Path):
    with pytest.raises(UserError, match=r"env WalkEnv: .*; `paceline check walk` checks the whole env") as refused:
        train(replace(CONFIG, env={"fault": fault}), RunDir(tmp_path / "run"), Console(quiet=True))
    assert FAULTS[fault][1] in str(refused.value)


def test_a_training_names_what_a_gpu_could_not_capture(
    registered: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    result = train(
        replace(CONFIG, task="faulty-task", env={"fault": "a host sync"}),
        RunDir(tmp_path / "run"),
        Console(soft_wrap=True),
    )
    assert result["status"] == "completed"
    note = (
        "This task cannot be captured as a CUDA graph, which training on a GPU needs: terminated(state) in test_check"
    )
    assert note in capsys.readouterr().out
