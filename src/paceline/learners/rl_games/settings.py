"""Settings of RL-Games, under its own names, and the keys of its configuration files."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.errors import UserError
from paceline.learners.native_keys import Ignored, Keys, Only, RunOption, Setting, ignored, only, same
from paceline.learners.settings import Settings, derived, translated
from paceline.validation import LayerWidths, NonNegative, PerIteration, Positive, UnitInterval


@dataclass(frozen=True)
class RlGamesSettings(Settings):
    """Settings of RL-Games' continuous A2C with the objective of PPO. The defaults suit locomotion."""

    flags: ClassVar[str] = "rl-games"
    horizon_field: ClassVar[str] = "horizon_length"
    minibatches_field: ClassVar[str] = "minibatch_size_per_env"
    fixed: ClassVar[tuple[str, ...]] = ("units", "activation", "separate", "normalize_input", "normalize_value")
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


_MLP: Keys = {
    **same("units activation"),
    **only(False, "d2rl norm_only_first_layer"),
    "initializer": {"name": Only("default"), "scale": Ignored()},
    "regularizer": {"name": Only("None", None)},
}
_LR_SCHEDULES = {"adaptive": "adaptive", "linear": "linear", "None": "none", None: "none"}
_LR_SCHEDULE = Setting("lr_schedule", _LR_SCHEDULES | {"identity": "none", "constant": "none"})
# Keys that a central value network has as well.
_OPTIMIZATION: Keys = {
    **same("minibatch_size minibatch_size_per_env mini_epochs learning_rate kl_threshold clip_value normalize_input"),
    **same("truncate_grads grad_norm e_clip schedule_type"),
    "lr_schedule": _LR_SCHEDULE,
    "weight_decay": Only(0.0),
    **only(False, "mixed_precision freeze_critic"),
}

_CONFIG: Keys = {
    **_OPTIMIZATION,
    **same("horizon_length normalize_value normalize_advantage value_bootstrap gamma tau critic_coef entropy_coef"),
    "bounds_loss_coef": Setting("bounds_loss_coef", null=0.0),
    "reward_shaper": {
        "scale_value": Setting("reward_scale"),
        "shift_value": Only(0),
        "min_val": Only(-math.inf),
        "max_val": Only(math.inf),
        "log_val": Only(False),
        "is_torch": Ignored(),
    },
    "max_epochs": RunOption("max_iterations", setting="max_epochs"),
    "save_frequency": RunOption("checkpoint_every"),
    "central_value_config": {
        **_OPTIMIZATION,
        "model": {"name": Only("central_value")},
        "network": {
            "name": Only("actor_critic"),
            "central_value": Ignored("used if the task has the group critic"),
            "mlp": _MLP,
        },
    },
    **only(True, "ppo is_train use_experimental_cv"),
    "bound_loss_type": Only("bound"),
    **{name: Only(-1, remedy="give max_epochs") for name in ("max_frames", "max_steps")},
    "epochs_between_resets": Only(0),
    "self_play_config": Only(None),
    **only(False, "population_based_training use_action_masks self_play normalize_rms_advantage use_smooth_clamp"),
    **only(False, "schedule_entropy"),
    "clip_actions": Ignored("the task does this"),
    # Keys of recurrent networks, which are rejected below.
    **ignored("seq_length seq_len bptt_length zero_rnn_on_done"),
    **ignored("name env_name env_config env_info vec_env num_actors device device_name full_experiment_name train_dir"),
    **ignored("log_path network_path features player multi_gpu torch_compile score_to_win save_best_after print_stats"),
    **ignored("games_to_track use_diagnostics pbt_idx adv_rms_momentum"),
}

NATIVE_KEYS: Keys = {
    "params": {
        "seed": RunOption("seed", minimum=0),
        **ignored("load_checkpoint load_path torch_threads"),
        # Isaac Lab's wrapper clips with these.
        "env": {name: Ignored("the task does this") for name in ("clip_observations", "clip_actions", "obs_groups")}
        | {"concate_obs_groups": Ignored()},
        "algo": {"name": Only("a2c_continuous")},
        "model": {"name": Only("continuous_a2c_logstd")},
        "network": {
            "name": Only("actor_critic"),
            **same("separate"),
            "space": {
                "continuous": {
                    **{name: Only("None", None) for name in ("mu_activation", "sigma_activation")},
                    "mu_init": {"name": Only("default")},
                    "sigma_init": {"name": Only("const_initializer"), "val": Only(0)},
                    "fixed_sigma": Only(True),
                },
                "discrete": Only(),
                "multi_discrete": Only(),
            },
            "mlp": _MLP,
            **{name: Only("None", None) for name in ("value_activation", "normalization")},
            "central_value": Only(False),
            "joint_obs_actions": Only(None),
            "rnn": Only(),
            "cnn": Only(),
        },
        "config": _CONFIG,
    }
}
"""All keys of RL-Games' configuration files."""
