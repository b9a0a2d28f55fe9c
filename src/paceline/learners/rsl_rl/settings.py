"""Settings of RSL-RL, under its own names, and the keys of its configuration files."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.learners.native_keys import KEEP, Ignored, Keys, Only, RunOption, Setting, ignored, only, same
from paceline.learners.settings import Settings, derived, translated
from paceline.validation import LayerWidths, NonNegative, PerIteration, Positive, UnitInterval


@dataclass(frozen=True)
class RslRlSettings(Settings):
    """Settings of RSL-RL's PPO. The defaults suit locomotion."""

    flags: ClassVar[str] = "rsl-rl"
    horizon_field: ClassVar[str] = "num_steps_per_env"
    minibatches_field: ClassVar[str] = "num_mini_batches"
    fixed: ClassVar[tuple[str, ...]] = ("hidden_dims", "activation", "obs_normalization", "init_std", "std_type")
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


# Keys of recurrent models.
_RECURRENT = only(None, "rnn_type rnn_hidden_dim rnn_num_layers")
_NETWORK: Keys = {
    "class_name": Only("MLPModel"),
    **same("hidden_dims activation obs_normalization"),
    **_RECURRENT,
    "cnn_cfg": Only(None),
}
# Names before version 5.
_NOISE: Keys = {
    "init_noise_std": Setting("init_std"),
    "noise_std_type": Setting("std_type"),
    "state_dependent_std": Only(False),
}

NATIVE_KEYS: Keys = {
    **same("num_steps_per_env"),
    "class_name": Only("OnPolicyRunner"),
    "max_iterations": RunOption("max_iterations"),
    "save_interval": RunOption("checkpoint_every"),
    "seed": RunOption("seed", minimum=0),
    "empirical_normalization": Setting("obs_normalization", null=KEEP),
    **only(None, "clip_actions torch_compile_mode multi_gpu"),
    "obs_groups": {
        "actor": Only(["policy"], ["actor"]),
        "policy": Only(["policy"]),
        "critic": Ignored("the critic uses the group critic if the task has one, otherwise policy"),
    },
    "actor": {
        **_NETWORK,
        "distribution_cfg": {
            "class_name": Only("GaussianDistribution"),
            **same("init_std std_type"),
            "learn_std": Only(True),
            "std_range": Only([1e-6, 1e6]),
        },
        "stochastic": Only(True),
        **_NOISE,
    },
    "critic": {**_NETWORK, "distribution_cfg": Only(None), "stochastic": Only(False), **ignored(" ".join(_NOISE))},
    # Before version 4.
    "policy": {
        "class_name": Only("ActorCritic"),
        **{f"{role}_hidden_dims": Setting("hidden_dims") for role in ("actor", "critic")},
        **{f"{role}_obs_normalization": Setting("obs_normalization") for role in ("actor", "critic")},
        **same("activation"),
        **_NOISE,
        **_RECURRENT,
    },
    "algorithm": {
        "class_name": Only("PPO"),
        **same("num_learning_epochs num_mini_batches learning_rate schedule gamma lam clip_param max_grad_norm"),
        **same("use_clipped_value_loss value_loss_coef entropy_coef normalize_advantage_per_mini_batch"),
        "desired_kl": Setting("desired_kl", null=KEEP),
        "optimizer": Only("adam"),
        "use_mixed_precision": Only(False),
        "share_cnn_encoders": Only(False, None),
        **only(None, "rnd_cfg symmetry_cfg"),
        **ignored("grad_reduce_bucket_mb"),
    },
    **ignored("experiment_name run_name logger wandb_project wandb_tags neptune_project upload_model log_interval"),
    **ignored("resume load_run load_checkpoint device check_for_nan"),
}
"""All keys of RSL-RL's configuration files."""
