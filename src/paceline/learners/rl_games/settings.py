"""Settings of RL-Games, under its own names."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.errors import UserError
from paceline.learners.settings import IMAGE_SETTINGS, Settings, derived, translated
from paceline.validation import LayerWidths, NonNegative, PerIteration, Positive, UnitInterval


@dataclass(frozen=True)
class RlGamesSettings(Settings):
    """Settings of RL-Games' continuous A2C with the objective of PPO. The defaults suit locomotion."""

    flags: ClassVar[str] = "rl-games"
    horizon_field: ClassVar[str] = "horizon_length"
    minibatches_field: ClassVar[str] = "minibatch_size_per_env"
    fixed: ClassVar[tuple[str, ...]] = (
        *("units", "activation", "separate", "normalize_input", "normalize_value"),
        *IMAGE_SETTINGS,
    )
    horizon = derived(lambda settings: settings.horizon_length)
    minibatches = derived(lambda settings: settings.horizon_length // settings.minibatch_size_per_env)

    horizon_length: PerIteration = translated("horizon")
    minibatch_size_per_env: PerIteration = translated(lambda task: task.horizon // task.minibatches)
    """Size of a minibatch divided by the number of envs. Must divide --rl-games.horizon-length."""
    mini_epochs: PerIteration = translated("epochs")
    units: LayerWidths = translated("hidden_layers")
    activation: Literal["elu", "relu", "tanh", "selu", "sigmoid"] = translated("activation")
    separate: bool = False
    """Give actor and critic separate hidden layers; otherwise they share them."""
    normalize_input: bool = translated("normalize_observations")
    normalize_value: bool = True
    """Normalize values and returns by their running mean and standard deviation."""
    normalize_advantage: bool = True
    """Normalize advantages over the rollout."""
    value_bootstrap: bool = True
    """Bootstrap the return of an episode that the time limit ends."""
    learning_rate: Positive = translated("learning_rate")
    lr_schedule: Literal["adaptive", "linear", "none"] = translated(
        lambda task: "adaptive" if task.desired_kl else "none"
    )
    """Schedule of the learning rate: adapted to the KL divergence, decreasing linearly, or constant (none)."""
    schedule_type: Literal["legacy", "standard"] = "legacy"
    """Apply the adaptive schedule after each minibatch (legacy) or after each epoch (standard)."""
    kl_threshold: Positive = translated(lambda task: task.desired_kl or 0.01)
    """Target KL divergence of the adaptive schedule; above 0."""
    max_epochs: int = -1
    """Number of iterations in which the linear schedule decreases the learning rate almost to 0; then at least 1."""
    gamma: UnitInterval = translated("discount")
    tau: UnitInterval = translated("gae_lambda")
    e_clip: Positive = translated("clip")
    clip_value: bool = translated("clip_value")
    critic_coef: NonNegative = translated(lambda task: 2.0 * task.value_loss_weight)
    """Weight of the value loss, at least 0. RL-Games multiplies it by 0.5."""
    entropy_coef: NonNegative = translated("entropy_weight", default=0.0)
    bounds_loss_coef: NonNegative = 0.0
    """Weight of the penalty for mean actions outside -1.1 to 1.1; at least 0."""
    grad_norm: Positive = translated("max_gradient_norm")
    """Norm to which the gradient is clipped with --rl-games.truncate-grads; above 0."""
    truncate_grads: bool = True
    """Clip the norm of the gradient."""
    reward_scale: Positive = 1.0
    """Factor of the rewards that the learner receives, above 0. Metrics show the unscaled rewards."""
    image_channels: LayerWidths = translated("image_channels")
    image_kernels: LayerWidths = translated("image_kernels")
    image_strides: LayerWidths = translated("image_strides")
    image_features: PerIteration = translated("image_features")
    """Width of the first hidden layer of a network that uses images, before --rl-games.units; at least 1."""
    image_pooling: Literal["flatten", "spatial_softmax"] = translated("image_pooling")
    """Reduction of the last feature maps. Only flatten is supported."""
    image_training: Literal["policy", "targets"] = translated("image_training")
    """Loss that trains the image encoder. Only that of the policy is supported."""

    def check(self) -> None:
        super().check()
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
