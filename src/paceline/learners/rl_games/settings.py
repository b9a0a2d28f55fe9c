"""RL-Games' settings, under its own names."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, cast

from paceline.env.training_settings import TrainingSettings
from paceline.errors import UserError
from paceline.learners.settings import flag, with_overrides
from paceline.validation import MOST_PER_ITERATION, above_zero, at_least_one, not_negative, widths, within_unit


@dataclass(frozen=True)
class RlGamesSettings:
    """RL-Games' continuous A2C with PPO's objective; the defaults suit locomotion."""

    flags: ClassVar[str] = "rl-games"
    horizon_field: ClassVar[str] = "horizon_length"
    minibatches_field: ClassVar[str] = "minibatch_size_per_env"
    fixed: ClassVar[tuple[str, ...]] = ("units", "activation", "separate", "normalize_input", "normalize_value")

    horizon_length: int = 24
    """Steps per world and iteration."""
    minibatch_size_per_env: int = 6
    """A minibatch has so many samples per world, and is all steps of some worlds; it must divide the horizon."""
    mini_epochs: int = 5
    units: tuple[int, ...] = (256, 128, 64)
    """Widths of the hidden layers."""
    activation: Literal["elu", "relu", "tanh", "selu", "sigmoid"] = "elu"
    separate: bool = False
    """Whether actor and critic have hidden layers of their own; otherwise they share them."""
    normalize_input: bool = True
    normalize_value: bool = True
    normalize_advantage: bool = True
    value_bootstrap: bool = True
    """Whether an episode cut by its time limit counts as going on."""
    learning_rate: float = 1e-3
    lr_schedule: Literal["adaptive", "linear", "none"] = "adaptive"
    schedule_type: Literal["legacy", "standard"] = "legacy"
    """Whether the learning rate follows each minibatch or each epoch."""
    kl_threshold: float = 0.01
    """With lr_schedule adaptive: the change of the policy that the learning rate aims at."""
    max_epochs: int = -1
    """With lr_schedule linear: the iterations over which the learning rate falls to almost nothing."""
    gamma: float = 0.99
    tau: float = 0.95
    e_clip: float = 0.2
    clip_value: bool = True
    critic_coef: float = 2.0
    entropy_coef: float = 0.0
    bounds_loss_coef: float = 0.0
    grad_norm: float = 1.0
    truncate_grads: bool = True
    reward_scale: float = 1.0
    """What rewards are multiplied by before learning; the metrics show them as they were."""

    @property
    def horizon(self) -> int:
        return self.horizon_length

    @property
    def minibatches(self) -> int:
        return self.horizon_length // self.minibatch_size_per_env

    @classmethod
    def from_training(cls, training: TrainingSettings) -> Self:
        settings = cls(
            horizon_length=training.horizon,
            minibatch_size_per_env=training.horizon // training.minibatches,
            mini_epochs=training.epochs,
            units=training.hidden_layers,
            activation=cast("Any", training.activation),
            normalize_input=training.normalize_observations,
            learning_rate=training.learning_rate,
            lr_schedule="adaptive" if training.desired_kl else "none",
            kl_threshold=training.desired_kl or cls.kl_threshold,
            gamma=training.discount,
            tau=training.gae_lambda,
            e_clip=training.clip,
            clip_value=training.clip_value,
            # RL-Games halves the value loss.
            critic_coef=2.0 * training.value_loss_weight,
            entropy_coef=training.entropy_weight,
            grad_norm=training.max_gradient_norm,
        )
        return with_overrides(settings, training, "rl_games")

    def check(self) -> None:
        for name in ("horizon_length", "minibatch_size_per_env", "mini_epochs"):
            at_least_one(flag(self, name), getattr(self, name), MOST_PER_ITERATION)
        if self.horizon_length % self.minibatch_size_per_env:
            raise UserError(
                f"--rl-games.minibatch-size-per-env {self.minibatch_size_per_env} does not divide "
                f"--rl-games.horizon-length {self.horizon_length}"
            )
        if self.lr_schedule == "linear" and self.max_epochs < 1:
            raise UserError(
                f"--rl-games.lr-schedule linear with --rl-games.max-epochs {self.max_epochs}: "
                "give the iterations over which the learning rate falls"
            )
        widths(flag(self, "units"), self.units)
        for name in ("learning_rate", "kl_threshold", "e_clip", "grad_norm", "reward_scale"):
            above_zero(flag(self, name), getattr(self, name))
        for name in ("gamma", "tau"):
            within_unit(flag(self, name), getattr(self, name))
        for name in ("critic_coef", "entropy_coef", "bounds_loss_coef"):
            not_negative(flag(self, name), getattr(self, name))
