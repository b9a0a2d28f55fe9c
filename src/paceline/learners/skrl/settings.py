"""Settings of skrl, under its own names, the same for torch and JAX."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, cast

from paceline.env.training_settings import TrainingSettings
from paceline.learners.settings import with_overrides
from paceline.validation import LayerWidths, NonNegative, PerIteration, Positive, UnitInterval, check


@dataclass(frozen=True)
class SkrlSettings:
    """Settings of skrl's PPO. The defaults suit locomotion."""

    flags: ClassVar[str] = "skrl"
    horizon_field: ClassVar[str] = "rollouts"
    minibatches_field: ClassVar[str] = "mini_batches"
    fixed: ClassVar[tuple[str, ...]] = (
        "layers",
        "activations",
        "initial_log_std",
        "observation_normalization",
        "value_normalization",
    )

    rollouts: PerIteration = 24
    """Number of steps per env and iteration; at least 1."""
    learning_epochs: PerIteration = 5
    """Number of passes over the samples of an iteration; at least 1."""
    mini_batches: PerIteration = 4
    """Number of minibatches per epoch; at least 1."""
    layers: LayerWidths = (256, 128, 64)
    """Widths of the hidden layers of policy and value."""
    activations: Literal["elu", "relu", "tanh"] = "elu"
    """Activation function of the hidden layers."""
    initial_log_std: float = 0.0
    """Logarithm of the standard deviation of the action noise at the start."""
    learning_rate: Positive = 1e-3
    """Learning rate at the start; above 0."""
    learning_rate_scheduler: Literal["KLAdaptiveLR", "none"] = "KLAdaptiveLR"
    """Adapt the learning rate to the KL divergence (KLAdaptiveLR), or keep it constant (none)."""
    kl_threshold: Positive = 0.01
    """KL divergence at which the scheduler of the learning rate aims; above 0."""
    discount_factor: UnitInterval = 0.99
    """Discount factor of future rewards, often called gamma; 0 to 1."""
    gae_lambda: UnitInterval = 0.95
    """Decay of generalized advantage estimation; 0 to 1."""
    ratio_clip: Positive = 0.2
    """Clipping range of the probability ratio; above 0."""
    value_clip: NonNegative = 0.2
    """Clipping range of the change of the value in the value loss; 0 turns clipping off."""
    entropy_loss_scale: NonNegative = 0.0
    """Weight of the entropy bonus; at least 0."""
    value_loss_scale: NonNegative = 2.0
    """Weight of the value loss; at least 0."""
    grad_norm_clip: Positive = 1.0
    """Norm to which the gradient is clipped; above 0."""
    observation_normalization: bool = True
    """Normalize observations by their running mean and standard deviation."""
    value_normalization: bool = True
    """Normalize values and returns by their running mean and standard deviation."""
    time_limit_bootstrap: bool = True
    """Bootstrap the value of an episode that the time limit ended, from its last observation."""
    rewards_shaper_scale: Positive = 1.0
    """Factor of the rewards in learning, above 0. Metrics show the rewards of the env."""

    @property
    def horizon(self) -> int:
        return self.rollouts

    @property
    def minibatches(self) -> int:
        return self.mini_batches

    @classmethod
    def from_training(cls, training: TrainingSettings) -> Self:
        settings = cls(
            rollouts=training.horizon,
            learning_epochs=training.epochs,
            mini_batches=training.minibatches,
            layers=training.hidden_layers,
            activations=cast("Any", training.activation),
            initial_log_std=math.log(training.initial_std),
            learning_rate=training.learning_rate,
            learning_rate_scheduler="KLAdaptiveLR" if training.desired_kl else "none",
            kl_threshold=training.desired_kl or cls.kl_threshold,
            discount_factor=training.discount,
            gae_lambda=training.gae_lambda,
            ratio_clip=training.clip,
            value_clip=training.clip if training.clip_value else 0.0,
            entropy_loss_scale=training.entropy_weight,
            # The weight with which skrl is commonly used.
            value_loss_scale=2.0 * training.value_loss_weight,
            grad_norm_clip=training.max_gradient_norm,
            observation_normalization=training.normalize_observations,
        )
        return with_overrides(settings, training, "skrl")

    def check(self) -> None:
        check(self, f"--{self.flags}.")
