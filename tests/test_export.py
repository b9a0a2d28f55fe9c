"""Exported policies, run elsewhere, against the learner's own networks."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from paceline.distributed.group import Group
from paceline.distributed.rank import Rank
from paceline.env.vec_env import TensorSpec
from paceline.errors import UserError
from paceline.export import export
from paceline.learners.networks import Policy
from paceline.learners.ppo import Ppo
from paceline.run import checkpoint
from paceline.run.directory import RunDir
from paceline.training.build import make_env, make_learner
from tests.forked import paceline


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def run(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_run` with actions that are not all near zero, of observations far from normalized."""
    path = tmp_path_factory.mktemp("export") / "run"
    shutil.copytree(tiny_run, path)
    state = checkpoint.load(checkpoint.newest(path / "checkpoints"))
    networks, statistics = state["learner"]["networks"], state["learner"]["normalizers"]["policy"]
    last = max(name for name in networks if name.startswith("actor.") and name.endswith("weight"))
    networks[last] *= 100.0
    statistics["mean"] = torch.tensor([3.0, -2.0, 0.5, 10.0])
    statistics["variance"] = torch.tensor([0.04, 9.0, 25.0, 2.0])
    checkpoint.save(path / "checkpoints", 3, state | {"learner": state["learner"] | {"iteration": 3}}, 3, False)
    return path


def learner_of(run: Path) -> Ppo:
    config = dataclasses.replace(RunDir(run).config(), num_envs=1)
    env = make_env(config, Rank(), range(config.num_envs))
    learner = make_learner(config, env, Group(Rank()))
    assert isinstance(learner, Ppo)
    learner.load_policy(checkpoint.load(checkpoint.newest(run / "checkpoints"))["learner"])
    return learner


@torch.no_grad()
def case(run: Path, batch: int) -> tuple[Tensor, Tensor]:
    """Observations, and the actions that the learner's actor takes on them after its normalizer."""
    learner = learner_of(run)
    obs = 3.0 * torch.randn(batch, 4, generator=torch.Generator().manual_seed(batch))
    actions = learner.actor(learner.normalizers["policy"].normalize(obs))
    assert (learner.actor(obs) - actions).abs().max() > 0.1, "the normalizer makes no difference: a vacuous test"
    assert_same(learner.policy()({"policy": obs}), actions)
    return obs, actions


def test_onnx_acts_as_the_learner_does_for_any_batch(run: Path, tmp_path: Path):
    file = export(str(run), "onnx", tmp_path / "new" / "policy.onnx")
    assert [f.name for f in file.parent.iterdir()] == ["policy.onnx"]
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for batch in (1, 7):
        obs, actions = case(run, batch)
        (found,) = session.run(["actions"], {"obs": obs.numpy()})
        assert_same(torch.from_numpy(found), actions)


