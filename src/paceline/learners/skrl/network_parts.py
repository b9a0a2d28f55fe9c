"""Networks of several parts, as skrl's configuration files describe them. The files are data: nothing is executed."""

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import UserError, unknown
from paceline.validation import LayerWidth, RecurrentLayers, check_value, parse_yaml, shown

ACTIVATIONS = ("elu", "leaky_relu", "relu", "selu", "sigmoid", "softplus", "softsign", "tanh")
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


@dataclass(frozen=True)
class Convolution:
    """Layer of a part that observes an image."""

    out_channels: int
    kernel_size: int
    stride: int = 1
    padding: int = 0


@dataclass(frozen=True)
class RecurrentSize:
    """Type and size of an LSTM or a GRU."""

    type: str
    """lstm or gru."""
    hidden_size: int
    layers: int


@dataclass(frozen=True)
class Part:
    """Layers that compute the output of a part from an expression of observations and earlier parts."""

    name: str
    input: ast.expr
    layers: tuple[int | Convolution | None, ...]
    """Widths of linear layers, convolutions, and None for a layer that flattens images."""
    activations: tuple[str | None, ...]
    """Activation function after each layer."""
    recurrent: RecurrentSize | None = None
    """Recurrent network that replaces the layers. Only the last part of a network may have one."""


def parse_parts(text: str) -> list[Part]:
    """Return the parts of a network. Raise UserError if Paceline cannot build it."""
    try:
        parts = parse_yaml(text)
    except ValueError as error:
        raise UserError(f"a network is not plain YAML: {error}") from None
    if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
        raise UserError(
            f"a network is {shown(parts)}, but must be a list of parts with the keys name, input and layers"
        )
    found = list[Part]()
    for part in parts:
        found.append(_parse_part(part, {each.name for each in found}))
    for part in found[:-1]:
        if part.recurrent:
            raise UserError(f"part {part.name!r} of a network is recurrent: Paceline supports it only as the last part")
    return found


def _parse_part(part: dict[str, Any], names: set[str]) -> Part:
    name = str(part.get("name", ""))
    keys = ("name", "input", "layers", *(("type", "num_layers") if "type" in part else ("activations",)))
    for key in part:
        if key not in keys:
            raise UserError(f"part {name!r} of a network: {unknown('key', str(key), keys)}")
    try:
        expression = ast.parse(str(part.get("input", "OBSERVATIONS")), mode="eval").body
        evaluate(expression, lambda _: 0, dict.fromkeys(names, 0), sum)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise UserError(
            f"part {name!r} of a network has the input {shown(part.get('input'))}: an input consists of OBSERVATIONS, "
            "OBSERVATIONS[...], earlier parts, +, -, * and the functions concatenate, permute, one_hot_encoding"
        ) from None
    if "type" in part:
        return Part(name, expression, (), (), _parse_recurrent(part, name))
    layers = tuple(_parse_layer(layer, name) for layer in part.get("layers") or ())
    activations = part.get("activations") or [None]
    activations = activations if isinstance(activations, list) else [activations]
    activations = activations * len(layers) if len(activations) == 1 else activations
    if len(activations) != len(layers) or not set(activations) <= {None, "", *ACTIVATIONS}:
        raise UserError(
            f"part {name!r} of a network has the activations {shown(part.get('activations'))}: give one of "
            f"{', '.join(ACTIVATIONS)}, or one per layer"
        )
    return Part(name, expression, layers, tuple(each or None for each in activations))


def _parse_recurrent(part: dict[str, Any], name: str) -> RecurrentSize:
    match part:
        case {"type": str() as kind, "layers": [int() as width]} if kind.lower() in ("lstm", "gru"):
            layers = part.get("num_layers", 1)
            check_value(f"layers of part {name!r} of a network", width, LayerWidth)
            check_value(f"num_layers of part {name!r} of a network", layers, RecurrentLayers)
            return RecurrentSize(kind.lower(), width, int(layers))
        case _:
            raise UserError(
                f"part {name!r} of a network has the type {shown(part['type'])} and the layers "
                f"{shown(part.get('layers'))}: a recurrent part has the type LSTM or GRU and one width, such as [64]"
            )


def _parse_layer(layer: Any, name: str) -> int | Convolution | None:
    match layer:
        case "flatten" | {"flatten": _}:
            return None
        case int() | {"linear": int()}:
            width = layer if isinstance(layer, int) else layer["linear"]
            if not isinstance(width, bool) and 1 <= width <= 2**13:
                return width
        case {"conv2d": {"out_channels": _, "kernel_size": _} as sizes} if len(layer) == 1:
            numbers = all(type(size) is int and 0 <= size <= 2**13 for size in sizes.values())
            if numbers and sizes.keys() <= Convolution.__dataclass_fields__.keys():
                return Convolution(**sizes)
        case _:
            pass
    raise UserError(
        f"part {name!r} of a network has the layer {shown(layer)}: a layer is a width, flatten, or conv2d with "
        "out_channels, kernel_size, stride and padding"
    )


def evaluate(node: ast.AST, observe: Callable[[str | int | None], Any], parts: Mapping[str, Any], cat: Any) -> Any:
    """Return the value of the input of a part. `observe` returns an observation group by its name or its index, or all
    observations, and `cat` concatenates a list. Images have their channels first, and discrete observations are encoded
    by the env, so permute and one_hot_encoding change nothing. Raise ValueError for any other expression."""

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Name(id=name) if name in parts:
                return parts[name]
            case ast.Name(id="OBSERVATIONS" | "STATES"):
                return observe(None)
            case ast.Subscript(
                value=ast.Name(id="OBSERVATIONS" | "STATES"), slice=ast.Constant(value=str() | int() as index)
            ):
                return observe(index)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
            case ast.Call(func=ast.Name(id="concatenate"), args=[ast.List(elts=[_, *_] as items)], keywords=[]):
                return cat([value(item) for item in items])
            case ast.Call(func=ast.Name(id="permute"), args=[image, ast.Tuple() as order], keywords=[]) if (
                ast.unparse(order) == "(0, 3, 1, 2)"
            ):
                return value(image)
            case ast.Call(func=ast.Name(id="one_hot_encoding"), args=[ast.Name(), observations], keywords=[]):
                return value(observations)
            case _:
                raise ValueError(ast.unparse(node))

    return value(node)
