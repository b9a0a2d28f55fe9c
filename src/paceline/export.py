"""Export a trained policy, with its observation normalizer, to one ONNX or TorchScript file."""

import contextlib
import importlib
import io
import json
import logging
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline import __version__
from paceline.env.policy_description import FORMAT, METADATA_FILE, METADATA_KEY, describe, input_name
from paceline.env.vec_env import TensorSpec
from paceline.errors import UserError, counted, unknown
from paceline.learners.networks import Policy, as_tuple
from paceline.run.directory import write_atomically
from paceline.training.build import playable

SUFFIXES = {"onnx": ".onnx", "torchscript": ".pt"}
TOLERANCE = 1e-4


def export(run: str, format: str, output: Path | None, task: str | None = None, activation: str | None = None) -> Path:
    """Write the policy to a file and return its path.

    The model has one input [batch, ...] for each observation group that the policy uses: "obs" for the group "policy",
    and the name of the group for every other one. TorchScript takes them by position. The output is "actions", numbers
    or, for discrete actions, the indices of the most likely choices. A recurrent policy also has its state as inputs
    and outputs, [layer, batch, hidden]: "h_in" and "h_out", and "c_in" and "c_out" of an LSTM. The metadata of the ONNX
    model, or paceline.json inside the TorchScript file, describe inputs, outputs and robot, see docs/export.md.
    """
    if format not in SUFFIXES:
        raise unknown("format", format, SUFFIXES)
    found = playable(run, task, activation)
    env, file = found.env, output or found.folder / f"policy{SUFFIXES[format]}"
    if os.path.exists(file) and file.samefile(found.file):
        raise UserError(f"{file} would overwrite the checkpoint that is exported: choose another --output")
    if file.suffix in set(SUFFIXES.values()) - {SUFFIXES[format]}:
        raise UserError(f"--output {file} with --format {format}: give a name that ends in {SUFFIXES[format]}")
    if os.path.exists(file) and not os.path.isfile(file):
        raise UserError(f"cannot write the policy {file}: it exists and is not a file; choose another --output")
    policy, generator = _PositionalPolicy(found.policy).eval(), torch.Generator().manual_seed(0)
    inputs = [_example(env.observation_spec[group], generator) for group in found.policy.groups]
    if found.policy.state_names:
        inputs += _parts(torch.randn(found.policy.initial_state(len(inputs[0])).shape, generator=generator))
    if not bool(policy.outputs(inputs)[0].isfinite().all()):
        raise UserError(f"the policy of {found.file} gives actions that are not finite: choose another checkpoint")
    about = {"format": FORMAT, "paceline": __version__, "task": found.config.task, "iteration": found.iteration}
    about |= describe(env, found.policy.groups)
    about["inputs"], about["state"] = policy.input_names, policy.describe_state()
    if format == "onnx":
        flat = {name: str(about[name]) for name in ("task", "iteration", "step_seconds")}
        flat |= {METADATA_KEY: json.dumps(about)} | mjlab_metadata(about, found.folder.resolve().name)
        content = _onnx(policy, inputs, flat)
    else:
        content = _torchscript(policy, inputs, about)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content)
    except OSError as error:
        raise UserError(f"cannot write the policy {file}: {error.strerror}; choose another --output") from None
    return file


