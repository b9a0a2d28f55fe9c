"""The native PPO's settings."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, cast

from paceline.env.training_settings import TrainingSettings
from paceline.errors import UserError
from paceline.learners.settings import LEARNING_RATES, flag, with_overrides
from paceline.validation import MOST_PER_ITERATION, above_zero, at_least_one, not_negative, widths, within_unit


@dataclass(frozen=True)
class PpoSettings:
    """The native PPO's settings."""

    flags: ClassVar[str] = "ppo"
    horizon_field: ClassVar[str] = "horizon"
    minibatches_field: ClassVar[str] = "minibatches"
    fixed: ClassVar[tuple[str, ...]] = ("hidden", "activation", "initial_std", "normalize_observations")

    horizon: int = 24
    """Steps per world and iteration."""
    epochs: int = 5
    """Passes over each iteration's samples."""
    minibatches: int = 4
    """Parts of a pass; each takes its share of time steps from every world, so it must divide the horizon."""
    hidden: tuple[int, ...] = (256, 128, 64)
    """Widths of the hidden layers of actor and critic."""
    activation: Literal["elu", "relu", "tanh"] = "elu"
    learning_rate: float = 1e-3
    """At the start; adapted from then on, between 1e-5 and 1e-2, if `desired_kl` is set."""
    desired_kl: float = 0.01
    """The policy's change per minibatch that the learning rate aims at; 0 keeps the learning rate as it is."""
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    """How far the probability ratio, and the value, may move from where they were."""
    clip_value: bool = True
    value_weight: float = 1.0
    entropy_weight: float = 0.005
    max_gradient_norm: float = 1.0
    initial_std: float = 1.0
    """Of the action noise."""
    normalize_observations: bool = True

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
        for name in ("horizon", "epochs", "minibatches"):
            at_least_one(flag(self, name), getattr(self, name), MOST_PER_ITERATION)
        if self.horizon % self.minibatches:
            raise UserError(
                f"--ppo.minibatches {self.minibatches} does not divide --ppo.horizon {self.horizon}: "
                "each minibatch takes the same number of time steps from every world"
            )
        widths(flag(self, "hidden"), self.hidden)
        for name in ("learning_rate", "initial_std", "max_gradient_norm", "clip"):
            above_zero(flag(self, name), getattr(self, name))
        lowest, highest = LEARNING_RATES
        if self.desired_kl and not lowest <= self.learning_rate <= highest:
            raise UserError(
                f"--ppo.learning-rate {self.learning_rate:g} is outside {lowest:g} to {highest:g}, between which "
                "it is adapted: choose one inside, or keep it as it is with --ppo.desired-kl 0"
            )
        for name in ("discount", "gae_lambda"):
            within_unit(flag(self, name), getattr(self, name))
        for name in ("desired_kl", "value_weight", "entropy_weight"):
            not_negative(flag(self, name), getattr(self, name))
