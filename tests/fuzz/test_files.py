"""Damaged and crafted run.yaml, result.json and checkpoints, opened as resume, play and export open them."""

import dataclasses
import datetime
import json
import math
import os
import random
import resource
import shutil
import struct
import time
import traceback
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from paceline.cli import train_arguments as arguments
from paceline.distributed.group import Group
from paceline.distributed.launch_record import LaunchRecord
from paceline.distributed.rank import Rank
from paceline.errors import UserError
from paceline.process.interrupts import Interrupts
from paceline.run import checkpoint
from paceline.run.directory import RunDir
from paceline.tasks import registry
from paceline.training.build import playable, resolve
from paceline.training.plan import load_start, make_plan
from paceline.training.session import Session
from tests.fuzz.guard import cases, harmless

ENVS = 8
LARGEST_GROWTH = 2**30
"""Bytes."""

NUMBERS = [-1, 0, 1, 2, 7, 64, 10**6, 10**9, 10**12, 2**63, 2**70, -(2**63), 0.5, -0.5, 1e-300, 1e30, 1e300]
LISTS = [[], {}, [1, "a"], [[1], [2]], {"a": 1}, {1: 2}, [10**9], [8192, 8192], [4, 4], [0], [1] * 1000, [None]]
STRINGS = """
abc auto none 1 ppo rsl_rl elu tanh mujoco warp sync cartpole gymnasium:Pendulum-v1 gymnasium:evil_env:X-v0
gymnasium:math:X gymnasium: : ../.. /dev/zero /dev/stdin 2001-99-99
"""
VALUES = [
    *NUMBERS,
    *LISTS,
    *STRINGS.split(),
    *(math.nan, math.inf, -math.inf, True, False, None, "", "\0", "\ud7ff", "ä" * 300, "x" * 5000),
    *(datetime.date(2001, 1, 1), b"bytes", ["g=1", "max_episode_steps=5"], ["entry_point=os:system"]),
]
SNIPPETS = [
    *"[]{}#'|>\t\0\N{BOM}",
    *(": ", "- ", "? ", "---\n", "...\n", "%YAML 9.9\n", "<<: ", "&a ", "*a", "!!binary ", "!!set ", "!!int ", "!x "),
    *("[" * 3000, "{a: " * 3000, "1:" * 1000, "0x" + "f" * 9000, "9" * 9000, "task: ant\n", "env:\n  robot: /x\n"),
    "!!python/object/apply:os.system ['touch sprung']\n",
]
TRAP = "from pathlib import Path\nPath(__file__).with_name('sprung').touch()\n"


class Files:
    """A real run, and copies of it with one file changed."""

    def __init__(self, run: Path, copy: Path):
        self.run = copy
        shutil.copytree(run, copy)
        (copy / "evil_env.py").write_text(TRAP)
        self._valid = {name: (copy / name).read_bytes() for name in ("run.yaml", "result.json", self.checkpoint)}
        state = checkpoint.load(copy / self.checkpoint)
        checkpoint.save_shard(copy / "checkpoints", 2, 0, state["learner"].pop("envs"))
        checkpoint.save(copy / "checkpoints", 2, state, 1, best=False, shards=(ENVS,))
        self._in_shards = {name: (copy / name).read_bytes() for name in (self.checkpoint, self.shard)}

    checkpoint = "checkpoints/iteration_00000002.safetensors"
    shard = "checkpoints/iteration_00000002.envs/rank_0000.safetensors"

    def change(self, number: int) -> str:
        """Change a file; return which, and how."""
        generator = random.Random(number)
        files = self._valid | (self._in_shards if number % 3 == 0 else {})
        for name, content in files.items():
            (self.run / name).write_bytes(content)
        checkpoints = [self.checkpoint, self.shard if number % 3 == 0 else self.checkpoint]
        name = generator.choice(["run.yaml", "run.yaml", "run.yaml", "result.json", *checkpoints])
        mutators: list[Callable[[bytes, random.Random], bytes]] = [flip, cut, splice]
        mutators += [structure] * 6 if name == "run.yaml" else []
        mutators += [header, header, metadata, metadata] if name == self.checkpoint else []
        mutators += [header, header] if name == self.shard else []
        mutator = generator.choice(mutators)
        (self.run / name).write_bytes(mutator(files[name], generator))
        return f"case {number}: {mutator.__name__} of {name}"


