"""Load policies from checkpoints that RSL-RL wrote. The library itself is not needed."""

import re
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.errors import UserError, counted, one_line, unknown
from paceline.learners.networks import Policy, fold_normalizer, mlp_of
from paceline.learners.recurrent import RecurrentNetwork, Rnn
from paceline.validation import LayerWidths, check_value, shown

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
"""Activation functions by their names in RSL-RL."""

# Added to the standard deviation by the normalizer of RSL-RL.
_EPSILON = 1e-2

# Networks that cannot be loaded, by the first characters of the names of their tensors.
_UNSUPPORTED = {
    "cnn": "a convolutional network",
    "actor_cnn": "a convolutional network",
    "student": "a student of a distillation",
}


class ExternalPolicy(NamedTuple):
    """Policy of a checkpoint that RSL-RL wrote, and the number of iterations for which it was trained."""

    policy: Policy
    iteration: int


def load_external_policy(file: Path, activation: str, inputs: int, actions: int) -> ExternalPolicy:
    """Load the policy of a checkpoint of RSL-RL, version 2 to 5.

    `activation` is RSL-RL's name of the activation function, which checkpoints do not contain. `inputs` and `actions`
    are the widths of the observation group "policy" and of the actions of the task.
    """
    if activation not in ACTIVATIONS:
        raise unknown("activation", activation, ACTIVATIONS)
    content = _load(file)
    try:
        tensors, normalizer, recurrent = _actor(content)
        rnn = _rnn(recurrent, inputs) if recurrent else None
        width = tensors["0.weight"].shape[-1] if "0.weight" in tensors else 0
        if rnn and width != rnn.hidden_size:
            raise UserError(
                f"is damaged: its layers take {counted(width, 'number')} from {rnn.hidden_size} of a recurrent network"
            )
        layers = _layers(tensors, rnn.hidden_size if rnn else inputs, actions)
        mean, std = (normalizer.get(name, torch.empty(0)).flatten() for name in ("_mean", "_std"))
        if normalizer and (len(mean), len(std)) != (inputs, inputs):
            raise UserError(
                f"is damaged: it has {counted(len(mean), 'mean')} and {counted(len(std), 'standard deviation')} "
                f"for {counted(inputs, 'observation')}"
            )
        iteration = content.get("iter", 0)
        if type(iteration) is not int or iteration < 0:
            raise UserError(f"is damaged: its iter is {shown(iteration)}, not a whole number")
    except UserError as error:
        raise UserError(f"{file} {error}") from None
    if len(layers) > 1:
        check_value(f"{file}: hidden layers of", tuple(weight.shape[0] for weight, _ in layers[:-1]), LayerWidths)
    network = mlp_of(layers, ACTIVATIONS[activation])
    network = RecurrentNetwork(rnn, network) if rnn else network
    return ExternalPolicy(Policy(fold_normalizer(network, mean, std + _EPSILON) if normalizer else network), iteration)


