"""Networks of skrl on JAX, which compute the same as those on torch."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from gymnasium.spaces import Discrete
from torch import nn

from paceline.distributed.launcher import without_launcher
from paceline.env.vec_env import TensorSpec
from paceline.learners.image_packing import ImagePacking
from paceline.learners.skrl.settings import SkrlSettings

with without_launcher():
    import flax.linen
    import jax
    import jax.numpy as jnp
    from skrl.models.jax import CategoricalMixin, DeterministicMixin, GaussianMixin, Model

ACTIVATIONS = {"elu": (jax.nn.elu, nn.ELU), "relu": (jax.nn.relu, nn.ReLU), "tanh": (jnp.tanh, nn.Tanh)}
"""Activation functions of JAX and torch by name."""


def make_networks(config: SkrlSettings, boxes: dict[str, Any], images: ImagePacking | None = None) -> dict[str, Model]:
    """Return the policy and the value network, with weights sampled from torch's generator."""
    kind = CategoricalPolicy if isinstance(boxes["action_space"], Discrete) else Policy
    networks = {"policy": kind(config, images, **boxes), "value": Value(config, images, **boxes)}
    for network in networks.values():
        network.init_state_dict(key=random_key())
    return networks


class Policy(GaussianMixin, Model):
    """MLP for the mean action, with noise that does not depend on the observations."""

    config: SkrlSettings = SkrlSettings()
    images: ImagePacking | None = None

    def __init__(self, config: SkrlSettings, images: ImagePacking | None, **boxes: Any):
        self.config, self.images = config, images
        Model.__init__(self, **boxes)
        GaussianMixin.__init__(self)

    def set_key(self, key: jax.Array) -> None:
        """Set the key of the next random numbers."""
        self._g_key, self._g_i = key, 0

    @flax.linen.compact
    def __call__(self, inputs: dict[str, Any], role: str) -> tuple[jax.Array, dict[str, Any]]:
        x = _encoded(inputs["observations"], self.images, self.config)
        mean = _mlp(x, self.config.layers, self.config.activations, self.num_actions, last_gain=0.01)
        log_std = self.param("log_std", lambda _: jnp.full(self.num_actions, self.config.initial_log_std, jnp.float32))
        return mean, {"log_std": jax.lax.stop_gradient(log_std) if self.config.fixed_log_std else log_std}


class CategoricalPolicy(CategoricalMixin, Model):
    """MLP for the logits of discrete actions."""

    config: SkrlSettings = SkrlSettings()
    images: ImagePacking | None = None

    def __init__(self, config: SkrlSettings, images: ImagePacking | None, **boxes: Any):
        self.config, self.images = config, images
        Model.__init__(self, **boxes)
        CategoricalMixin.__init__(self)

    def set_key(self, key: jax.Array) -> None:
        """Set the key of the next random numbers."""
        self._c_key, self._c_i = key, 0

    def act(self, *arguments: Any, **keywords: Any) -> tuple[jax.Array, dict[str, Any]]:
        actions, outputs = super().act(*arguments, **keywords)
        # skrl computes the entropy from this output, and sets it to NaN.
        return actions, outputs | {"stddev": outputs["net_output"]}

    @flax.linen.compact
    def __call__(self, inputs: dict[str, Any], role: str) -> tuple[jax.Array, dict[str, Any]]:
        x = _encoded(inputs["observations"], self.images, self.config)
        return _mlp(x, self.config.layers, self.config.activations, self.num_actions, last_gain=0.01), {}


class Value(DeterministicMixin, Model):
    config: SkrlSettings = SkrlSettings()
    images: ImagePacking | None = None

    def __init__(self, config: SkrlSettings, images: ImagePacking | None, **boxes: Any):
        self.config, self.images = config, images
        Model.__init__(self, **boxes)
        DeterministicMixin.__init__(self)

    @flax.linen.compact
    def __call__(self, inputs: dict[str, Any], role: str) -> tuple[jax.Array, dict[str, Any]]:
        states = inputs["states"]
        x = _encoded(inputs["observations"], self.images, self.config) if states is None else states
        layers = self.config.value_layers or self.config.layers
        return _mlp(x, layers, self.config.activations, 1, last_gain=1.0), {}


def _encoded(rows: jax.Array, images: ImagePacking | None, config: SkrlSettings) -> jax.Array:
    """Compute the same as `ImageEncoder`: the features of the images, if there are any, and the vector of each row."""
    if images is None:
        return rows
    init = jax.nn.initializers.orthogonal(math.sqrt(2.0))
    vector, packed = jnp.split(rows, [rows.shape[1] - images.size], axis=1)
    x = _scaled(packed.reshape(-1, *images.shape), images.specs.values())
    layers = list(zip(config.image_channels, config.image_kernels, config.image_strides, strict=True))
    for index, (channels, kernel, stride) in enumerate(layers, start=1):
        x = flax.linen.Conv(channels, (kernel, kernel), stride, padding="VALID", kernel_init=init)(x)
        if index < len(layers) or config.image_pooling == "flatten":
            x = jax.nn.relu(x)
    # Channels first, as in torch, to which the weights are converted.
    x = x.transpose(0, 3, 1, 2)
    x = _spatial_softmax(x) if config.image_pooling == "spatial_softmax" else x.reshape(len(x), -1)
    features = jax.nn.relu(flax.linen.Dense(config.image_features, kernel_init=init, name="features")(x))
    return jnp.concatenate((features, vector), axis=1)


def _scaled(packed: jax.Array, specs: Iterable[TensorSpec]) -> jax.Array:
    """Scale images [batch, height, width, channel] as `encoders.scaled` does."""
    parts, start = [], 0
    for spec in specs:
        part = packed[..., start : start + spec.shape[0]]
        start += spec.shape[0]
        if spec.classes:
            one_hot = jax.nn.one_hot(part.astype(jnp.int32), spec.classes)
            parts.append(one_hot.reshape(*part.shape[:3], -1))
        else:
            scale = 255.0 if spec.dtype == torch.uint8 else spec.scale
            parts.append(part.astype(jnp.float32) * (1.0 / scale) - 0.5)
    return jnp.concatenate(parts, axis=-1)


def _spatial_softmax(maps: jax.Array) -> jax.Array:
    """Compute the same as `encoders.SpatialSoftmax`."""
    *_, height, width = maps.shape
    weights = jax.nn.softmax(maps, axis=(2, 3))
    x, y = (jnp.linspace(-1.0, 1.0, size) for size in (width, height))
    return jnp.concatenate(((weights.sum(2) * x).sum(-1), (weights.sum(3) * y).sum(-1)), axis=1)


def _mlp(x: jax.Array, layers: tuple[int, ...], activation: str, outputs: int, last_gain: float) -> jax.Array:
    """Compute a multi-layer perceptron with orthogonal weights. `last_gain` scales those of the output layer."""
    for width in layers:
        dense = flax.linen.Dense(width, kernel_init=jax.nn.initializers.orthogonal(math.sqrt(2.0)))
        x = ACTIVATIONS[activation][0](dense(x))
    return flax.linen.Dense(outputs, kernel_init=jax.nn.initializers.orthogonal(last_gain))(x)


def random_key() -> jax.Array:
    """Return a key sampled from torch's generator."""
    return jnp.array(torch.randint(2**32, (2,)).numpy(), dtype=jnp.uint32)
