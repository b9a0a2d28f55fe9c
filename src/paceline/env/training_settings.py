"""Training settings of a task, in terms that all learners have."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TrainingSettings:
    """Settings with which a task trains well. Each learner translates them into settings of its own."""

    horizon: int = 24
    """Number of steps per env and iteration."""
    epochs: int = 5
    """Number of passes over the samples of an iteration."""
    minibatches: int = 4
    """Number of minibatches per epoch. Must divide `horizon`."""
    hidden_layers: tuple[int, ...] = (256, 128, 64)
    """Widths of the hidden layers of actor and critic."""
    activation: str = "elu"
    """Activation function of the hidden layers: elu, relu or tanh."""
    learning_rate: float = 1e-3
    """Learning rate at the start."""
    desired_kl: float = 0.01
    """KL divergence per update at which an adaptive learning rate aims; 0 keeps the learning rate constant."""
    discount: float = 0.99
    """Discount factor, usually called gamma."""
    gae_lambda: float = 0.95
    """Decay of generalized advantage estimation."""
    clip: float = 0.2
    """Clipping range of the probability ratio."""
    clip_value: bool = True
    """Whether the value loss is clipped as well."""
    value_loss_weight: float = 1.0
    """Weight of the value loss."""
    entropy_weight: float = 0.005
    """Weight of the entropy bonus."""
    max_gradient_norm: float = 1.0
    """Norm to which gradients are clipped."""
    initial_std: float = 1.0
    """Standard deviation of the action noise at the start."""
    normalize_observations: bool = True
    """Whether observations are normalized by their running mean and variance."""
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Values for single learners, by the learner's name and the field of its settings, for example
    {"rsl_rl": {"num_steps_per_env": 16}}."""
