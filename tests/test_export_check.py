"""Metadata of exported policies, and the check of a file against its run."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from rich.console import Console

from paceline import __version__
from paceline.cli.commands import export as export_command
from paceline.export import export
from paceline.export_check import check_export
from paceline.run.config import TrainConfig, plain
from paceline.run.directory import RunDir
from paceline.tasks.reach_camera import ReachCamera
from paceline.tasks.velocity.go1_velocity import Go1Velocity
from paceline.train import train
from tests.cameras.small import SMALL_CAMERA_OF_ARM, SMALL_ENCODER
from tests.forked import paceline

STEPS = 60


def trained(path: Path, task: str, env: dict[str, Any], **settings: Any) -> Path:
    settings = {"horizon": 2, "epochs": 1, "minibatches": 1, "hidden": (8,)} | settings
    config = TrainConfig(task=task, env=env, num_envs=2, max_iterations=1, settings=settings, logger=("none",))
    train(config, RunDir(path), Console(quiet=True))
    return path


@pytest.fixture(scope="module")
def walker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a legged robot with policy.onnx."""
    run = trained(tmp_path_factory.mktemp("walker") / "run", "go1-velocity", {})
    export(str(run), "onnx", None)
    return run


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of an arm with a camera, relative actions and limits, with policy.onnx."""
    env = plain(ReachCamera(camera=SMALL_CAMERA_OF_ARM))
    run = trained(tmp_path_factory.mktemp("arm") / "run", "reach-camera", env, **SMALL_ENCODER)
    export(str(run), "onnx", None)
    return run


def metadata(run: Path) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load(run / "policy.onnx").metadata_props}


def test_onnx_describes_a_legged_robot(walker: Path):
    about, model = json.loads(metadata(walker)["paceline"]), Go1Velocity().model()
    assert (about["format"], about["paceline"], about["task"], about["iteration"]) == (
        1,
        __version__,
        "go1-velocity",
        1,
    )
    assert (about["step_seconds"], about["control_hz"], about["inputs"]) == (0.02, 50.0, ["obs"])
    parts = {part["name"]: part for part in about["observations"]["obs"]["parts"]}
    assert (parts["joint_pos"]["start"], parts["joint_pos"]["stop"]) == (9, 21)
    assert parts["joint_pos"]["offset"] == about["robot"]["default_joint_pos"] == model.key("home").qpos[7:].tolist()
    assert parts["command"]["unit"] == ["m/s", "m/s", "rad/s"]
    assert about["commands"]["twist"]["high"] == [1.0, 0.5, 1.0]
    assert about["robot"]["joint_names"] == [model.joint(i).name for i in range(1, model.njnt)]
    assert about["robot"]["control"] == ["position"] * 12
    assert about["robot"]["effort_limit"] == model.actuator_forcerange.tolist()


def test_onnx_has_the_metadata_of_mjlab(walker: Path):
    found = metadata(walker)
    about = json.loads(found["paceline"])
    assert found["run_path"] == "run"
    assert found["joint_names"].split(",") == about["robot"]["joint_names"]
    rows = {"joint_stiffness": about["robot"]["stiffness"], "joint_damping": about["robot"]["damping"]}
    rows |= {"default_joint_pos": about["robot"]["default_joint_pos"], "action_scale": about["action"]["scale"]}
    for name, row in rows.items():
        assert [float(item) for item in found[name].split(",")] == pytest.approx(row, rel=1e-6)
    names = ["base_lin_vel", "base_ang_vel", "projected_gravity", "joint_pos", "joint_vel", "command", "actions"]
    assert found["observation_names"].split(",") == names
    assert found["command_names"] == "twist"
    assert [float(item) for item in found["observation_terms_scale"].split(",")] == [1, 1, -1, 1, 1, 1, 1]
    assert [float(item) for item in found["observation_terms_history_length"].split(",")] == [0] * 7
    clips = [tuple(map(float, item.split(";"))) for item in found["observation_terms_clip"].split(",")]
    assert clips == [(-math.inf, math.inf)] * 7
    assert [float(item) for item in found["observation_terms_flatten_history_dim"].split(",")] == [1] * 7


def test_onnx_describes_images_and_has_no_metadata_of_mjlab_for_them(arm: Path):
    found = metadata(arm)
    about = json.loads(found["paceline"])
    assert about["inputs"] == ["obs", "wrist_rgb"]
    image = about["observations"]["wrist_rgb"]
    assert (image["shape"], image["dtype"], image["range"], image["frames"]) == ([3, 16, 16], "uint8", [0, 255], 1)
    assert image["camera"]["name"] == "wrist"
    assert about["action"]["relative"]
    assert set(found) == {"paceline", "task", "iteration", "step_seconds"}


def test_the_command_checks_the_file_that_it_wrote(tiny_run: Path, tmp_path: Path):
    shutil.copytree(tiny_run, tmp_path / "run")
    done = paceline("export", "run", "--format", "torchscript", "--check", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    file, check = done.stdout.splitlines()
    assert file == "run/policy.pt"
    assert check.startswith("largest differences in 1000 steps, relative to max(1, absolute value): actions ")
    assert "controls from the metadata" in check


def test_the_command_fails_if_the_difference_is_too_large(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("paceline.export_check.TOLERANCE", -1.0)
    argv = [str(tiny_run), "--format", "torchscript", "--output", str(tmp_path / "policy.pt"), "--check"]
    assert export_command(argv, Console(quiet=True)) == 1
    assert f"{tmp_path}/policy.pt does not act as the policy of {tiny_run}: largest" in capsys.readouterr().err


def change_weights(model: onnx.ModelProto) -> None:
    weights = max(model.graph.initializer, key=lambda each: len(each.raw_data))
    weights.CopyFrom(numpy_helper.from_array(1.1 * numpy_helper.to_array(weights), weights.name))


def change_scale(model: onnx.ModelProto) -> None:
    entry = next(entry for entry in model.metadata_props if entry.key == "paceline")
    about = json.loads(entry.value)
    about["action"]["scale"][0] *= 1.5
    entry.value = json.dumps(about)


@pytest.mark.parametrize("robot", ["walker", "arm"])
def test_a_file_passes_and_fails_if_it_is_altered(robot: str, tmp_path: Path, request: pytest.FixtureRequest):
    run: Path = request.getfixturevalue(robot)
    passed = check_export(run / "policy.onnx", str(run), steps=STEPS)
    assert passed.passed, passed
    assert passed.controls is not None

    def altered(change: Callable[[onnx.ModelProto], None]) -> Path:
        model = onnx.load(run / "policy.onnx")
        change(model)
        onnx.save(model, tmp_path / "altered.onnx")
        return tmp_path / "altered.onnx"

    # The controls follow from the wrong actions.
    wrong = check_export(altered(change_weights), str(run), steps=STEPS)
    assert not wrong.passed
    assert wrong.actions > 1e-5
    wrong = check_export(altered(change_scale), str(run), steps=STEPS)
    assert not wrong.passed
    assert wrong.actions == passed.actions
    assert wrong.controls is not None
    assert wrong.controls > 1e-4


def test_torchscript_is_checked_in_the_same_way(walker: Path, tmp_path: Path):
    file = export(str(walker), "torchscript", tmp_path / "policy.pt")
    extra: dict[str, Any] = {"paceline.json": ""}
    module = torch.jit.load(file, _extra_files=extra)
    assert json.loads(extra["paceline.json"]) == json.loads(metadata(walker)["paceline"])
    assert check_export(file, str(walker), steps=STEPS).passed
    for parameter in module.parameters():
        parameter.add_(0.01)
    torch.jit.save(module, tmp_path / "altered.pt", {"paceline.json": extra["paceline.json"].decode()})
    assert not check_export(tmp_path / "altered.pt", str(walker), steps=STEPS).passed


@pytest.fixture(scope="module", params=["lstm", "gru"])
def recurrent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a recurrent policy with episodes of 20 steps."""
    settings = {"rnn_type": request.param, "rnn_hidden_size": 6, "rnn_layers": 2, "horizon": 4, "initial_std": 0.1}
    path = tmp_path_factory.mktemp(request.param) / "run"
    return trained(path, "cartpole", {"episode_seconds": 1 / 3}, **settings, learning_rate=0.01)


@pytest.mark.parametrize("format", ["onnx", "torchscript"])
def test_a_recurrent_policy_has_its_state_as_input_and_output(format: str, recurrent: Path):
    file = export(str(recurrent), format, None)
    found = check_export(file, str(recurrent), steps=STEPS)
    assert found.passed, found
    if format == "onnx":
        about, session = json.loads(metadata(recurrent)["paceline"]), onnxruntime.InferenceSession(file)
        parts = ["h", "c"] if "c_in" in about["state"] else ["h"]
        assert [each.name for each in session.get_inputs()] == ["obs", *(f"{part}_in" for part in parts)]
        assert [each.name for each in session.get_outputs()] == ["actions", *(f"{part}_out" for part in parts)]
        assert about["inputs"] == [each.name for each in session.get_inputs()]
        assert about["state"]["h_in"] == {"output": "h_out", "layers": 2, "hidden_size": 6}
        state = {f"{part}_in": torch.randn(2, 5, 6).numpy() for part in parts}
        outputs: Any = session.run(None, {"obs": torch.zeros(5, 4).numpy()} | state)
        assert [output.shape for output in outputs] == [(5, 1), *[(2, 5, 6)] * len(parts)]
