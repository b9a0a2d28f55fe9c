"""Training settings of a task, in terms that all learners have."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TrainingSettings:
    """Settings with which a task trains well. Each learner translates them into its own settings, with these docstrings
    as help texts. `minibatches` must divide `horizon`."""

    horizon: int = 24
    """Number of steps per env and iteration; at least 1."""
    epochs: int = 5
    """Number of passes over the samples of an iteration; at least 1."""
    minibatches: int = 4
    """Number of minibatches per epoch; at least 1."""
    hidden_layers: tuple[int, ...] = (256, 128, 64)
    """Widths of the hidden layers of actor and critic, each from 1 to 8192."""
    activation: str = "elu"
    """Activation function of the hidden layers."""
    rnn_type: str = "none"
    """Recurrent network before the hidden layers of actor and critic, which gives the policy a memory."""
    rnn_hidden_size: int = 256
    """Width of the state of the recurrent network, from 1 to 8192."""
    rnn_layers: int = 1
    """Number of layers of the recurrent network, from 1 to 16."""
    learning_rate: float = 1e-3
    """Initial learning rate; above 0."""
    desired_kl: float = 0.01
    """Target KL divergence per minibatch of the adaptive learning rate, at least 0; 0 keeps the rate constant."""
    discount: float = 0.99
    """Discount factor of future rewards, often called gamma; 0 to 1."""
    gae_lambda: float = 0.95
    """Decay of generalized advantage estimation, often called lambda; 0 to 1."""
    clip: float = 0.2
    """Clipping range of the probability ratio, and of the change of the value; above 0."""
    clip_value: bool = True
    """Clip the change of the value in the value loss."""
    value_loss_weight: float = 1.0
    """Weight of the value loss; at least 0."""
    entropy_weight: float = 0.005
    """Weight of the entropy bonus; at least 0."""
    max_gradient_norm: float = 1.0
    """Norm to which the gradient is clipped; above 0."""
    initial_std: float = 1.0
    """Initial standard deviation of the action noise; above 0."""
    normalize_observations: bool = True
    """Normalize observations by their running mean and standard deviation."""
    image_channels: tuple[int, ...] = (32, 64, 64)
    """Output channels of each convolution of the image encoder, each from 1 to 8192."""
    image_kernels: tuple[int, ...] = (8, 4, 3)
    """Kernel size of each convolution in pixels, from 1 to 8192; one per layer."""
    image_strides: tuple[int, ...] = (4, 2, 1)
    """Stride of each convolution in pixels, from 1 to 8192; one per layer."""
    image_features: int = 256
    """Number of features into which all images of an env are encoded; at least 1."""
    image_pooling: str = "flatten"
    """Reduction of the last feature maps: flatten, or spatial_softmax for the mean position of each."""
    image_dtype: str = "bfloat16"
    """Type of numbers in which a GPU computes the image encoder. A CPU always uses float32."""
    image_training: str = "policy"
    """Loss that trains the image encoder: that of the policy, or regression (targets).
    With targets the encoder predicts the observation group "image_targets", and the policy observes the prediction."""
    image_learning_rate: float = 1e-3
    """Learning rate of the image encoder if it is trained by regression; above 0."""
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Values for single learners, by the learner's name and the field of its settings, for example
    {"rsl_rl": {"num_steps_per_env": 16}}."""
