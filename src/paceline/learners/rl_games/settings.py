"""Settings of RL-Games, under its own names."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le

from paceline.errors import UserError
from paceline.learners.settings import IMAGE_SETTINGS, Settings, derived, flag, translated
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

_Activation = Literal["elu", "relu", "tanh", "selu", "sigmoid"]
_CENTRAL_VALUE = (
    *("units", "activation", "learning_rate", "lr_schedule", "mini_epochs", "minibatch_size_per_env"),
    *("clip_value", "normalize_input", "truncate_grads"),
)


@dataclass(frozen=True)
class RlGamesSettings(Settings):
    """Settings of RL-Games' A2C with the objective of PPO. The defaults suit locomotion."""

    flags: ClassVar[str] = "rl-games"
    horizon_field: ClassVar[str] = "horizon_length"
    minibatches_field: ClassVar[str] = "minibatch_size_per_env"
    fixed: ClassVar[tuple[str, ...]] = (
        *("units", "activation", "action_space", "separate", "fixed_sigma", "sigma_init_val"),
        *("normalize_input", "normalize_value"),
        *("rnn_name", "rnn_units", "rnn_layers", "rnn_before_mlp", "rnn_concat_input", "rnn_layer_norm"),
        *("central_value_units", "central_value_activation", "central_value_rnn_name", "central_value_normalize_input"),
        *IMAGE_SETTINGS,
        "image_activation",
    )
    library: ClassVar[str] = "RL-Games"
    library_defaults: ClassVar[Mapping[str, Any]] = {
        "action_space": "any",
        "separate": False,
        "fixed_sigma": True,
        "sigma_init_val": 0.0,
        "normalize_value": False,
        "value_bootstrap": True,
        "schedule_type": "legacy",
        "kl_threshold": 0.008,
        "max_epochs": -1,
        "bounds_loss_coef": 0.0,
        "truncate_grads": False,
        "reward_scale": 1.0,
        "mixed_precision": False,
        "clip_actions": True,
        "action_limit": None,
        "clip_observations": None,
        "image_activation": None,
        "rnn_name": "none",
        "rnn_before_mlp": False,
        "rnn_concat_input": False,
        "rnn_layer_norm": False,
        "seq_length": 4,
        "central_value_rnn_name": "none",
        **{f"central_value_{name}": None for name in _CENTRAL_VALUE},
    }
    horizon = derived(lambda settings: settings.horizon_length)
    minibatches = derived(lambda settings: settings.horizon_length // settings.minibatch_size_per_env)

    horizon_length: PerIteration = translated("horizon")
    minibatch_size_per_env: PerIteration = translated(lambda task: task.horizon // task.minibatches)
    """Size of a minibatch divided by the number of envs, at least 1. Must divide --rl-games.horizon-length."""
    mini_epochs: PerIteration = translated("epochs")
    units: LayerWidths = translated("hidden_layers")
    activation: _Activation = translated("activation")
    action_space: Literal["any", "continuous", "discrete"] = "any"
    """Actions for which the settings are meant. A task with other actions is an error."""
    separate: bool = False
    """Give actor and critic separate hidden layers; otherwise they share them."""
    fixed_sigma: bool = True
    """Use the same standard deviation of the action noise for all observations; otherwise the network computes it."""
    sigma_init_val: Bounded = translated(lambda task: math.log(task.initial_std))
    """Natural logarithm of the initial standard deviation of the action noise, from -1e9 to 1e9.
    With --rl-games.no-fixed-sigma it is the initial value of the weights of this output, where 0 is usual."""
    rnn_name: Literal["none", "lstm", "gru"] = translated("rnn_type")
    """Recurrent network of actor and critic, which gives the policy a memory."""
    rnn_units: LayerWidth = translated("rnn_hidden_size")
    rnn_layers: RecurrentLayers = translated("rnn_layers")
    rnn_before_mlp: bool = translated(lambda _task: True, default=False)
    """Place the recurrent network before the hidden layers; otherwise after them."""
    rnn_concat_input: bool = False
    """Append the observations to the input of a recurrent network that is after the hidden layers."""
    rnn_layer_norm: bool = False
    """Normalize the output of the recurrent network by a layer norm."""
    seq_length: PerIteration = 4
    """Number of steps of a sequence, through which gradients of a recurrent network are propagated back; at least 2.
    Must divide --rl-games.horizon-length."""
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
    """Apply the adaptive schedule after each minibatch (legacy) or after each epoch (standard).
    With discrete actions RL-Games always applies it after each epoch."""
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
    mixed_precision: bool = False
    """Compute networks and losses in bfloat16 during updates on a GPU. As in RL-Games, it has no effect on a CPU."""
    clip_actions: bool = False
    """Clip actions to -1 to 1 and multiply them by --rl-games.action-limit, if it is given."""
    action_limit: Positive | None = None
    """Limit of the absolute value of the actions that the env receives; above 0. By default there is none."""
    clip_observations: Positive | None = None
    """Limit of the absolute value of the observations that the networks receive; above 0. By default there is none."""
    central_value_units: LayerWidths | None = None
    """Widths of the hidden layers of the central value network, each from 1 to 8192.
    The task's group critic requires this network.
    The default of each of its settings is the setting of the same name without central-value."""
    central_value_activation: _Activation | None = None
    """Activation function of the central value network."""
    central_value_rnn_name: Literal["none", "lstm", "gru"] | None = None
    """Recurrent network of the central value network. Its size is that of the policy."""
    central_value_learning_rate: Positive | None = None
    """Learning rate of the central value network, above 0. It is not adapted to the KL divergence."""
    central_value_lr_schedule: Literal["linear", "none"] | None = None
    """Schedule of this learning rate: decreasing linearly, or constant (none)."""
    central_value_mini_epochs: PerIteration | None = None
    """Number of epochs per iteration of the central value network; at least 1."""
    central_value_minibatch_size_per_env: PerIteration | None = None
    """Size of its minibatches divided by the number of envs, at least 1. Must divide --rl-games.horizon-length."""
    central_value_clip_value: bool | None = None
    """Clip the change of its value in the loss."""
    central_value_normalize_input: bool | None = None
    """Normalize its observations by their running mean and standard deviation."""
    central_value_truncate_grads: bool | None = None
    """Clip the norm of its gradient to --rl-games.grad-norm."""
    image_channels: LayerWidths = translated("image_channels")
    image_kernels: LayerWidths = translated("image_kernels")
    image_strides: LayerWidths = translated("image_strides")
    image_features: Annotated[int, Ge(0), Le(2**16)] = translated("image_features")
    """Width of the first hidden layer of a network that uses images, before --rl-games.units; from 0 to 65536.
    0 omits this layer."""
    image_activation: _Activation | None = None
    """Activation function of the convolutions; by default that of --rl-games.activation."""
    image_pooling: Literal["flatten", "spatial_softmax"] = translated("image_pooling")
    """Reduction of the last feature maps. Only flatten is supported."""
    image_training: Literal["policy", "targets"] = translated(lambda _: "policy")
    """Loss that trains the image encoder. Only that of the policy is supported, for all tasks."""

    def check(self) -> None:
        super().check()
        for name in ("minibatch_size_per_env", "central_value_minibatch_size_per_env"):
            steps = getattr(self, name)
            if steps and self.horizon_length % steps:
                raise UserError(
                    f"{flag(self, name)} {steps} does not divide --rl-games.horizon-length {self.horizon_length}"
                )
        if self.rnn_name != "none" and (self.horizon_length % self.seq_length or self.seq_length < 2):
            raise UserError(
                f"--rl-games.seq-length {self.seq_length} must be at least 2 and divide --rl-games.horizon-length "
                f"{self.horizon_length}"
            )
        if self.lr_schedule == "linear" and self.max_epochs < 1:
            raise UserError(
                f"--rl-games.lr-schedule linear with --rl-games.max-epochs {self.max_epochs}: "
                "give the iterations over which the learning rate falls"
            )

    def check_samples(self, num_envs: int) -> None:
        super().check_samples(num_envs)
        central = self.central_value_rnn_name or self.rnn_name
        if self.rnn_name == "none" and central != "none":
            raise UserError(
                f"--rl-games.central-value-rnn-name {central} needs a recurrent policy: give --rl-games.rnn-name "
                f"{central}"
            )
        if self.rnn_name == "none":
            return
        sizes = [self.minibatch_size_per_env]
        if central != "none":
            sizes.append(self.central_value_minibatch_size_per_env or self.minibatch_size_per_env)
        for steps in sizes:
            size = num_envs * steps
            if size % self.seq_length or size == self.seq_length:
                raise UserError(
                    f"--rl-games.seq-length {self.seq_length} does not divide a minibatch into several sequences "
                    f"(envs x steps: {num_envs} x {steps}): use another length, or more envs"
                )
