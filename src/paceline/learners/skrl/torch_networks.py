"""Networks of skrl on torch: policy and value with separate or shared layers, of one part or of several."""

import math
from typing import Any, ClassVar, cast

import torch
from gymnasium.spaces import Discrete, MultiDiscrete, Space
from torch import Tensor, nn

from paceline.distributed.launcher import without_launcher
from paceline.errors import UserError
from paceline.learners.encoders import num_channels, scaled
from paceline.learners.networks import Encoder, mlp
from paceline.learners.skrl.learner import Normalizer, ObservationRows, make_encoder
from paceline.learners.skrl.network_parts import Convolution, evaluate, parse_parts
from paceline.learners.skrl.recurrent import RecurrentLayer
from paceline.learners.skrl.settings import SkrlSettings

with without_launcher():
    from skrl.models.torch import CategoricalMixin, DeterministicMixin, GaussianMixin, Model, MultiCategoricalMixin

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,
    "leaky_relu": nn.LeakyReLU,
    "relu": nn.ReLU,
    "selu": nn.SELU,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "softsign": nn.Softsign,
    "tanh": nn.Tanh,
}


def make_networks(
    boxes: dict[str, Any], rows: ObservationRows, config: SkrlSettings, generator: torch.Generator
) -> dict[str, Any]:
    """Return the policy and the value, which are one model if they share their layers."""
    separate, together = _kinds(boxes["action_space"])
    if config.separate:
        return {
            "policy": separate(boxes, rows, config, generator),
            "value": _ValueNetwork(boxes, rows, config, generator),
        }
    if boxes["state_space"]:
        raise UserError(
            'policy and value cannot share layers, because the task has the observation group "critic" for the value: '
            "use --skrl.separate"
        )
    shared = together(boxes, rows, config, generator)
    return {"policy": shared, "value": shared}


def _kinds(actions: Space[Any]) -> tuple[type[Any], type[Any]]:
    """Return the classes of a policy with separate and with shared layers."""
    match actions:
        case Discrete():
            return _CategoricalPolicy, _SharedCategorical
        case MultiDiscrete():
            return _MultiCategoricalPolicy, _SharedMultiCategorical
        case _:
            return _GaussianPolicy, _SharedGaussian


class PartsNetwork(nn.Module):
    """Features that the last part of a network computes from observation groups."""

    def __init__(self, rows: ObservationRows, text: str, generator: torch.Generator):
        super().__init__()
        self.groups, self._parts = rows.groups, parse_parts(text)
        self._images = rows.images.specs if rows.images else {}
        values: dict[str, Tensor] = {}
        self.layers = nn.ModuleList()
        for part in self._parts:
            x = self._input(part.input, self._zeros(rows), values)
            layers = nn.Sequential()
            for layer, activation in zip(part.layers, part.activations, strict=True):
                layers.append(_layer(layer, x, part.name, generator))
                if activation and layer is not None:
                    layers.append(_ACTIVATIONS[activation]())
                x = layers(self._input(part.input, self._zeros(rows), values))
            values[part.name] = x
            self.layers.append(layers)
        last = self._parts[-1].name
        if values[last].dim() != 2:
            raise UserError(f"the last part of the network, {last!r}, is an image: add the layer flatten")
        self.width = values[last].shape[1]
        """Number of features."""

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        """Return features [batch, width] from observation groups."""
        obs = obs | {name: scaled(obs[name], spec) for name, spec in self._images.items()}
        values: dict[str, Tensor] = {}
        for part, layers in zip(self._parts, self.layers, strict=True):
            values[part.name] = layers(self._input(part.input, obs, values))
        return values[self._parts[-1].name]

    def _zeros(self, rows: ObservationRows) -> dict[str, Tensor]:
        vectors = rows.unpack(torch.zeros(1, rows.size))
        images = {name: torch.zeros(1, num_channels(spec), *spec.shape[1:]) for name, spec in self._images.items()}
        return vectors | images

    def _input(self, expression: Any, obs: dict[str, Tensor], values: dict[str, Tensor]) -> Tensor:
        def observe(index: str | int | None) -> Tensor:
            names = self.groups
            name = names[index] if isinstance(index, int) and 0 <= index < len(names) else index
            if name is None:
                name = names[0] if len(names) == 1 else "policy"
            if name not in names:
                raise UserError(
                    f"the network observes the group {index!r}, which the task does not have: it has {', '.join(names)}"
                )
            return obs[str(name)]

        return evaluate(expression, observe, values, lambda parts: torch.cat(parts, dim=1))