def flip(content: bytes, generator: random.Random) -> bytes:
    """Change some bits, more often near the beginning."""
    changed = bytearray(content)
    for _ in range(generator.choice([1, 1, 2, 8, 64])):
        place = generator.randrange(min(len(changed), generator.choice([64, 4096, 10**9])))
        changed[place] ^= 1 << generator.randrange(8)
    return bytes(changed)


def cut(content: bytes, generator: random.Random) -> bytes:
    start, end = sorted(generator.randrange(len(content) + 1) for _ in range(2))
    return generator.choice(
        [content[:end], content[start:], content[:start] + content[end:], content + content[start:end]]
    )


def splice(content: bytes, generator: random.Random) -> bytes:
    """Put something in between, at the beginning of a line or anywhere."""
    breaks = [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]
    place = generator.choice(breaks) if breaks and generator.random() < 0.5 else generator.randrange(len(content) + 1)
    return content[:place] + generator.choice(SNIPPETS).encode(errors="surrogatepass") + content[place:]


def structure(content: bytes, generator: random.Random) -> bytes:
    """Other values at some keys, keys that are missing, and keys that nobody knows."""
    values = yaml.safe_load(content)
    for _ in range(generator.choice([1, 1, 1, 2, 5])):
        mutate(values, generator, (*VALUES, *registry.names()))
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True).encode(errors="surrogatepass")


def mutate(values: Any, generator: random.Random, pool: tuple[Any, ...]) -> None:
    if isinstance(values, list) and values:
        values[generator.randrange(len(values))] = deepcopy(generator.choice(pool))
        return
    if not isinstance(values, dict):
        return
    key = generator.choice([*values, "robot", "options", "episode_seconds", "decimation", "physics_hz"])
    if isinstance(values.get(key), (dict, list)) and values[key] and generator.random() < 0.7:
        mutate(values[key], generator, pool)
        return
    match generator.choice(["set", "set", "set", "drop", "rename", "add"]):
        case "set":
            values[key] = deepcopy(generator.choice(pool))
        case "drop":
            values.pop(key, None)
        case "rename":
            values[generator.choice([5, None, True, "", f"{key}x", str(key)[:-1]])] = values.pop(key, 1)
        case _:
            values[generator.choice(["robot", "options", "horizon", "task", "env", 7, "\0"])] = deepcopy(
                generator.choice(pool)
            )


def header(content: bytes, generator: random.Random) -> bytes:
    """The safetensors header, with other names, types, shapes and places."""
    length = struct.unpack("<Q", content[:8])[0]
    entries, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    for _ in range(generator.choice([1, 1, 2, 4])):
        name = generator.choice([name for name, entry in entries.items() if "dtype" in entry])
        entry = entries[name]
        match generator.choice(["dtype", "shape", "offsets", "rename", "drop", "junk"]):
            case "dtype":
                kinds = ["F64", "F32", "F16", "BF16", "F8_E4M3", "I64", "I32", "U8", "U64", "BOOL", "C64", "X", 5, None]
                entry["dtype"] = generator.choice(kinds)
            case "shape":
                sizes = [[], [0], [1], [2**40, 0], [2**62, 4], [-1], [8, 4], [4, 8], [1] * 100, "a", [1.5]]
                entry["shape"] = generator.choice(
                    [*sizes, entry["shape"][::-1] if isinstance(entry["shape"], list) else 1]
                )
            case "offsets":
                places = [0, 1, len(data), len(data) + 1, 2**63, -1, generator.randrange(len(data))]
                entry["data_offsets"] = [generator.choice(places), generator.choice(places)]
            case "rename":
                suffixes = ["|a", "|", "x", "", "\0", "|" * 100]
                entries[generator.choice(["", "learner", "totals", name]) + generator.choice(suffixes)] = entries.pop(
                    name
                )
            case "drop":
                del entries[name]
            case _:
                entries[name] = generator.choice([[], {}, "a", ["a"], {"shape": 5}])
    return packed(entries, data, generator)


