"""RSL-RL's settings, under its own names."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, cast

from paceline.env.training_settings import TrainingSettings
from paceline.learners.settings import flag, with_overrides
from paceline.validation import MOST_PER_ITERATION, above_zero, at_least_one, not_negative, widths, within_unit


@dataclass(frozen=True)
class RslRlSettings:
    """RSL-RL's PPO; the defaults suit locomotion."""

    flags: ClassVar[str] = "rsl-rl"
    horizon_field: ClassVar[str] = "num_steps_per_env"
    minibatches_field: ClassVar[str] = "num_mini_batches"
    fixed: ClassVar[tuple[str, ...]] = ("hidden_dims", "activation", "obs_normalization", "init_std", "std_type")

    num_steps_per_env: int = 24
    """Steps per world and iteration."""
    hidden_dims: tuple[int, ...] = (256, 128, 64)
    """Widths of the hidden layers of actor and critic."""
    activation: Literal["elu", "relu", "tanh", "selu", "lrelu", "sigmoid"] = "elu"
    obs_normalization: bool = True
    init_std: float = 1.0
    """Of the action noise."""
    std_type: Literal["scalar", "log"] = "scalar"
    """What is learnt of the noise: its standard deviation, or the logarithm of it."""
    num_learning_epochs: int = 5
    num_mini_batches: int = 4
    learning_rate: float = 1e-3
    schedule: Literal["adaptive", "fixed"] = "adaptive"
    desired_kl: float = 0.01
    gamma: float = 0.99
    lam: float = 0.95
    clip_param: float = 0.2
    use_clipped_value_loss: bool = True
    value_loss_coef: float = 1.0
    entropy_coef: float = 0.005
    max_grad_norm: float = 1.0
    normalize_advantage_per_mini_batch: bool = False

    @property
    def horizon(self) -> int:
        return self.num_steps_per_env

    @property
    def minibatches(self) -> int:
        return self.num_mini_batches

    @classmethod
    def from_training(cls, training: TrainingSettings) -> Self:
        settings = cls(
            num_steps_per_env=training.horizon,
            hidden_dims=training.hidden_layers,
            activation=cast("Any", training.activation),
            obs_normalization=training.normalize_observations,
            init_std=training.initial_std,
            num_learning_epochs=training.epochs,
            num_mini_batches=training.minibatches,
            learning_rate=training.learning_rate,
            schedule="adaptive" if training.desired_kl else "fixed",
            desired_kl=training.desired_kl or cls.desired_kl,
            gamma=training.discount,
            lam=training.gae_lambda,
            clip_param=training.clip,
            use_clipped_value_loss=training.clip_value,
            value_loss_coef=training.value_loss_weight,
            entropy_coef=training.entropy_weight,
            max_grad_norm=training.max_gradient_norm,
        )
        return with_overrides(settings, training, "rsl_rl")

    def check(self) -> None:
        for name in ("num_steps_per_env", "num_learning_epochs", "num_mini_batches"):
            at_least_one(flag(self, name), getattr(self, name), MOST_PER_ITERATION)
        widths(flag(self, "hidden_dims"), self.hidden_dims)
        for name in ("init_std", "learning_rate", "desired_kl", "clip_param", "max_grad_norm"):
            above_zero(flag(self, name), getattr(self, name))
        for name in ("gamma", "lam"):
            within_unit(flag(self, name), getattr(self, name))
        for name in ("value_loss_coef", "entropy_coef"):
            not_negative(flag(self, name), getattr(self, name))
