"""Settings of the native PPO."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, cast

from paceline.env.training_settings import TrainingSettings
from paceline.errors import UserError
from paceline.learners.settings import LEARNING_RATES, with_overrides
from paceline.validation import LayerWidths, NonNegative, PerIteration, Positive, UnitInterval, check


@dataclass(frozen=True)
class PpoSettings:
    """Settings of the native PPO."""

    flags: ClassVar[str] = "ppo"
    horizon_field: ClassVar[str] = "horizon"
    minibatches_field: ClassVar[str] = "minibatches"
    fixed: ClassVar[tuple[str, ...]] = ("hidden", "activation", "initial_std", "normalize_observations")

    horizon: PerIteration = 24
    """Number of steps per env and iteration; at least 1."""
    epochs: PerIteration = 5
    """Number of passes over the samples of an iteration; at least 1."""
    minibatches: PerIteration = 4
    """Number of minibatches per epoch. Each has the same number of steps from every env, so it must divide the
    horizon."""
    hidden: LayerWidths = (256, 128, 64)
    """Widths of the hidden layers of actor and critic."""
    activation: Literal["elu", "relu", "tanh"] = "elu"
    """Activation function of the hidden layers."""
    learning_rate: Positive = 1e-3
    """Learning rate at the start, above 0. If `desired_kl` is set, it is adapted between 1e-5 and 1e-2."""
    desired_kl: NonNegative = 0.01
    """KL divergence per minibatch at which the adaptive learning rate aims; 0 keeps the learning rate constant."""
    discount: UnitInterval = 0.99
    """Discount factor of future rewards, often called gamma; 0 to 1."""
    gae_lambda: UnitInterval = 0.95
    """Decay of generalized advantage estimation; 0 to 1."""
    clip: Positive = 0.2
    """Clipping range of the probability ratio, and of the change of the value if `clip_value` is set; above 0."""
    clip_value: bool = True
    """Clip the change of the value in the value loss."""
    value_weight: NonNegative = 1.0
    """Weight of the value loss; at least 0."""
    entropy_weight: NonNegative = 0.005
    """Weight of the entropy bonus; at least 0."""
    max_gradient_norm: Positive = 1.0
    """Norm to which the gradients of actor and critic are clipped separately; above 0."""
    initial_std: Positive = 1.0
    """Standard deviation of the action noise at the start; above 0."""
    normalize_observations: bool = True
    """Normalize observations by their running mean and standard deviation."""

    @classmethod
    def from_training(cls, training: TrainingSettings) -> Self:
        settings = cls(
            horizon=training.horizon,
            epochs=training.epochs,
            minibatches=training.minibatches,
            hidden=training.hidden_layers,
            activation=cast("Any", training.activation),
            learning_rate=training.learning_rate,
            desired_kl=training.desired_kl,
            discount=training.discount,
            gae_lambda=training.gae_lambda,
            clip=training.clip,
            clip_value=training.clip_value,
            value_weight=training.value_loss_weight,
            entropy_weight=training.entropy_weight,
            max_gradient_norm=training.max_gradient_norm,
            initial_std=training.initial_std,
            normalize_observations=training.normalize_observations,
        )
        return with_overrides(settings, training, "ppo")

    def check(self) -> None:
        check(self, f"--{self.flags}.")
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
