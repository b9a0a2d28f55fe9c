"""Policies that RSL-RL trained elsewhere, from its own checkpoints; the library itself is not needed."""

import re
import warnings
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UserError, one_line, unknown
from paceline.learners.networks import fold_normalizer
from paceline.validation import shown, widths

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,
    "selu": nn.SELU,
    "relu": nn.ReLU,
    "crelu": nn.CELU,
    "lrelu": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "gelu": nn.GELU,
    "swish": nn.SiLU,
    "mish": nn.Mish,
}
"""By RSL-RL's names."""

# What its normaliser adds to the standard deviation.
_EPSILON = 1e-2

_REFUSED = {
    "rnn.": "a recurrent network",
    "memory_": "a recurrent network",
    "cnn": "a convolutional network",
    "actor_cnn": "a convolutional network",
    "student": "a student of a distillation",
}
"""By how the names of their tensors begin."""


@dataclass(frozen=True)
class ForeignPolicy:
    """What acts, out of a checkpoint."""

    network: nn.Module
    """From observations [batch, n] to actions, with the normaliser folded in."""
    iteration: int


def foreign_policy(file: Path, activation: str, inputs: int, actions: int) -> ForeignPolicy:
    """Read a checkpoint of RSL-RL, of any version from 2 to 5; `activation`, which none of them says, by RSL-RL's name
    for it; `inputs` and `actions` are how many numbers the task gives and takes."""
    if activation not in ACTIVATIONS:
        raise unknown("activation", activation, ACTIVATIONS)
    content = _load(file)
    tensors, normalizer = _actor(content, file)
    iteration = content.get("iter", 0)
    if type(iteration) is not int or iteration < 0:
        raise UserError(f"{file} is damaged: its iter is {shown(iteration)}, not a whole number")
    layers = _layers(tensors, file)
    _check_sizes(layers, inputs, actions, file)
    if len(layers) > 1:
        widths(f"{file}: hidden layers of", tuple(weight.shape[0] for weight, _ in layers[:-1]))
    network = nn.Sequential()
    for weight, bias in layers:
        linear = nn.Linear(weight.shape[1], weight.shape[0])
        linear.load_state_dict({"weight": weight, "bias": bias})
        network.extend((linear, ACTIVATIONS[activation]()))
    network.pop(-1)
    if normalizer:
        network = _normalizing(network, normalizer, inputs, file)
    return ForeignPolicy(network.eval().requires_grad_(False), iteration)


def _normalizing(network: nn.Sequential, normalizer: dict[str, Tensor], inputs: int, file: Path) -> nn.Sequential:
    mean, std = (normalizer.get(name, torch.empty(0)).flatten() for name in ("_mean", "_std"))
    if (len(mean), len(std)) != (inputs, inputs):
        raise UserError(
            f"{file} is damaged: it has {len(mean)} means and {len(std)} standard deviations for {inputs} observations"
        )
    return fold_normalizer(network, mean, std + _EPSILON)


def _load(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened, warnings.catch_warnings():
            # An exported policy is refused below.
            warnings.filterwarnings("ignore", r"'torch\.load' received a zip file", UserWarning)
            content = torch.load(opened, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"cannot read the policy {file}: {error.strerror or error}") from None
    except Exception as error:
        # A damaged file makes torch raise errors of many kinds.
        raise UserError(
            f"{file} is not a checkpoint of tensors and numbers alone, and nothing else in a file is run here: "
            f"{one_line(error)}"
        ) from None
    if not isinstance(content, dict) or not {"actor_state_dict", "model_state_dict"} & content.keys():
        found = f"its keys are {', '.join(map(str, content))}" if isinstance(content, dict) else "it holds no keys"
        raise UserError(
            f"{file} is not a policy of RSL-RL: it has no actor_state_dict or model_state_dict; {found[:200]}"
        )
    return content


def _actor(content: dict[str, Any], file: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of the actor's layers, as "0.weight", and those of its normaliser, as "_mean"."""
    if "actor_state_dict" in content:
        state, layers, before = content["actor_state_dict"], "mlp.", "obs_normalizer."
        # Noise is for training alone; before version 5 it stood by itself.
        aside = r"(distribution\.)?(log_)?std(_param)?"
    else:
        state, layers, before = content["model_state_dict"], "actor.", "actor_obs_normalizer."
        aside = r"(log_)?std|critic.*"
    # In version 2 the runner kept the normaliser.
    kept = content.get("obs_norm_state_dict") or {}
    if not _named_tensors(state) or not _named_tensors(kept):
        raise UserError(f"{file} is not a policy of RSL-RL: its networks are not named tensors")
    for name in state:
        for beginning, network in _REFUSED.items():
            if name.startswith(beginning):
                raise UserError(f"{file} holds {network} ({name}): only multi-layer perceptrons can be loaded")
        if not name.startswith((layers, before)) and not re.fullmatch(aside, name):
            raise UserError(f"{file} holds {name}, which is not of a multi-layer perceptron: it cannot be loaded")
    normalizer = kept | _within(state, before)
    return _within(state, layers), {name: tensor.float() for name, tensor in normalizer.items()}


def _named_tensors(part: Any) -> bool:
    """Whether it is a network's state, of plain tensors."""
    return isinstance(part, dict) and all(
        isinstance(name, str)
        and isinstance(tensor, Tensor)
        and tensor.layout == torch.strided
        and not tensor.is_complex()
        and not tensor.is_quantized
        for name, tensor in part.items()
    )


def _within(state: dict[str, Tensor], beginning: str) -> dict[str, Tensor]:
    return {name.removeprefix(beginning): tensor for name, tensor in state.items() if name.startswith(beginning)}


def _layers(tensors: dict[str, Tensor], file: Path) -> list[tuple[Tensor, Tensor]]:
    """Weights and biases from input to output."""
    indices = sorted({int(name.split(".")[0]) for name in tensors if re.fullmatch(r"\d{1,4}\.weight", name)})
    names = {f"{index}.{part}" for index in indices for part in ("weight", "bias")}
    # Between them stand the activations, which have no tensors.
    if not indices or indices != list(range(0, 2 * len(indices), 2)) or names != tensors.keys():
        raise UserError(f"{file} holds {', '.join(sorted(tensors)) or 'no layers'}, not a plain multi-layer perceptron")
    found = [(tensors[f"{index}.weight"].float(), tensors[f"{index}.bias"].float()) for index in indices]
    whole = all(weight.dim() == 2 and bias.shape == weight.shape[:1] for weight, bias in found)
    if not whole or any(weight.shape[0] != after.shape[1] for (weight, _), (after, _) in pairwise(found)):
        shapes = ", ".join(str(tuple(weight.shape)) for weight, _ in found)
        raise UserError(f"{file} is damaged: its layers, {shapes}, do not follow on each other")
    return found


def _check_sizes(layers: list[tuple[Tensor, Tensor]], inputs: int, actions: int, file: Path) -> None:
    takes, gives = layers[0][0].shape[1], layers[-1][0].shape[0]
    if takes != inputs:
        raise UserError(
            f"{file} takes {takes} observations, but the task gives {inputs}: choose the --task it was trained for"
        )
    if gives == 2 * actions:
        raise UserError(
            f"{file} gives {gives} numbers where the task takes {actions}: if that is because its noise depends on the "
            "observations, or is not Gaussian, it cannot be loaded"
        )
    if gives != actions:
        raise UserError(
            f"{file} gives {gives} actions, but the task takes {actions}: choose the --task it was trained for"
        )
