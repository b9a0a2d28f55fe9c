"""A trained policy as one file for use elsewhere, its observation normaliser folded in."""

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

from paceline.build import playable
from paceline.errors import UserError, unknown
from paceline.run.directory import write_atomically

SUFFIXES = {"onnx": ".onnx", "torchscript": ".pt"}
TOLERANCE = 1e-4


def export(run: str, format: str, output: Path | None, task: str | None = None, activation: str | None = None) -> Path:
    """Write the policy, from observations [batch, n] to actions, and return the file.

    ONNX names them "obs" and "actions"; what the policy is of is in its metadata, or in paceline.json inside the
    TorchScript file.
    """
    if format not in SUFFIXES:
        raise unknown("format", format, SUFFIXES)
    found = playable(run, task, activation)
    env, file = found.env, output or found.folder / f"policy{SUFFIXES[format]}"
    if file.exists() and file.samefile(found.file):
        raise UserError(f"{file} would be written over the policy it is made of: choose another --output")
    _check_place(file, format)
    policy = found.policy.eval()
    obs = torch.randn(7, *env.observation_spec["policy"].shape, generator=torch.Generator().manual_seed(0))
    if not bool(policy(obs).isfinite().all()):
        raise UserError(f"the policy of {found.file} gives actions that are not finite: choose another checkpoint")
    about = {"task": found.task, "iteration": found.iteration, "step_seconds": env.step_seconds}
    content = (_onnx if format == "onnx" else _torchscript)(policy, obs, about)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content)
    except OSError as error:
        raise UserError(f"cannot write the policy {file}: {error.strerror}; choose another --output") from None
    return file


def _onnx(policy: nn.Module, obs: Tensor, about: dict[str, object]) -> bytes:
    for package in ("onnx", "onnxscript"):
        try:
            importlib.import_module(package)
        except ModuleNotFoundError:
            raise UserError(
                f"--format onnx needs the package {package}: pip install onnx onnxscript, or use --format torchscript"
            ) from None
    with _silence():
        program = torch.onnx.export(
            policy,
            (obs,),
            input_names=["obs"],
            output_names=["actions"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    model.doc_string = f"Paceline policy for {about['task']} after {about['iteration']} iterations"
    for key, value in about.items():
        model.metadata_props.add(key=key, value=str(value))
    content = model.SerializeToString()

    # Only a check: whoever has no ONNX Runtime here can still export.
    with contextlib.suppress(ModuleNotFoundError):
        import onnxruntime

        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        _compare(torch.from_numpy(session.run(["actions"], {"obs": obs.numpy()})[0]), policy(obs))
    return content


def _torchscript(policy: nn.Module, obs: Tensor, about: dict[str, object]) -> bytes:
    buffer = io.BytesIO()
    with _silence():
        torch.jit.save(torch.jit.trace(policy, (obs,)), buffer, {"paceline.json": json.dumps(about)})
        buffer.seek(0)
        _compare(torch.jit.load(buffer)(obs), policy(obs))
    return buffer.getvalue()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Torch's exporters log what they skip and warn about torch's own code."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
            yield
    finally:
        logging.disable(before)


def _compare(exported: Tensor, trained: Tensor) -> None:
    if not torch.allclose(exported, trained, rtol=TOLERANCE, atol=TOLERANCE):
        worst = (exported - trained).abs().max().item()
        raise RuntimeError(
            f"the exported policy's actions differ from the trained one's by up to {worst:g}: nothing was written; "
            "please report this, with the versions in the run's result.json"
        )


def _check_place(file: Path, format: str) -> None:
    if file.suffix in set(SUFFIXES.values()) - {SUFFIXES[format]}:
        raise UserError(f"--output {file} with --format {format}: give a name that ends in {SUFFIXES[format]}")
    if os.path.exists(file) and not os.path.isfile(file):
        raise UserError(f"cannot write the policy {file}: it is there and is not a file; choose another --output")
