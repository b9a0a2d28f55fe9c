"""Settings of RL-Games, under its own names."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, cast

from paceline.env.training_settings import TrainingSettings
from paceline.errors import UserError
from paceline.learners.settings import with_overrides
from paceline.validation import LayerWidths, NonNegative, PerIteration, Positive, UnitInterval, check


@dataclass(frozen=True)
class RlGamesSettings:
    """Settings of RL-Games' continuous A2C with the objective of PPO. The defaults suit locomotion."""

    flags: ClassVar[str] = "rl-games"
    horizon_field: ClassVar[str] = "horizon_length"
    minibatches_field: ClassVar[str] = "minibatch_size_per_env"
    fixed: ClassVar[tuple[str, ...]] = ("units", "activation", "separate", "normalize_input", "normalize_value")

    horizon_length: PerIteration = 24
    """Number of steps per env and iteration; at least 1."""
    minibatch_size_per_env: PerIteration = 6
    """Number of samples per env in a minibatch, which has all steps of some envs. Must divide the horizon."""
    mini_epochs: PerIteration = 5
    """Number of passes over the samples of an iteration; at least 1."""
    units: LayerWidths = (256, 128, 64)
    """Widths of the hidden layers."""
    activation: Literal["elu", "relu", "tanh", "selu", "sigmoid"] = "elu"
    """Activation function of the hidden layers."""
    separate: bool = False
    """Give actor and critic separate hidden layers; otherwise they share them."""
    normalize_input: bool = True
    """Normalize observations by their running mean and standard deviation."""
    normalize_value: bool = True
    """Normalize values and returns by their running mean and standard deviation."""
    normalize_advantage: bool = True
    """Standardize advantages over the rollout."""
    value_bootstrap: bool = True
    """Bootstrap the value of an episode that the time limit ended."""
    learning_rate: Positive = 1e-3
    """Learning rate at the start; above 0."""
    lr_schedule: Literal["adaptive", "linear", "none"] = "adaptive"
    """Schedule of the learning rate: adapted to the KL divergence, falling linearly, or constant (none)."""
    schedule_type: Literal["legacy", "standard"] = "legacy"
    """With the adaptive schedule: adapt after each minibatch (legacy) or after each epoch (standard)."""
    kl_threshold: Positive = 0.01
    """With the adaptive schedule: KL divergence at which the learning rate aims; above 0."""
    max_epochs: int = -1
    """With the linear schedule: number of iterations over which the learning rate falls almost to 0."""
    gamma: UnitInterval = 0.99
    """Discount factor of future rewards; 0 to 1."""
    tau: UnitInterval = 0.95
    """Decay of generalized advantage estimation, often called lambda; 0 to 1."""
    e_clip: Positive = 0.2
    """Clipping range of the probability ratio, and of the change of the value; above 0."""
    clip_value: bool = True
    """Clip the change of the value in the value loss."""
    critic_coef: NonNegative = 2.0
    """Weight of the value loss, which RL-Games halves; at least 0."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus; at least 0."""
    bounds_loss_coef: NonNegative = 0.0
    """Weight of the penalty for mean actions outside -1.1 to 1.1; at least 0."""
    grad_norm: Positive = 1.0
    """Norm to which the gradient is clipped if `truncate_grads` is set; above 0."""
    truncate_grads: bool = True
    """Clip the norm of the gradient."""
    reward_scale: Positive = 1.0
    """Factor of the rewards in learning, above 0. Metrics show the rewards of the env."""

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
        check(self, f"--{self.flags}.")
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
