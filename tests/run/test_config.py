"""An edited run.yaml: every wrong value gives one line, and a small file never expands to a large object."""

import contextlib
import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.env.robot_env import RobotEnv
from paceline.errors import UserError
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.tasks import registry
from paceline.training.build import resolve
from paceline.validation import parse_yaml

VALID = "task: cartpole\nenv: {}\n"
NUMBERS = (math.nan, math.inf, -math.inf, 1e300, -1e300)
COUNTS = (-1, 0, 10**9, 2**63, 2**100)


def config(lines: str) -> TrainConfig:
    return resolve(TrainConfig.from_yaml(VALID + lines, "run.yaml"))[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("learner: [ppo]", "learner .* must be a string"),
        ("learner: {ppo: 1}", "learner .* must be a string"),
        ("learner: 5", "learner 5 must be a string"),
        ("learner:", "learner None must be a string"),
        ("learner: pp", "unknown learner 'pp': did you mean 'ppo'"),
        ("seed: [1]", "seed .1. must be a whole number"),
        ("seed: true", "seed True must be a whole number"),
        ("num_envs: .nan", "num_envs nan must be a whole number"),
        ("num_envs: 1000000000000", "num_envs 1000000000000 must be at most"),
        ("num_envs: 0x" + "f" * 5000, "a number of 20000 bits"),
        ("num_envs: " + "9" * 5000, "not valid YAML"),
        ("max_iterations: 9999999999999999", "max_iterations 9999999999999999 must be at most"),
        ("timeout: 1.0e+300", "timeout 1e.300 must be at most"),
        ("timeout: .nan", "timeout nan must be at most"),
        ("task: {a: b}", "task .* must be a string"),
        ("env: [1]", "env .1. must be a mapping"),
        ("env: {1: 2}", "unknown key '1'"),
        ("5: 6", "unknown key '5'"),
        ("[1, 2]: 3", "not valid YAML"),
        ("? {a: b}\n: 3", "not valid YAML"),
        ("gpu_ids: [0, a]", "gpu_ids 'a' must be a whole number"),
        ("gpu_ids: [true]", "gpu_ids True must be a whole number"),
        ("settings: {5: 6}", "unknown key '5'"),
        ("settings: {horizn: 6}", "settings of learner ppo: unknown key 'horizn': did you mean 'horizon'"),
        ("settings: {hidden: [16, many]}", "hidden 'many' must be a whole number"),
        ("settings: {hidden: [[16]]}", "hidden .16. must be a whole number"),
        ("settings: {hidden: [1000000000]}", "hidden 1000000000 must be at most 8192"),
        ("settings: {hidden: [8192, 8192, 8192]}", "weights between hidden layers"),
        ("settings: {horizon: 1000000000000}", "horizon 1000000000000 must be at most"),
        ("settings: {value_weight: .inf}", "value_weight inf must be a finite number"),
        ("settings: {clip_value: 1}", "clip_value 1 must be true or false"),
        ("logger: [5]", "logger 5 must be 'tensorboard', 'wandb'"),
        ("logger: [none, tensorboard]", "none means no logger"),
        ("worker_log_dir: 5", "worker_log_dir 5 must be a string"),
        ("seed: 2001-99-99", "not valid YAML"),
        ("seed: !!int abc", "not valid YAML"),
        ("seed: !!bool abc", "not valid YAML"),
        ("seed: !!python/object/apply:os.system [true]", "not valid YAML"),
        ("a: &a [1]\nb: *a", "an alias"),
        ("a: " + "[" * 20000, "nested too deep"),
        ("a: \0", "not valid YAML"),
        ("a: " + "x" * 300, "unknown key 'a'"),
        ("timeout_seconds: 60.0", "was written by Paceline 0.1: use that version, or train the task again"),
    ],
)
def test_a_wrong_value_is_one_short_line(line: str, message: str):
    with pytest.raises(UserError, match=message) as caught:
        config(line)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 1000