def _example(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    """Return random observations of a group, for a batch of 7."""
    if spec.dtype.is_floating_point:
        return torch.randn(7, *spec.shape, generator=generator).to(spec.dtype)
    return torch.randint(spec.classes or 256, (7, *spec.shape), generator=generator, dtype=spec.dtype)


class _PositionalPolicy(nn.Module):
    """Policy that takes its observation groups, and the parts of its state, as positional arguments, as the exported
    formats do. Names and shapes of the state are those of files that RSL-RL exports."""

    def __init__(self, policy: Policy):
        super().__init__()
        self.policy = policy
        self.input_names = [*map(input_name, policy.groups), *(f"{name}_in" for name in policy.state_names)]
        self.output_names = ["actions", *(f"{name}_out" for name in policy.state_names)]

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the actions, followed by the parts of the new state if there are any."""
        obs = dict(zip(self.policy.groups, inputs, strict=False))
        if not self.policy.state_names:
            return self.policy.step(obs, torch.empty(0))[0]
        state = torch.stack([part.transpose(0, 1) for part in inputs[len(obs) :]], dim=1)
        actions, state = self.policy.step(obs, state)
        return actions, *_parts(state)

    def outputs(self, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        return as_tuple(self(*inputs))

    def describe_state(self) -> dict[str, Any]:
        """Return the entry "state" of the metadata."""
        names = zip(self.input_names[len(self.policy.groups) :], self.output_names[1:], strict=True)
        _, layers, hidden_size = self.policy.initial_state(1).shape[1:] if self.policy.state_names else (0, 0, 0)
        return {name: {"output": output, "layers": layers, "hidden_size": hidden_size} for name, output in names}


def _parts(state: Tensor) -> list[Tensor]:
    """Return the parts of a state [batch, part, layer, hidden], each [layer, batch, hidden]."""
    return [part.transpose(0, 1) for part in state.unbind(1)]


def mjlab_metadata(about: dict[str, Any], run_path: str) -> dict[str, str]:
    """Return the metadata that mjlab writes into its ONNX files, by name, from the description of a policy. It is empty
    for a policy that mjlab's metadata cannot describe: its readers know one observation vector without history, and
    actions that are scaled offsets from the default joint positions."""
    action, robot, inputs = about["action"], about["robot"], about["observations"]
    obs = inputs.get("obs", {})
    if len(inputs) > 1 or not obs.get("parts") or obs["history"] > 1 or not action:
        return {}
    affine = not action["relative"] and action["smoothing"] == 1.0 and not action["clip"] and not action["range"]
    if not affine or set(robot["control"]) != {"position"} or list(action["offset"]) != robot["default_joint_pos"]:
        return {}
    parts = obs["parts"]
    lists = {
        "joint_names": robot["joint_names"],
        "joint_stiffness": robot["stiffness"],
        "joint_damping": robot["damping"],
        "default_joint_pos": robot["default_joint_pos"],
        "command_names": about["commands"],
        "observation_names": [part["name"] for part in parts],
        "observation_terms_scale": [_shortest(part["scale"]) for part in parts],
        "observation_terms_clip": [part["clip"] or (-math.inf, math.inf) for part in parts],
        # 0 is no history.
        "observation_terms_history_length": [0] * len(parts),
        "observation_terms_flatten_history_dim": [1] * len(parts),
        "action_scale": action["scale"],
    }
    return {"run_path": run_path} | {name: ",".join(map(_csv_item, values)) for name, values in lists.items()}


def _shortest(row: tuple[float, ...]) -> float | tuple[float, ...]:
    """Return one number for a row of equal numbers."""
    return row[0] if len(set(row)) == 1 else row


def _csv_item(value: str | float | tuple[float, ...]) -> str:
    """Return an element of a comma-separated list. Elements that are lists are separated by semicolons."""
    if isinstance(value, tuple):
        return ";".join(map(_csv_item, value))
    return value if isinstance(value, str) else f"{value:.9g}"


def _onnx(policy: _PositionalPolicy, inputs: list[Tensor], metadata: dict[str, str]) -> bytes:
    for package in ("onnx", "onnxscript"):
        try:
            importlib.import_module(package)
        except ModuleNotFoundError:
            raise UserError(
                f"--format onnx needs the package {package}: pip install onnx onnxscript, or use --format torchscript"
            ) from None
    batch, groups = torch.export.Dim("batch"), set(map(input_name, policy.policy.groups))
    with _silence():
        program = torch.onnx.export(
            policy,
            tuple(inputs),
            input_names=policy.input_names,
            output_names=policy.output_names,
            dynamic_shapes=(tuple({0 if name in groups else 1: batch} for name in policy.input_names),),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    model.doc_string = f"Paceline policy for {metadata['task']} after {counted(metadata['iteration'], 'iteration')}"
    for key, value in metadata.items():
        model.metadata_props.add(key=key, value=value)
    content = model.SerializeToString()

    # Without ONNX Runtime the exported model is not checked.
    with contextlib.suppress(ModuleNotFoundError):
        import onnxruntime

        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        arrays = {name: rows.numpy() for name, rows in zip(policy.input_names, inputs, strict=True)}
        found = [torch.from_numpy(output) for output in session.run(policy.output_names, arrays)]
        _compare(found, policy.outputs(inputs))
    return content


def _torchscript(policy: _PositionalPolicy, inputs: list[Tensor], about: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    with _silence():
        torch.jit.save(torch.jit.trace(policy, tuple(inputs)), buffer, {METADATA_FILE: json.dumps(about)})
        buffer.seek(0)
        _compare(as_tuple(torch.jit.load(buffer)(*inputs)), policy.outputs(inputs))
    return buffer.getvalue()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppress the logs and warnings of torch's exporters about torch's own code."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _compare(exported: Sequence[Tensor], trained: Sequence[Tensor]) -> None:
    """Compare actions, and the parts of the state."""
    for found, expected in zip(exported, trained, strict=True):
        if not torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE):
            worst = (found - expected).abs().max().item()
            raise RuntimeError(
                f"the outputs of the exported policy differ from those of the trained one by up to {worst:g}: nothing "
                "was written; please report this, with the versions in the run's result.json"
            )
