"""Random command lines, parsed in one process without running the commands."""

import contextlib
import dataclasses
import io
import random
import shutil
import string
import traceback
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import train_arguments as arguments
from paceline.cli.commands import DoctorArguments, ExportArguments, PlayArguments, TasksArguments
from paceline.cli.options import parse_options
from paceline.cli.report import ReportArguments
from paceline.errors import UserError
from paceline.learners.learner import LEARNERS
from paceline.run.config import TrainConfig
from paceline.tasks import registry
from paceline.validation import from_dict
from tests.fuzz.guard import cases, harmless

COMMANDS = {
    "play": PlayArguments,
    "export": ExportArguments,
    "doctor": DoctorArguments,
    "tasks": TasksArguments,
    "report": ReportArguments,
}
TRAIN_FLAGS = """
--learner --learner-config --ml_framework --num-envs --total-envs --max-iterations --seed --run-dir --resume --engine
--gpu-ids --ranks --launcher --hosts --max-restarts --timeout --worker-log-dir --torchrunx-log-dir --logger
--checkpoint-every --keep-checkpoints --headless --distributed --task --num_envs --max_iterations --help -h --version
-- - --= --env.episode-seconds --env.decimation --env.max-force --env.robot --env.delay --env.randomize
--env.no-randomize --env.options --env.vectorization --env.policy-observations --env.gravity --env --env. --ppo
--ppo.hidden --ppo.horizon --ppo.minibatches --ppo.learning-rate --ppo.activation --ppo.no-clip-value
--rsl-rl.hidden-dims --rsl-rl.schedule --rl-games.units --rl-games.separate --skrl.layers --skrl.rollouts
"""
OTHER_FLAGS = """
--video --seconds --width --height --overlay --no-overlay --seed --activation --format --output --json --timeout
--run-dir --engine --gpu-ids --num-envs --task --help -h --
"""
NUMBERS = """
0 1 2 8 24 -1 1e3 0.5 1e300 -1e300 nan inf -inf 1_0 0x10 1. . - +1 99999999999999999999 1e-400 1,2 None True false
"""
WORDS = """
auto none all mujoco warp torch jax elastic torchrunx tensorboard elu tanh onnx torchscript state sync async adaptive
max_episode_steps=5 g=[ a=b=c = == ../.. / /dev/null runs ~ * [ {} $(id) ' " \\ ä : a:b:c gymnasium:Pendulum-v1
gymnasium: gymnasium:math:X gymnasium:nowhere:X-v0 gymnasium:.:X
"""
ODD = ["", " ", "\t", "\n", " 1", "1 ", "9" * 5000, "x" * 300, "x" * 5000, "\N{ARABIC-INDIC DIGIT ONE}", "\udcff"]
FILES = {
    "rsl_rl.yaml": "seed: 3\nnum_steps_per_env: 8\nalgorithm: {learning_rate: 0.001}\n",
    "rl_games.yaml": "params: {config: {horizon_length: 1000000000000, minibatch_size: 64}}\n",
    "skrl.yaml": "agent: {rollouts: 8}\n",
    "junk.yaml": "a: [1\n",
    "list.yaml": "- 1\n",
    "deep.yaml": "a: " + "[" * 5000,
    "binary.yaml": "\0\1\2",
}


@pytest.fixture
def place(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a directory with the runs and configuration files that the command lines name."""
    shutil.copytree(tiny_run, tmp_path / "runs" / "cartpole" / "2001-01-01")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def valid_line(generator: random.Random) -> list[str]:
    """Return a task, a learner and some of their options, most of them with valid values."""
    task, learner = generator.choice([*registry.names(), "gymnasium:Pendulum-v1"]), generator.choice(list(LEARNERS))
    entry = registry.find(task)
    settings = LEARNERS[learner].settings.from_training(entry.training)
    argv = ["train", task, "--learner", learner, "--gpu-ids", "none"]
    for group, prefix in ((entry.task(), "env"), (settings, settings.flags)):
        names = option_names(group)
        for name in generator.sample(names, min(len(names), generator.randrange(4))):
            value, flag = getattr(group, name), f"--{prefix}.{name.replace('_', '-')}"
            if isinstance(value, bool):
                argv.append(generator.choice([flag, f"--{prefix}.no-{name.replace('_', '-')}"]))
                continue
            given = list(map(str, value)) if isinstance(value, tuple) else [str(value)]
            if given and generator.random() < 0.3:
                given[generator.randrange(len(given))] = generator.choice((*NUMBERS.split(), *ODD))
            argv += [flag, *given]
    return argv


def option_names(group: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(group)]


def command_line(number: int) -> list[str]:
    generator = random.Random(number)
    if generator.random() < 0.4:
        return valid_line(generator)
    command = generator.choice(["train"] * 4 + [*COMMANDS])
    flags = TRAIN_FLAGS if command == "train" else OTHER_FLAGS
    values = (
        *NUMBERS,
        *WORDS,
        *ODD,
        *FILES,
        *registry.names(),
        *list(LEARNERS),
        "runs/cartpole/2001-01-01",
        "runs/cartpole",
    )
    argv: list[str] = []
    if command in ("play", "export") or (command == "train" and generator.random() < 0.8):
        valid = (
            [*registry.names(), "gymnasium:Pendulum-v1"] if command == "train" else ["runs/cartpole/2001-01-01", "auto"]
        )
        argv.append(generator.choice(valid) if generator.random() < 0.8 else generator.choice(values))
    for _ in range(generator.choice([0, 1, 1, 2, 3, 6])):
        flag = generator.choice(flags) if generator.random() < 0.9 else mutated(generator.choice(flags), generator)
        given = [generator.choice(values) for _ in range(generator.choice([0, 1, 1, 1, 2]))]
        given = [mutated(value, generator) if generator.random() < 0.1 else value for value in given]
        argv += [f"{flag}={given[0]}", *given[1:]] if given and generator.random() < 0.2 else [flag, *given]
    if generator.random() < 0.1:
        generator.shuffle(argv)
    return [command, *argv]


def mutated(word: str, generator: random.Random) -> str:
    letters = [*word]
    for _ in range(generator.choice([1, 1, 2])):
        place = generator.randrange(len(letters) + 1)
        letters[place : place + generator.randrange(2)] = generator.choice(string.printable + "-=._ä")
    return "".join(letters)


def parse(argv: list[str]) -> None:
    command, *rest = argv
    if command == "train":
        config = arguments.parse(rest).config
        config.check()
        stored = TrainConfig.from_yaml(config.to_yaml(), "run.yaml")
        assert stored.to_yaml() == config.to_yaml()
        from_dict(registry.find(stored.task).task, stored.env, "options")
    else:
        parse_options(COMMANDS[command], rest, command)


def test_random_command_lines_are_parsed_or_refused_in_one_line(place: Path):
    faults, refused, tried = list[str](), 0, cases(250)
    for number in tried:
        argv = command_line(number)
        try:
            with harmless(), contextlib.redirect_stdout(io.StringIO()):
                parse(argv)
        except UserError as error:
            refused += 1
            if len(str(error).splitlines()) != 1 or len(str(error)) > 6000:
                faults.append(f"{number} {argv}: {str(error)[:3000]!r}")
        except SystemExit as end:
            if end.code or not {"-h", "--help"} & set(argv):
                faults.append(f"{number} {argv}: exit {end.code}")
        except Exception:
            faults.append(f"{number} {argv}: {traceback.format_exc(limit=-5)}")
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(fault[:3000] for fault in faults[:20])
    assert len(tried) // 2 < refused < len(tried), "the test is vacuous: all lines are refused, or almost none"