def _layer(layer: int | Convolution | None, x: Tensor, part: str, generator: torch.Generator) -> nn.Module:
    """Return a layer for inputs like `x`, with orthogonal weights."""
    if layer is None:
        return nn.Flatten()
    if x.dim() != (2 if isinstance(layer, int) else 4):
        wanted = "a vector" if isinstance(layer, int) else "an image"
        raise UserError(
            f"a layer of part {part!r} of the network needs {wanted}, but gets the shape {tuple(x.shape[1:])}"
        )
    if isinstance(layer, int):
        made = nn.Linear(x.shape[1], layer)
    else:
        if min(x.shape[2:]) + 2 * layer.padding < layer.kernel_size:
            raise UserError(
                f"the images are smaller than the kernels of part {part!r}: use larger images or smaller strides"
            )
        made = nn.Conv2d(x.shape[1], layer.out_channels, layer.kernel_size, layer.stride, layer.padding)
    nn.init.orthogonal_(made.weight, math.sqrt(2.0), generator=generator)
    nn.init.zeros_(made.bias)  # pyright: ignore[reportArgumentType]
    return made


class _PartsEncoder(Encoder):
    """Parts of a network, for raw observations."""

    def __init__(self, parts: PartsNetwork, rows: ObservationRows, normalizer: nn.Module):
        super().__init__()
        self.groups = rows.groups
        self._parts, self._normalizer, self._vectors = parts, normalizer, rows.vectors
        self._widths = [rows.vector_widths[name] for name in rows.vectors]

    def forward(self, images: dict[str, Tensor]) -> Tensor:
        obs = {name: images[name] for name in self.groups}
        if self._vectors:
            vectors = self._normalizer(torch.cat([obs[name] for name in self._vectors], dim=1))
            obs |= dict(zip(self._vectors, vectors.split(self._widths, dim=1), strict=True))
        return self._parts(obs)


class _Features(Model):
    """Model whose layers before the MLP compute features from rows of observations."""

    def make_features(self, rows: ObservationRows, config: SkrlSettings, generator: torch.Generator) -> int:
        """Create the layers, and return the number of features."""
        self._rows = rows
        self.parts = PartsNetwork(rows, config.network, generator) if config.network else None
        self.encoder = None if config.network else make_encoder(rows.images, config, generator)
        if self.parts:
            inputs = self.parts.width
        else:
            inputs = self.num_observations + (config.image_features - rows.images.size if rows.images else 0)
        return self.make_recurrent(inputs, rows, config, generator)

    def make_recurrent(
        self, inputs: int, rows: ObservationRows, config: SkrlSettings, generator: torch.Generator
    ) -> int:
        """Create the recurrent layer, if the settings have one, and return the number of features after it."""
        size = config.recurrent
        self.recurrent = RecurrentLayer(size, inputs, rows.num_envs, generator) if size else None
        return size.hidden_size if size else inputs

    def features(self, x: Tensor) -> Tensor:
        """Return the inputs of the MLP from rows of observations."""
        x = self._observed(x)
        return self.recurrent(x) if self.recurrent else x

    def _observed(self, x: Tensor) -> Tensor:
        if self.parts:
            return self.parts(self._rows.unpack(x))
        if self.encoder is None or self._rows.images is None:
            return x
        images = self._rows.images
        vector, packed = x.tensor_split([x.shape[1] - images.size], dim=1)
        return torch.cat((self.encoder(images.unpack(packed.unflatten(1, images.shape))), vector), dim=1)

    def parts_encoder(self, modules: dict[str, Any]) -> Encoder:
        """Return the parts with the normalizer among the `modules` of the agent."""
        assert self.parts
        scaler = modules.get("observation_preprocessor")
        return _PartsEncoder(self.parts, self._rows, Normalizer(scaler, 0) if scaler else nn.Identity())


