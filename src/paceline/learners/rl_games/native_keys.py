"""Keys of RL-Games' configuration files. Other keys are unknown to RL-Games as well."""

import math

from paceline.learners.native_keys import Group, Only, Ours, RunOption, Setting, ours, same

_MLP: Group = {
    **same("units", "activation"),
    "d2rl": Only(False),
    "norm_only_first_layer": Only(False),
    "initializer": {"name": Only("default"), "scale": Ours()},
    "regularizer": {"name": Only("None", None)},
}

_NONE = ("None", None)

_LR_SCHEDULE = Setting(
    "lr_schedule",
    {"adaptive": "adaptive", "linear": "linear"} | dict.fromkeys((*_NONE, "identity", "constant"), "none"),
)

_CENTRAL_VALUE: Group = {
    **same("minibatch_size", "minibatch_size_per_env", "mini_epochs", "learning_rate", "kl_threshold", "clip_value"),
    **same("normalize_input", "truncate_grads", "grad_norm", "e_clip", "schedule_type"),
    "lr_schedule": _LR_SCHEDULE,
    "mixed_precision": Only(False),
    "weight_decay": Only(0.0),
    "freeze_critic": Only(False),
    "model": {"name": Only("central_value")},
    "network": {
        "name": Only("actor_critic"),
        "central_value": Ours("used if the task has the group critic"),
        "mlp": _MLP,
    },
}

KEYS: Group = {
    "params": {
        "seed": RunOption("seed", least=0),
        **ours("load_checkpoint", "load_path", "torch_threads"),
        # Isaac Lab's wrapper clips with these.
        "env": {name: Ours("the task does this") for name in ("clip_observations", "clip_actions", "obs_groups")}
        | {"concate_obs_groups": Ours()},
        "algo": {"name": Only("a2c_continuous")},
        "model": {"name": Only("continuous_a2c_logstd")},
        "network": {
            "name": Only("actor_critic"),
            **same("separate"),
            "space": {
                "continuous": {
                    "mu_activation": Only(*_NONE),
                    "sigma_activation": Only(*_NONE),
                    "mu_init": {"name": Only("default")},
                    "sigma_init": {"name": Only("const_initializer"), "val": Only(0)},
                    "fixed_sigma": Only(True),
                },
                "discrete": Only(),
                "multi_discrete": Only(),
            },
            "mlp": _MLP,
            "value_activation": Only(*_NONE),
            "normalization": Only(*_NONE),
            "central_value": Only(False),
            "joint_obs_actions": Only(None),
            "rnn": Only(),
            "cnn": Only(),
        },
        "config": {
            **same(
                "horizon_length",
                "minibatch_size",
                "minibatch_size_per_env",
                "mini_epochs",
                "normalize_input",
                "normalize_value",
                "normalize_advantage",
                "value_bootstrap",
                "learning_rate",
                "schedule_type",
                "kl_threshold",
                "gamma",
                "tau",
                "e_clip",
                "clip_value",
                "critic_coef",
                "entropy_coef",
                "grad_norm",
                "truncate_grads",
            ),
            "bounds_loss_coef": Setting("bounds_loss_coef", null=0.0),
            "lr_schedule": _LR_SCHEDULE,
            "reward_shaper": {
                "scale_value": Setting("reward_scale"),
                "shift_value": Only(0),
                "min_val": Only(-math.inf),
                "max_val": Only(math.inf),
                "log_val": Only(False),
                "is_torch": Ours(),
            },
            "max_epochs": RunOption("max_iterations", setting="max_epochs"),
            "save_frequency": RunOption("checkpoint_every"),
            "central_value_config": _CENTRAL_VALUE,
            "ppo": Only(True),
            "is_train": Only(True),
            "use_experimental_cv": Only(True),
            "bound_loss_type": Only("bound"),
            "weight_decay": Only(0.0),
            "max_frames": Only(-1, remedy="give max_epochs"),
            "max_steps": Only(-1, remedy="give max_epochs"),
            "epochs_between_resets": Only(0),
            "self_play_config": Only(None),
            **{
                name: Only(False)
                for name in (
                    "mixed_precision",
                    "population_based_training",
                    "use_action_masks",
                    "self_play",
                    "normalize_rms_advantage",
                    "use_smooth_clamp",
                    "schedule_entropy",
                    "freeze_critic",
                )
            },
            "clip_actions": Ours("the task does this"),
            # Keys of recurrent networks, which are rejected above.
            **ours("seq_length", "seq_len", "bptt_length", "zero_rnn_on_done"),
            **ours("name", "env_name", "env_config", "env_info", "vec_env", "num_actors", "device", "device_name"),
            **ours("full_experiment_name", "train_dir", "log_path", "network_path", "features", "player"),
            **ours("multi_gpu", "torch_compile", "score_to_win", "save_best_after", "print_stats", "games_to_track"),
            **ours("use_diagnostics", "pbt_idx", "adv_rms_momentum"),
        },
    }
}

MARKS = {"params"}
"""Top-level keys that identify such a file."""