def test_whole_numbers_and_lists_are_converted_to_the_types_of_the_settings():
    found = config("timeout: 5\nsettings: {hidden: [4, 5], learning_rate: 0.001}\ngpu_ids: []\n")
    assert (found.timeout, found.gpu_ids, found.settings["hidden"]) == (5.0, (), [4, 5])
    assert type(found.timeout) is float


def test_a_configuration_is_the_same_after_writing_and_reading():
    whole = TrainConfig(task="go1-velocity", env={"delay": [0, 2], "episode_seconds": 5.0}, gpu_ids=(0, 1))
    assert TrainConfig.from_yaml(whole.to_yaml(), "run.yaml") == whole


def test_the_single_logger_of_earlier_versions_is_read():
    assert config("logger: none").logger == ("none",)


def test_aliases_that_would_multiply_are_not_expanded():
    lines = ["a0: &a0 {x: 1}"] + [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 12)]
    started = time.monotonic()
    with pytest.raises(ValueError, match="an alias"):
        parse_yaml("\n".join(lines))
    assert time.monotonic() - started < 5.0


def test_a_huge_file_is_refused_unread(tmp_path: Path):
    with (tmp_path / "run.yaml").open("wb") as file:
        file.truncate(2**40)
    (tmp_path / "result.json").write_bytes(b"[" * 2**21)
    with pytest.raises(UserError, match=r"cannot read .*more than"):
        RunDir(tmp_path).config()
    assert RunDir(tmp_path).result() == {}


@pytest.mark.parametrize("text", ["", "[]", "5", "null", "{", "[" * 100000, '{"a": ' + "9" * 5000 + "}", "\xff"])
def test_an_invalid_result_is_read_as_empty(text: str, tmp_path: Path):
    (tmp_path / "result.json").write_text(text, encoding="latin-1")
    assert RunDir(tmp_path).result() == {}


@pytest.mark.parametrize("name", registry.names())
def test_absurd_numbers_of_a_task_are_refused(name: str):
    task: Any = registry.find(name).task
    for option in dataclasses.fields(task):
        value = getattr(task(), option.name)
        for number in NUMBERS if type(value) is float else ():
            with pytest.raises(UserError, match=f"--env.{option.name.replace('_', '-')}"):
                RobotEnv(task(**{option.name: number}), 1)


@pytest.mark.parametrize("name", ["cartpole", "go1-velocity-rough"])
def test_absurd_counts_of_a_task_are_refused_or_harmless(name: str):
    task: Any = registry.find(name).task
    for option in dataclasses.fields(task):
        if type(getattr(task(), option.name)) is not int:
            continue
        for number in COUNTS:
            with contextlib.suppress(UserError):
                env = RobotEnv(task(**{option.name: number}), 1)
                assert env.step(torch.zeros(1, env.num_actions)).reward.isfinite().all()


@pytest.mark.parametrize(
    ("option", "value"),
    [("episode_seconds", 1e300), ("episode_seconds", 1e8), ("decimation", 10**9), ("history", 10**9)],
)
def test_options_that_would_never_finish_are_refused(option: str, value: float):
    flag = f"--env.{option.replace('_', '-')}"
    with pytest.raises(UserError, match=f"{flag} .* (at most|between)"):
        RobotEnv(registry.find("go1-velocity").task(**{option: value}), 1)


@pytest.mark.parametrize(
    "option",
    [
        "max_episode_steps=[",
        "max_episode_steps=abc",
        "max_episode_steps=1.5",
        "wrappers=[a]",
        "num_envs=1000000000",
        "id=x",
        "entry_point=os:system",
        "vector_kwargs={a: 1}",
        "g=0x" + "f" * 50,
    ],
)
def test_options_that_gymnasium_cannot_take_are_one_line(option: str):
    entry = registry.find("gymnasium:Pendulum-v1")
    assert isinstance(entry, registry.EnvEntry)
    with pytest.raises(UserError) as caught:
        entry.make(entry.task(options=(option,)), num_envs=1, device=torch.device("cpu"), seed=0, first_env=0)
    assert len(str(caught.value).splitlines()) == 1
