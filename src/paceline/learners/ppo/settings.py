"""Settings of the native PPO."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.errors import UserError
from paceline.learners.settings import IMAGE_SETTINGS, LEARNING_RATES, Settings, translated
from paceline.validation import (
    LayerWidth,
    LayerWidths,
    NonNegative,
    PerIteration,
    Positive,
    RecurrentLayers,
    UnitInterval,
)


@dataclass(frozen=True)
class PpoSettings(Settings):
    """Settings of the native PPO."""

    flags: ClassVar[str] = "ppo"
    fixed: ClassVar[tuple[str, ...]] = (
        *("hidden", "activation", "initial_std", "normalize_observations"),
        *("rnn_type", "rnn_hidden_size", "rnn_layers"),
        *IMAGE_SETTINGS,
        "image_dtype",
    )

    horizon: PerIteration = translated("horizon")
    epochs: PerIteration = translated("epochs")
    minibatches: PerIteration = translated("minibatches")
    """Number of minibatches per epoch, at least 1. Must divide --ppo.horizon.
    Each minibatch has the same number of steps from every env.
    With --ppo.rnn-type these steps are consecutive, and gradients are propagated back through them."""
    hidden: LayerWidths = translated("hidden_layers")
    activation: Literal["elu", "relu", "tanh"] = translated("activation")
    rnn_type: Literal["none", "lstm", "gru"] = translated("rnn_type")
    rnn_hidden_size: LayerWidth = translated("rnn_hidden_size")
    rnn_layers: RecurrentLayers = translated("rnn_layers")
    learning_rate: Positive = translated("learning_rate")
    """Initial learning rate, above 0. If --ppo.desired-kl is above 0, it is adapted between 1e-5 and 1e-2."""
    desired_kl: NonNegative = translated("desired_kl")
    discount: UnitInterval = translated("discount")
    gae_lambda: UnitInterval = translated("gae_lambda")
    clip: Positive = translated("clip")
    """Clipping range of the probability ratio, and with --ppo.clip-value of the change of the value; above 0."""
    clip_value: bool = translated("clip_value")
    value_weight: NonNegative = translated("value_loss_weight")
    entropy_weight: NonNegative = translated("entropy_weight")
    max_gradient_norm: Positive = translated("max_gradient_norm")
    """Norm to which the gradients of actor and critic are clipped separately; above 0."""
    initial_std: Positive = translated("initial_std")
    normalize_observations: bool = translated("normalize_observations")
    image_channels: LayerWidths = translated("image_channels")
    image_kernels: LayerWidths = translated("image_kernels")
    image_strides: LayerWidths = translated("image_strides")
    image_features: PerIteration = translated("image_features")
    image_pooling: Literal["flatten", "spatial_softmax"] = translated("image_pooling")
    image_dtype: Literal["bfloat16", "float32"] = translated("image_dtype")
    image_training: Literal["policy", "targets"] = translated("image_training")
    image_learning_rate: Positive = translated("image_learning_rate")

    def check(self) -> None:
        super().check()
        if self.horizon % self.minibatches:
            raise UserError(
                f"--ppo.minibatches {self.minibatches} does not divide --ppo.horizon {self.horizon}: "
                "each minibatch has the same number of steps from every env"
            )
        lowest, highest = LEARNING_RATES
        if self.desired_kl and not lowest <= self.learning_rate <= highest:
            raise UserError(
                f"--ppo.learning-rate {self.learning_rate:g} is outside {lowest:g} to {highest:g}, the range in "
                "which it is adapted: choose one inside, or keep it constant with --ppo.desired-kl 0"
            )
