"""Settings of RSL-RL, under its own names."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.learners.settings import IMAGE_SETTINGS, Settings, derived, translated
from paceline.validation import LayerWidths, NonNegative, PerIteration, Positive, UnitInterval


@dataclass(frozen=True)
class RslRlSettings(Settings):
    """Settings of RSL-RL's PPO. The defaults suit locomotion."""

    flags: ClassVar[str] = "rsl-rl"
    horizon_field: ClassVar[str] = "num_steps_per_env"
    minibatches_field: ClassVar[str] = "num_mini_batches"
    fixed: ClassVar[tuple[str, ...]] = (
        *("hidden_dims", "activation", "obs_normalization", "init_std", "std_type"),
        *IMAGE_SETTINGS,
    )
    horizon = derived(lambda settings: settings.num_steps_per_env)
    minibatches = derived(lambda settings: settings.num_mini_batches)

    num_steps_per_env: PerIteration = translated("horizon")
    hidden_dims: LayerWidths = translated("hidden_layers")
    activation: Literal["elu", "relu", "tanh", "selu", "lrelu", "sigmoid"] = translated("activation")
    obs_normalization: bool = translated("normalize_observations")
    init_std: Positive = translated("initial_std")
    std_type: Literal["scalar", "log"] = "scalar"
    """Parameter that is learned for the action noise: its standard deviation (scalar) or the logarithm of it (log)."""
    num_learning_epochs: PerIteration = translated("epochs")
    num_mini_batches: PerIteration = translated("minibatches")
    learning_rate: Positive = translated("learning_rate")
    """Initial learning rate, above 0. With the adaptive schedule it stays between 1e-5 and 1e-2."""
    schedule: Literal["adaptive", "fixed"] = translated(lambda task: "adaptive" if task.desired_kl else "fixed")
    """Adapt the learning rate to the KL divergence (adaptive), or keep it constant (fixed)."""
    desired_kl: Positive = translated(lambda task: task.desired_kl or 0.01)
    """Target KL divergence per minibatch of the adaptive learning rate; above 0."""
    gamma: UnitInterval = translated("discount")
    lam: UnitInterval = translated("gae_lambda")
    clip_param: Positive = translated("clip")
    use_clipped_value_loss: bool = translated("clip_value")
    value_loss_coef: NonNegative = translated("value_loss_weight")
    entropy_coef: NonNegative = translated("entropy_weight")
    max_grad_norm: Positive = translated("max_gradient_norm")
    """Norm to which the gradients of actor and critic are clipped separately; above 0."""
    normalize_advantage_per_mini_batch: bool = False
    """Normalize advantages over each minibatch instead of over the rollout."""
    image_channels: LayerWidths = translated("image_channels")
    image_kernels: LayerWidths = translated("image_kernels")
    image_strides: LayerWidths = translated("image_strides")
    image_features: PerIteration = translated("image_features")
    """Width of the first hidden layer of networks that use images, before --rsl-rl.hidden-dims; at least 1."""
    image_pooling: Literal["flatten", "spatial_softmax"] = translated("image_pooling")
    """Reduction of the last feature maps. Only flatten is supported."""
    image_training: Literal["policy", "targets"] = translated("image_training")
    """Loss that trains the image encoder. Only that of the policy is supported."""