class PolicyNetwork(_Features):
    """Mean actions or logits, which a mixin of skrl makes a policy."""

    mixin: ClassVar[Any]

    def __init__(self, boxes: dict[str, Any], rows: ObservationRows, config: SkrlSettings, generator: torch.Generator):
        Model.__init__(self, **boxes)
        inputs = self.make_features(rows, config, generator)
        layers = () if config.network else config.layers
        self.network = mlp(inputs, layers, self.num_actions, config.activations, 0.01, generator)
        self.mixin.__init__(self, role="policy")

    def noise(self) -> dict[str, Tensor]:
        """Return the logarithm of the standard deviation of continuous actions by the name that skrl gives it."""
        return {}

    # The mixin passes the role by position, unlike the declaration in Model.
    def compute(self, inputs: dict[str, Any], role: str) -> tuple[Tensor, dict[str, Any]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.network(self.features(inputs["observations"])).float(), self.noise()


class _GaussianPolicy(GaussianMixin, PolicyNetwork):
    """Mean action, with noise that does not depend on the observations."""

    mixin = GaussianMixin

    def __init__(self, boxes: dict[str, Any], rows: ObservationRows, config: SkrlSettings, generator: torch.Generator):
        PolicyNetwork.__init__(self, boxes, rows, config, generator)
        log_std = torch.full((self.num_actions,), config.initial_log_std)
        self.log_std = nn.Parameter(log_std, requires_grad=not config.fixed_log_std)

    def noise(self) -> dict[str, Tensor]:
        return {"log_std": self.log_std}


class _CategoricalPolicy(CategoricalMixin, PolicyNetwork):
    mixin, __init__ = CategoricalMixin, PolicyNetwork.__init__  # pyright: ignore[reportAssignmentType]


class _MultiCategoricalPolicy(MultiCategoricalMixin, PolicyNetwork):
    mixin, __init__ = MultiCategoricalMixin, PolicyNetwork.__init__  # pyright: ignore[reportAssignmentType]


class _ValueNetwork(DeterministicMixin, _Features):
    def __init__(self, boxes: dict[str, Any], rows: ObservationRows, config: SkrlSettings, generator: torch.Generator):
        Model.__init__(self, **boxes)
        DeterministicMixin.__init__(self)
        self._has_states = boxes["state_space"] is not None
        layers = config.value_layers or config.layers
        if self._has_states:
            self.parts = self.encoder = None
            inputs = self.make_recurrent(self.num_states, rows, config, generator)
        else:
            inputs = self.make_features(rows, config, generator)
            layers = () if config.network else layers
        self.network = mlp(inputs, layers, 1, config.activations, 1.0, generator)

    # The mixin passes the role by position, unlike the declaration in Model.
    def compute(self, inputs: dict[str, Any], role: str) -> tuple[Tensor, dict[str, Any]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.network(self.features(inputs["states" if self._has_states else "observations"])).float(), {}


class _Shared(DeterministicMixin):
    """Value whose layers, except the last one, are those of the policy with which this class is combined."""

    network: nn.Sequential

    def __init__(self, boxes: dict[str, Any], rows: ObservationRows, config: SkrlSettings, generator: torch.Generator):
        policy: Any = super(DeterministicMixin, self)
        policy.__init__(boxes, rows, config, generator)
        DeterministicMixin.__init__(self, role="value")
        last = cast("Any", self).network[-1]
        assert isinstance(last, nn.Linear)
        self.value = mlp(last.in_features, (), 1, config.activations, 1.0, generator)
        self._latest: tuple[Tensor, Tensor] | None = None

    def act(self: Any, inputs: dict[str, Any], *, role: str = "") -> tuple[Tensor, dict[str, Any]]:
        return (DeterministicMixin if role == "value" else self.mixin).act(self, inputs, role=role)

    def compute(self: Any, inputs: dict[str, Any], role: str) -> tuple[Tensor, dict[str, Any]]:
        *hidden, last = self.network
        if role == "value" and self._latest and self._latest[0] is inputs["observations"]:
            # skrl computes the value of the same observations after the policy.
            x, self._latest = self._latest[1], None
        else:
            x = self.features(inputs["observations"])
            for layer in hidden:
                x = layer(x)
            self._latest = (inputs["observations"], x) if role == "policy" else None
        if role == "value":
            return self.value(x).float(), {}
        return last(x).float(), self.noise()


class _SharedGaussian(_Shared, _GaussianPolicy): ...


class _SharedCategorical(_Shared, _CategoricalPolicy): ...


class _SharedMultiCategorical(_Shared, _MultiCategoricalPolicy): ...
