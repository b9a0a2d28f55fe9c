"""Settings of skrl, under its own names, the same for torch and JAX."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from paceline.errors import UserError, counted
from paceline.learners.settings import IMAGE_SETTINGS, Settings, derived, translated
from paceline.learners.skrl.network_parts import RecurrentSize, parse_parts
from paceline.validation import (
    Bounded,
    LayerWidth,
    LayerWidths,
    NonNegative,
    PerIteration,
    Positive,
    RecurrentLayers,
    UnitInterval,
)


@dataclass(frozen=True)
class SkrlSettings(Settings):
    """Settings of skrl's PPO. The defaults suit locomotion."""

    flags: ClassVar[str] = "skrl"
    horizon_field: ClassVar[str] = "rollouts"
    minibatches_field: ClassVar[str] = "mini_batches"
    fixed: ClassVar[tuple[str, ...]] = (
        *("separate", "layers", "value_layers", "activations", "network"),
        *("rnn_type", "rnn_hidden_size", "rnn_layers"),
        *("action_space", "initial_log_std", "fixed_log_std"),
        *("observation_normalization", "value_normalization"),
        *IMAGE_SETTINGS,
    )
    library: ClassVar[str] = "skrl"
    library_defaults: ClassVar[Mapping[str, Any]] = {
        "rollouts": 16,
        "learning_epochs": 8,
        "mini_batches": 2,
        "action_space": "any",
        "separate": True,
        "value_layers": None,
        "network": "",
        "rnn_type": "none",
        "rnn_hidden_size": 256,
        "rnn_layers": 1,
        "sequence_length": None,
        "initial_log_std": 0.0,
        "fixed_log_std": False,
        "learning_rate": 0.001,
        "learning_rate_scheduler": "none",
        "kl_threshold": 0.008,
        "discount_factor": 0.99,
        "gae_lambda": 0.95,
        "ratio_clip": 0.2,
        "value_clip": 0.2,
        "entropy_loss_scale": 0.0,
        "value_loss_scale": 2.5,
        "grad_norm_clip": 0.5,
        "observation_normalization": False,
        "value_normalization": False,
        "time_limit_bootstrap": False,
        "rewards_shaper_scale": 1.0,
        "mixed_precision": False,
    }
    horizon = derived(lambda settings: settings.rollouts)
    minibatches = derived(lambda settings: settings.mini_batches)

    rollouts: PerIteration = translated("horizon")
    learning_epochs: PerIteration = translated("epochs")
    mini_batches: PerIteration = translated("minibatches")
    separate: bool = True
    """Give policy and value separate hidden layers; otherwise they share them. skrl on JAX has only separate ones."""
    layers: LayerWidths = translated("hidden_layers")
    value_layers: LayerWidths | None = None
    """Widths of the hidden layers of the value, if it has separate ones, each from 1 to 8192.
    The default are those of --skrl.layers."""
    activations: Literal["elu", "relu", "tanh"] = translated("activation")
    rnn_type: Literal["none", "lstm", "gru"] = translated("rnn_type")
    """Recurrent network before the hidden layers of policy and value, which gives the policy a memory.
    skrl on JAX does not have it."""
    rnn_hidden_size: LayerWidth = translated("rnn_hidden_size")
    rnn_layers: RecurrentLayers = translated("rnn_layers")
    sequence_length: PerIteration | None = None
    """Number of steps of a sequence, through which gradients of a recurrent network are propagated back; at least 1.
    Must divide --skrl.rollouts, which is the default."""
    action_space: Literal["any", "continuous", "discrete"] = "any"
    """Actions for which the settings are meant. A task with other actions is an error."""
    initial_log_std: Bounded = translated(lambda task: math.log(task.initial_std))
    """Natural logarithm of the initial standard deviation of the action noise, from -1e9 to 1e9."""
    fixed_log_std: bool = False
    """Keep the standard deviation of the action noise constant."""
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
    grad_norm_clip: NonNegative = translated("max_gradient_norm")
    """Norm to which the gradient is clipped, at least 0; 0 disables clipping."""
    observation_normalization: bool = translated("normalize_observations")
    value_normalization: bool = True
    """Normalize values and returns by their running mean and standard deviation."""
    time_limit_bootstrap: bool = True
    """Bootstrap the return of an episode that the time limit ends from the value of its last observation."""
    rewards_shaper_scale: Positive = 1.0
    """Factor of the rewards that the learner receives, above 0. Metrics show the unscaled rewards."""
    mixed_precision: bool = False
    """Compute networks and losses in bfloat16. skrl on JAX does not have it."""
    network: str = ""
    """Parts of the network of policy and value, as YAML in the form of skrl's configuration files.
    They replace --skrl.layers, --skrl.activations and the image encoder. skrl on JAX does not have them."""
    image_channels: LayerWidths = translated("image_channels")
    image_kernels: LayerWidths = translated("image_kernels")
    image_strides: LayerWidths = translated("image_strides")
    image_features: PerIteration = translated("image_features")
    image_pooling: Literal["flatten", "spatial_softmax"] = translated("image_pooling")
    image_training: Literal["policy", "targets"] = translated(lambda _: "policy")
    """Loss that trains the image encoder. Only that of the policy is supported, for all tasks."""

    @property
    def recurrent(self) -> RecurrentSize | None:
        """Recurrent network of policy and value, from the last part of `network` or from `rnn_type`."""
        if self.network and (size := parse_parts(self.network)[-1].recurrent):
            return size
        return RecurrentSize(self.rnn_type, self.rnn_hidden_size, self.rnn_layers) if self.rnn_type != "none" else None

    def check(self) -> None:
        super().check()
        if self.network and parse_parts(self.network)[-1].recurrent and self.rnn_type != "none":
            raise UserError(
                f"--skrl.rnn-type {self.rnn_type} with a recurrent part in --skrl.network: use only one of them"
            )
        if self.sequence_length and self.rollouts % self.sequence_length:
            raise UserError(
                f"--skrl.sequence-length {self.sequence_length} must divide --skrl.rollouts {self.rollouts}"
            )

    def check_samples(self, num_envs: int) -> None:
        super().check_samples(num_envs)
        length = self.sequence_length or self.rollouts
        count = num_envs * (self.rollouts // length)
        if self.recurrent and count < self.mini_batches:
            raise UserError(
                f"--skrl.mini-batches {self.mini_batches} is more than {counted(count, 'sequence')} of "
                f"{counted(length, 'step')}, which a rank with {counted(num_envs, 'env')} collects: use at most "
                f"{count}, more envs, or a smaller --skrl.sequence-length"
            )