def metadata(content: bytes, generator: random.Random) -> bytes:
    """The plain values of a checkpoint, and what its header says of itself."""
    length = struct.unpack("<Q", content[:8])[0]
    entries, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    found = entries["__metadata__"]
    if generator.random() < 0.2:
        key = generator.choice([*found, "other"])
        found[key] = generator.choice(["", "5", "[]", "null", "{", "{}", "[" * 3000, '{"a|b": 1, "a": 2}', 5, None])
        if generator.random() < 0.3:
            del found[key]
    else:
        values = json.loads(found["values"])
        plain = [value for value in VALUES if not isinstance(value, (datetime.date, bytes))]
        for _ in range(generator.choice([1, 1, 2, 4])):
            key = generator.choice(list(values))
            if isinstance(values[key], (dict, list)) and values[key] and generator.random() < 0.7:
                inner = values[key]
                mutate(
                    inner[0] if isinstance(inner, list) and isinstance(inner[0], dict) else inner,
                    generator,
                    tuple(plain),
                )
            elif generator.random() < 0.2:
                values[generator.choice(["learner", f"{key}|x", "totals|seconds|x", "learner|networks"])] = values.pop(
                    key
                )
            else:
                values[key] = deepcopy(generator.choice(plain))
        found["values"] = json.dumps(values)
    return packed(entries, data, generator)


def packed(entries: dict[str, Any], data: bytes, generator: random.Random) -> bytes:
    text = json.dumps(entries).encode()
    length = generator.choice([len(text)] * 9 + [0, 1, len(text) - 1, len(text) + 1, 2**40, 2**64 - 1])
    return struct.pack("<Q", length) + text + data


def open_run(run: Path) -> None:
    """All that resume, play and export do with a run's files before they do something new."""
    opened = RunDir.open(str(run))
    opened.result()
    config = opened.config()
    _, settings = resolve(config)
    file = checkpoint.chosen(str(run), opened.checkpoints)
    playable(str(run))
    config = dataclasses.replace(config, max_iterations=10**6, engine="auto", gpu_ids=())
    plan = make_plan(config, opened, file, LaunchRecord())
    plan = load_start(plan, config, settings, ranks=1)
    if plan.total_envs == ENVS:
        consoles = [Console(quiet=True)]
        session = Session(config, settings, Group(Rank()), plan, [], Interrupts(), consoles, time.monotonic())
        session.episodes.means()
        json.dumps(session.totals)


def read_command(run: Path) -> None:
    arguments.parse(["--resume", str(run)])


def test_changed_files_are_refused_in_one_line_and_do_nothing(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = Files(tiny_run, tmp_path / "run")
    monkeypatch.chdir(files.run)
    before = sorted(os.listdir(files.run))
    open_run(files.run)
    grown, faults, refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, list[str](), 0
    for number in cases(200):
        what = files.change(number)
        for step in (open_run, read_command):
            try:
                with harmless():
                    step(files.run)
            except UserError as error:
                refused += 1
                if len(str(error).splitlines()) != 1 or len(str(error)) > 2000:
                    faults.append(f"{what}: {step.__name__}: {str(error)[:3000]}")
            except Exception:
                faults.append(f"{what}: {step.__name__}: {traceback.format_exc(limit=-4)}")
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown)
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults[:20])
    assert grown < LARGEST_GROWTH
    assert refused > len(cases(200)) // 2, "most changes were not noticed: a vacuous test"
    assert sorted(os.listdir(files.run)) == before
    assert len(os.listdir(files.run / "checkpoints")) == len(os.listdir(tiny_run / "checkpoints")) + 1
