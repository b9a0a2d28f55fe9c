"""RSL-RL's settings, under its own names."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.checks import MOST_PER_ITERATION, above_zero, at_least_one, flag, not_negative, widths, within_unit


@dataclass(frozen=True)
class RslRlConfig:
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
