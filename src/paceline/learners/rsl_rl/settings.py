"""Settings of RSL-RL, under its own names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from paceline.errors import UserError, counted
from paceline.learners.settings import IMAGE_SETTINGS, Settings, derived, translated
from paceline.validation import (
    LayerWidth,
    LayerWidths,
    NonNegative,
    NonNegativeRange,
    PerIteration,
    Positive,
    RecurrentLayers,
    UnitInterval,
)


@dataclass(frozen=True)
class RslRlSettings(Settings):
    """Settings of RSL-RL's PPO. The defaults suit locomotion."""

    flags: ClassVar[str] = "rsl-rl"
    horizon_field: ClassVar[str] = "num_steps_per_env"
    minibatches_field: ClassVar[str] = "num_mini_batches"
    fixed: ClassVar[tuple[str, ...]] = (
        *("hidden_dims", "critic_hidden_dims", "activation", "action_space", "obs_normalization"),
        *("rnn_type", "rnn_hidden_dim", "rnn_num_layers"),
        *("init_std", "std_type", "learn_std", "state_dependent_std"),
        *IMAGE_SETTINGS,
    )
    library: ClassVar[str] = "RSL-RL"
    library_defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_dims": (256, 256, 256),
        "critic_hidden_dims": (256, 256, 256),
        "activation": "elu",
        "action_space": "continuous",
        "rnn_type": "none",
        "rnn_hidden_dim": 256,
        "rnn_num_layers": 1,
        "obs_normalization": False,
        "init_std": 1.0,
        "std_type": "scalar",
        "std_range": (1e-6, 1e6),
        "learn_std": True,
        "state_dependent_std": False,
        "num_learning_epochs": 5,
        "num_mini_batches": 4,
        "learning_rate": 0.001,
        "schedule": "adaptive",
        "desired_kl": 0.01,
        "gamma": 0.99,
        "lam": 0.95,
        "clip_param": 0.2,
        "use_clipped_value_loss": True,
        "value_loss_coef": 1.0,
        "entropy_coef": 0.01,
        "max_grad_norm": 1.0,
        "normalize_advantage_per_mini_batch": False,
        "use_mixed_precision": False,
        "clip_actions": None,
    }
    horizon = derived(lambda settings: settings.num_steps_per_env)
    minibatches = derived(lambda settings: settings.num_mini_batches)

    num_steps_per_env: PerIteration = translated("horizon")
    hidden_dims: LayerWidths = translated("hidden_layers")
    critic_hidden_dims: LayerWidths | None = None
    """Widths of the hidden layers of the critic, each from 1 to 8192; by default those of --rsl-rl.hidden-dims."""
    activation: Literal["elu", "relu", "tanh", "selu", "lrelu", "sigmoid"] = translated("activation")
    rnn_type: Literal["none", "lstm", "gru"] = translated("rnn_type")
    rnn_hidden_dim: LayerWidth = translated("rnn_hidden_size")
    rnn_num_layers: RecurrentLayers = translated("rnn_layers")
    action_space: Literal["any", "continuous", "discrete"] = "any"
    """Actions for which the settings are meant. A task with other actions is an error."""
    obs_normalization: bool = translated("normalize_observations")
    init_std: Positive = translated("initial_std")
    std_type: Literal["scalar", "log"] = "scalar"
    """Parameter that is learned for the action noise: its standard deviation (scalar) or the logarithm of it (log)."""
    std_range: NonNegativeRange = (1e-6, 1e6)
    """Minimum and maximum of the standard deviation of the action noise, each at least 0."""
    learn_std: bool = True
    """Learn the standard deviation of the action noise; otherwise it remains --rsl-rl.init-std."""
    state_dependent_std: bool = False
    """Compute the standard deviation of the action noise from the observations, by the network of the actor."""
    num_learning_epochs: PerIteration = translated("epochs")
    num_mini_batches: PerIteration = translated("minibatches")
    """Number of minibatches per epoch; at least 1.
    With --rsl-rl.rnn-type a minibatch has whole envs, and there must be at least one env for each."""
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
    use_mixed_precision: bool = False
    """Compute the networks in bfloat16 during updates."""
    clip_actions: Positive | None = None
    """Limit of the absolute value of actions, above 0, to which they are clipped before the env receives them.
    By default they are not clipped."""
    image_channels: LayerWidths = translated("image_channels")
    image_kernels: LayerWidths = translated("image_kernels")
    image_strides: LayerWidths = translated("image_strides")
    image_features: PerIteration = translated("image_features")
    """Width of the first hidden layer of networks that use images, before --rsl-rl.hidden-dims; at least 1."""
    image_pooling: Literal["flatten", "spatial_softmax"] = translated("image_pooling")
    """Reduction of the last feature maps. Only flatten is supported."""
    image_training: Literal["policy", "targets"] = translated(lambda _: "policy")
    """Loss that trains the image encoder. Only that of the policy is supported, for all tasks."""

    def check(self) -> None:
        super().check()
        if self.state_dependent_std and not self.learn_std:
            raise UserError("--rsl-rl.no-learn-std with --rsl-rl.state-dependent-std: use only one of them")

    def check_samples(self, num_envs: int) -> None:
        super().check_samples(num_envs)
        if self.rnn_type != "none" and self.num_mini_batches > num_envs:
            raise UserError(
                f"--rsl-rl.num-mini-batches {self.num_mini_batches} is more than {counted(num_envs, 'env')} of a rank: "
                f"with --rsl-rl.rnn-type {self.rnn_type} a minibatch has whole envs; use at most {num_envs}"
            )