def _load(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened, warnings.catch_warnings():
            # An exported policy is rejected below.
            warnings.filterwarnings("ignore", r"'torch\.load' received a zip file", UserWarning)
            content = torch.load(opened, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"cannot read the policy {file}: {error.strerror or error}") from None
    except Exception as error:
        # A damaged file makes torch raise errors of many kinds.
        raise UserError(
            f"{file} is not a checkpoint of tensors and numbers only, and Paceline runs no code of a file: "
            f"{one_line(error)}"
        ) from None
    if not isinstance(content, dict) or not {"actor_state_dict", "model_state_dict"} & content.keys():
        found = f"its keys are {', '.join(map(str, content))}" if isinstance(content, dict) else "it holds no keys"
        raise UserError(
            f"{file} is not a policy of RSL-RL: it has no actor_state_dict or model_state_dict; {found[:200]}"
        )
    return content


def _actor(content: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of the actor's layers, such as "0.weight", of its normalizer, such as "_mean", and of its
    recurrent network, such as "weight_ih_l0"."""
    if "actor_state_dict" in content:
        state, prefixes = content["actor_state_dict"], ("mlp.", "obs_normalizer.", "rnn.rnn.")
        # The action noise is only used in training; before version 5 it had no prefix.
        unused = r"(distribution\.)?(log_)?std(_param)?"
    else:
        state, prefixes = content["model_state_dict"], ("actor.", "actor_obs_normalizer.", "memory_a.rnn.")
        unused = r"(log_)?std|critic.*|memory_c.*"
    # In version 2 the normalizer belonged to the runner.
    runner_normalizer = content.get("obs_norm_state_dict") or {}
    if not _named_tensors(state) or not _named_tensors(runner_normalizer):
        raise UserError("is not a policy of RSL-RL: its networks are not named tensors")
    for name in state:
        if network := next((kind for prefix, kind in _UNSUPPORTED.items() if name.startswith(prefix)), None):
            raise UserError(
                f"holds {network} ({name}): only multi-layer perceptrons and recurrent networks can be loaded"
            )
        if not name.startswith(prefixes) and not re.fullmatch(unused, name):
            raise UserError(
                f"holds {name}, which is not of a multi-layer perceptron or a recurrent network: it cannot be loaded"
            )
    layers, normalizer, recurrent = (
        {name.removeprefix(prefix): tensor.float() for name, tensor in state.items() if name.startswith(prefix)}
        for prefix in prefixes
    )
    return layers, {name: tensor.float() for name, tensor in runner_normalizer.items()} | normalizer, recurrent


def _named_tensors(part: Any) -> bool:
    """Return True for a dict of plain tensors by name."""
    return isinstance(part, dict) and all(
        isinstance(name, str)
        and isinstance(tensor, Tensor)
        and tensor.layout == torch.strided
        and not tensor.is_complex()
        and not tensor.is_quantized
        for name, tensor in part.items()
    )


def _rnn(tensors: dict[str, Tensor], inputs: int) -> Rnn:
    """Return the recurrent network of the actor, an LSTM or a GRU, whose tensors have the names of torch."""
    first, count = tensors.get("weight_hh_l0", torch.empty(0, 0)), len(tensors) // 4
    rows, hidden_size = first.shape if first.dim() == 2 else (0, 0)
    takes = tensors.get("weight_ih_l0", first).shape[-1]
    kinds = {4 * hidden_size: "lstm", 3 * hidden_size: "gru"}
    if not rows or rows not in kinds or not 1 <= count <= 16 or hidden_size > 2**13:
        raise UserError(f"holds {', '.join(sorted(tensors)[:8])}, which are not those of an LSTM or a GRU")
    _check_inputs(takes, inputs)
    rnn = Rnn(kinds[rows], inputs, hidden_size, count)
    try:
        rnn.load_state_dict(tensors)
    except RuntimeError as error:
        raise UserError(f"is damaged: {one_line(error)}") from None
    return rnn


def _check_inputs(takes: int, inputs: int) -> None:
    if takes != inputs:
        raise UserError(
            f"takes {counted(takes, 'observation')}, but the task gives {inputs}: choose the --task it was trained for"
        )


def _layers(tensors: dict[str, Tensor], inputs: int, actions: int) -> list[tuple[Tensor, Tensor]]:
    """Return weights and biases from input to output."""
    count = len(tensors) // 2
    # The odd indices are activations, which have no tensors.
    names = [(f"{index}.weight", f"{index}.bias") for index in range(0, 2 * count, 2)]
    if not tensors or {name for pair in names for name in pair} != tensors.keys():
        raise UserError(f"holds {', '.join(sorted(tensors)) or 'no layers'}, not a plain multi-layer perceptron")
    layers = [(tensors[weight], tensors[bias]) for weight, bias in names]
    whole = all(weight.dim() == 2 and bias.shape == weight.shape[:1] for weight, bias in layers)
    if not whole or any(weight.shape[0] != after.shape[1] for (weight, _), (after, _) in pairwise(layers)):
        shapes = ", ".join(str(tuple(weight.shape)) for weight, _ in layers)
        raise UserError(f"is damaged: the shapes of its layers, {shapes}, do not match")
    gives = layers[-1][0].shape[0]
    _check_inputs(layers[0][0].shape[1], inputs)
    if gives == 2 * actions:
        raise UserError(
            f"gives {gives} numbers where the task takes {actions}: a policy whose noise depends on the observations, "
            "or is not Gaussian, cannot be loaded"
        )
    if gives != actions:
        raise UserError(
            f"gives {counted(gives, 'action')}, but the task takes {actions}: choose the --task it was trained for"
        )
    return layers
