"""Settings of skrl, under its own names, the same for torch and JAX."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.learners.settings import IMAGE_SETTINGS, Settings, derived, translated
from paceline.validation import Bounded, LayerWidths, NonNegative, PerIteration, Positive, UnitInterval


@dataclass(frozen=True)
class SkrlSettings(Settings):
    """Settings of skrl's PPO. The defaults suit locomotion."""

    flags: ClassVar[str] = "skrl"
    horizon_field: ClassVar[str] = "rollouts"
    minibatches_field: ClassVar[str] = "mini_batches"
    fixed: ClassVar[tuple[str, ...]] = (
        "layers",
        "activations",
        "initial_log_std",
        "observation_normalization",
        "value_normalization",
        *IMAGE_SETTINGS,
    )
    horizon = derived(lambda settings: settings.rollouts)
    minibatches = derived(lambda settings: settings.mini_batches)

    rollouts: PerIteration = translated("horizon")
    learning_epochs: PerIteration = translated("epochs")
    mini_batches: PerIteration = translated("minibatches")
    layers: LayerWidths = translated("hidden_layers")
    activations: Literal["elu", "relu", "tanh"] = translated("activation")
    initial_log_std: Bounded = translated(lambda task: math.log(task.initial_std))
    """Natural logarithm of the initial standard deviation of the action noise."""
    learning_rate: Positive = translated("learning_rate")
    learning_rate_scheduler: Literal["KLAdaptiveLR", "none"] = translated(
        lambda task: "KLAdaptiveLR" if task.desired_kl else "none"
    )
    """Adapt the learning rate to the KL divergence (KLAdaptiveLR), or keep it constant (none)."""
    kl_threshold: Positive = translated(lambda task: task.desired_kl or 0.01)
    """Target KL divergence of KLAdaptiveLR; above 0."""
    discount_factor: UnitInterval = translated("discount")
    gae_lambda: UnitInterval = translated("gae_lambda")
    ratio_clip: Positive = translated("clip")
    """Clipping range of the probability ratio; above 0."""
    value_clip: NonNegative = translated(lambda task: task.clip if task.clip_value else 0.0)
    """Clipping range of the change of the value in the value loss, at least 0; 0 disables clipping."""
    entropy_loss_scale: NonNegative = translated("entropy_weight", default=0.0)
    # Twice that of the task, as is common with skrl.
    value_loss_scale: NonNegative = translated(lambda task: 2.0 * task.value_loss_weight)
    """Weight of the value loss; at least 0."""
    grad_norm_clip: Positive = translated("max_gradient_norm")
    observation_normalization: bool = translated("normalize_observations")
    value_normalization: bool = True
    """Normalize values and returns by their running mean and standard deviation."""
    time_limit_bootstrap: bool = True
    """Bootstrap the return of an episode that the time limit ends from the value of its last observation."""
    rewards_shaper_scale: Positive = 1.0
    """Factor of the rewards that the learner receives, above 0. Metrics show the unscaled rewards."""
    image_channels: LayerWidths = translated("image_channels")
    image_kernels: LayerWidths = translated("image_kernels")
    image_strides: LayerWidths = translated("image_strides")
    image_features: PerIteration = translated("image_features")
    image_pooling: Literal["flatten", "spatial_softmax"] = translated("image_pooling")
    image_training: Literal["policy", "targets"] = translated("image_training")
    """Loss that trains the image encoder. Only that of the policy is supported."""