def test_further_observation_groups_are_inputs_under_their_names(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    policy = Policy(nn.Linear(4 + 3, 2), ("policy", "heights"))
    spec = {"policy": TensorSpec((4,)), "heights": TensorSpec((3,)), "critic": TensorSpec((9,))}
    env = SimpleNamespace(observation_spec=spec, step_seconds=0.02, num_actions=2)
    config = SimpleNamespace(task="cartpole")
    about = {"config": config, "iteration": 3, "folder": tmp_path, "file": run / "run.yaml"}
    monkeypatch.setattr("paceline.export.playable", lambda *_: SimpleNamespace(env=env, policy=policy, **about))
    obs = {name: torch.randn(5, *each.shape) for name, each in spec.items()}
    session = onnxruntime.InferenceSession(export("", "onnx", None), providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_inputs()] == ["obs", "heights"]
    (found,) = session.run(["actions"], {"obs": obs["policy"].numpy(), "heights": obs["heights"].numpy()})
    assert_same(torch.from_numpy(found), policy(obs))
    extra = {"paceline.json": ""}
    traced = torch.jit.load(export("", "torchscript", None), _extra_files=extra)
    assert_same(traced(obs["policy"], obs["heights"]), policy(obs))
    assert json.loads(extra["paceline.json"])["inputs"] == ["obs", "heights"]


def test_onnx_metadata_names_task_and_iteration(run: Path, tmp_path: Path):
    model = onnx.load(export(str(run), "onnx", tmp_path / "policy.onnx"))
    onnx.checker.check_model(model, full_check=True)
    about = {entry.key: entry.value for entry in model.metadata_props}
    assert (about["task"], about["iteration"]) == ("cartpole", "3")
    assert float(about["step_seconds"]) == pytest.approx(1 / 60)
    assert [value.name for value in (*model.graph.input, *model.graph.output)] == ["obs", "actions"]


def test_torchscript_acts_as_the_learner_does_where_there_is_no_paceline(run: Path, tmp_path: Path):
    file = export(str(run), "torchscript", tmp_path / "policy.pt")
    for batch in (1, 7):
        torch.save(case(run, batch), tmp_path / "case.pt")
        script = (
            "import sys, torch\n"
            "extra = {'paceline.json': ''}\n"
            "policy = torch.jit.load(sys.argv[1], _extra_files=extra)\n"
            "obs, actions = torch.load(sys.argv[2])\n"
            "torch.testing.assert_close(policy(obs), actions, rtol=1e-4, atol=1e-5)\n"
            "assert not any('paceline' in name for name in sys.modules)\n"
            "print(extra['paceline.json'].decode())\n"
        )
        command = [sys.executable, "-c", script, str(file), str(tmp_path / "case.pt")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        about = json.loads(done.stdout)
        assert (about["task"], about["iteration"]) == ("cartpole", 3)


@pytest.mark.parametrize(("format", "name"), [("onnx", "policy.onnx"), ("torchscript", "policy.pt")])
def test_the_command_prints_the_file_and_nothing_else(format: str, name: str, tiny_run: Path, tmp_path: Path):
    shutil.copytree(tiny_run, tmp_path / "run")
    done = paceline("export", "run", "--format", format, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"run/{name}\n", "")
    assert (tmp_path / "run" / name).is_file()


def test_auto_can_be_exported_again_over_the_first_file(tiny_run: Path, tmp_path: Path):
    shutil.copytree(tiny_run, tmp_path / "runs" / "cartpole" / "run")
    for _ in range(2):
        done = paceline("export", "auto", "--format", "torchscript", cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, "runs/cartpole/run/policy.pt\n", "")


def test_a_checkpoint_is_not_overwritten_by_its_own_export(run: Path, monkeypatch: pytest.MonkeyPatch):
    newest = checkpoint.newest(run / "checkpoints")
    content = newest.read_bytes()
    monkeypatch.chdir(newest.parent)
    for name in (newest.name, "..", str(run)):
        with pytest.raises(UserError, match="would overwrite the checkpoint that is exported"):
            export(name, "torchscript", newest)
    assert newest.read_bytes() == content


def test_an_export_that_differs_is_not_written(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trace = torch.jit.trace
    monkeypatch.setattr(torch.jit, "trace", lambda policy, example: trace(nn.Linear(4, 1), example))
    with pytest.raises(RuntimeError, match="differ from those of the trained one"):
        export(str(run), "torchscript", tmp_path / "policy.pt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("format", "output", "message"),
    [
        ("onx", None, "unknown format 'onx': did you mean 'onnx'"),
        ("onnx", Path("policy.pt"), "--output policy.pt with --format onnx: give a name that ends in .onnx"),
        ("torchscript", Path("/dev/null"), "/dev/null: it exists and is not a file; choose another --output"),
    ],
)
def test_bad_values_are_refused_by_name(format: str, output: Path | None, message: str, tiny_run: Path):
    with pytest.raises(UserError, match=message):
        export(str(tiny_run), format, output)


def test_refusals_are_one_line_exit_2_and_leave_nothing(tiny_run: Path, tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    before = {p: p.stat().st_mtime_ns for p in (*tmp_path.rglob("*"), *tiny_run.rglob("*"))}
    for argv, message in (
        (["nowhere"], "no run at nowhere"),
        ([tiny_run, "--output", "file/policy.onnx"], "cannot write the policy file/policy.onnx"),
    ):
        done = paceline("export", *argv, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert message in done.stderr
    assert before == {p: p.stat().st_mtime_ns for p in (*tmp_path.rglob("*"), *tiny_run.rglob("*"))}


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_a_missing_extra_is_named_with_what_to_install(package: str, tiny_run: Path, tmp_path: Path):
    script = f"import sys; sys.modules['{package}'] = None; from paceline.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "export", str(tiny_run), "--output", "policy.onnx"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == (
        f"paceline: --format onnx needs the package {package}: pip install onnx onnxscript, "
        "or use --format torchscript\n"
    )
    assert list(tmp_path.iterdir()) == []
