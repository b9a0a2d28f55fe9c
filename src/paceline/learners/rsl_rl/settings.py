"""Settings of RSL-RL, under its own names."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, cast

from paceline.env.training_settings import TrainingSettings
from paceline.learners.settings import with_overrides
from paceline.validation import LayerWidths, NonNegative, PerIteration, Positive, UnitInterval, check


@dataclass(frozen=True)
class RslRlSettings:
    """Settings of RSL-RL's PPO. The defaults suit locomotion."""

    flags: ClassVar[str] = "rsl-rl"
    horizon_field: ClassVar[str] = "num_steps_per_env"
    minibatches_field: ClassVar[str] = "num_mini_batches"
    fixed: ClassVar[tuple[str, ...]] = ("hidden_dims", "activation", "obs_normalization", "init_std", "std_type")

    num_steps_per_env: PerIteration = 24
    """Number of steps per env and iteration; at least 1."""
    hidden_dims: LayerWidths = (256, 128, 64)
    """Widths of the hidden layers of actor and critic."""
    activation: Literal["elu", "relu", "tanh", "selu", "lrelu", "sigmoid"] = "elu"
    """Activation function of the hidden layers."""
    obs_normalization: bool = True
    """Normalize observations by their running mean and standard deviation."""
    init_std: Positive = 1.0
    """Standard deviation of the action noise at the start; above 0."""
    std_type: Literal["scalar", "log"] = "scalar"
    """Parameter that is learned for the action noise: its standard deviation (scalar) or the logarithm of it (log)."""
    num_learning_epochs: PerIteration = 5
    """Number of passes over the samples of an iteration; at least 1."""
    num_mini_batches: PerIteration = 4
    """Number of minibatches per epoch; at least 1."""
    learning_rate: Positive = 1e-3
    """Learning rate at the start, above 0. With the adaptive schedule it stays between 1e-5 and 1e-2."""
    schedule: Literal["adaptive", "fixed"] = "adaptive"
    """Adapt the learning rate to the KL divergence (adaptive), or keep it constant (fixed)."""
    desired_kl: Positive = 0.01
    """KL divergence per minibatch at which the adaptive learning rate aims; above 0."""
    gamma: UnitInterval = 0.99
    """Discount factor of future rewards; 0 to 1."""
    lam: UnitInterval = 0.95
    """Decay of generalized advantage estimation; 0 to 1."""
    clip_param: Positive = 0.2
    """Clipping range of the probability ratio, and of the change of the value; above 0."""
    use_clipped_value_loss: bool = True
    """Clip the change of the value in the value loss."""
    value_loss_coef: NonNegative = 1.0
    """Weight of the value loss; at least 0."""
    entropy_coef: NonNegative = 0.005
    """Weight of the entropy bonus; at least 0."""
    max_grad_norm: Positive = 1.0
    """Norm to which the gradients of actor and critic are clipped separately; above 0."""
    normalize_advantage_per_mini_batch: bool = False
    """Standardize advantages over each minibatch instead of over the rollout."""

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
        check(self, f"--{self.flags}.")
