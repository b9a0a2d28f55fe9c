"""Export a trained policy, with its observation normalizer, to one ONNX or TorchScript file."""

import contextlib
import importlib
import io
import json
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.env.vec_env import TensorSpec
from paceline.errors import UserError, unknown
from paceline.learners.networks import Policy
from paceline.run.directory import write_atomically
from paceline.training.build import playable

SUFFIXES = {"onnx": ".onnx", "torchscript": ".pt"}
TOLERANCE = 1e-4


def export(run: str, format: str, output: Path | None, task: str | None = None, activation: str | None = None) -> Path:
    """Write the policy to a file and return its path.

    The model has one input [batch, ...] for each observation group that the policy uses: "obs" for the group "policy",
    and the name of the group for every other one. TorchScript takes them by position. The output is "actions". The
    metadata of the ONNX model, or paceline.json inside the TorchScript file, has the task, the iteration and the
    seconds per step.
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
    obs = [_example(env.observation_spec[group], generator) for group in found.policy.groups]
    if not bool(policy(*obs).isfinite().all()):
        raise UserError(f"the policy of {found.file} gives actions that are not finite: choose another checkpoint")
    about = {"task": found.config.task, "iteration": found.iteration, "step_seconds": env.step_seconds}
    content = (_onnx if format == "onnx" else _torchscript)(policy, obs, about)
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
    """Policy that takes its observation groups as positional arguments, as the exported formats do."""

    def __init__(self, policy: Policy):
        super().__init__()
        self.policy = policy
        self.input_names = ["obs" if group == "policy" else group for group in policy.groups]

    def forward(self, *obs: Tensor) -> Tensor:
        return self.policy(dict(zip(self.policy.groups, obs, strict=True)))


def _onnx(policy: _PositionalPolicy, obs: list[Tensor], about: dict[str, object]) -> bytes:
    for package in ("onnx", "onnxscript"):
        try:
            importlib.import_module(package)
        except ModuleNotFoundError:
            raise UserError(
                f"--format onnx needs the package {package}: pip install onnx onnxscript, or use --format torchscript"
            ) from None
    batch = torch.export.Dim("batch")
    with _silence():
        program = torch.onnx.export(
            policy,
            tuple(obs),
            input_names=policy.input_names,
            output_names=["actions"],
            dynamic_shapes=(tuple({0: batch} for _ in obs),),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    model.doc_string = f"Paceline policy for {about['task']} after {about['iteration']} iterations"
    for key, value in about.items():
        model.metadata_props.add(key=key, value=str(value))
    content = model.SerializeToString()

    # Without ONNX Runtime the exported model is not checked.
    with contextlib.suppress(ModuleNotFoundError):
        import onnxruntime

        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        inputs = {name: rows.numpy() for name, rows in zip(policy.input_names, obs, strict=True)}
        _compare(torch.from_numpy(session.run(["actions"], inputs)[0]), policy(*obs))
    return content


def _torchscript(policy: _PositionalPolicy, obs: list[Tensor], about: dict[str, object]) -> bytes:
    buffer, metadata = io.BytesIO(), json.dumps(about | {"inputs": policy.input_names})
    with _silence():
        torch.jit.save(torch.jit.trace(policy, tuple(obs)), buffer, {"paceline.json": metadata})
        buffer.seek(0)
        _compare(torch.jit.load(buffer)(*obs), policy(*obs))
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


def _compare(exported: Tensor, trained: Tensor) -> None:
    if not torch.allclose(exported, trained, rtol=TOLERANCE, atol=TOLERANCE):
        worst = (exported - trained).abs().max().item()
        raise RuntimeError(
            f"the actions of the exported policy differ from those of the trained one by up to {worst:g}: nothing was "
            "written; please report this, with the versions in the run's result.json"
        )
