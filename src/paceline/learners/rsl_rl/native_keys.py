"""Keys of RSL-RL's configuration files. Other keys are unknown to RSL-RL as well."""

from paceline.learners.native_keys import KEEP, Group, Only, Ours, RunOption, Setting, ours, same

_NETWORK: Group = {
    "class_name": Only("MLPModel"),
    **same("hidden_dims", "activation", "obs_normalization"),
    # Keys of recurrent and convolutional models.
    **{name: Only(None) for name in ("rnn_type", "rnn_hidden_dim", "rnn_num_layers", "cnn_cfg")},
}

KEYS: Group = {
    **same("num_steps_per_env"),
    "class_name": Only("OnPolicyRunner"),
    "max_iterations": RunOption("max_iterations"),
    "save_interval": RunOption("checkpoint_every"),
    "seed": RunOption("seed", least=0),
    "empirical_normalization": Setting("obs_normalization", {True: True, False: False, None: KEEP}),
    "clip_actions": Only(None),
    "torch_compile_mode": Only(None),
    "multi_gpu": Only(None),
    "obs_groups": {
        "actor": Only(["policy"], ["actor"]),
        "policy": Only(["policy"]),
        "critic": Ours("the critic uses the group critic if the task has one, otherwise policy"),
    },
    "actor": {
        **_NETWORK,
        "distribution_cfg": {
            "class_name": Only("GaussianDistribution"),
            **same("init_std", "std_type"),
            "learn_std": Only(True),
            "std_range": Only([1e-6, 1e6]),
        },
        # Before version 5.
        "stochastic": Only(True),
        "init_noise_std": Setting("init_std"),
        "noise_std_type": Setting("std_type"),
        "state_dependent_std": Only(False),
    },
    "critic": {
        **_NETWORK,
        "distribution_cfg": Only(None),
        "stochastic": Only(False),
        **ours("init_noise_std", "noise_std_type", "state_dependent_std"),
    },
    # Before version 4.
    "policy": {
        "class_name": Only("ActorCritic"),
        "init_noise_std": Setting("init_std"),
        "noise_std_type": Setting("std_type"),
        "state_dependent_std": Only(False),
        **{f"{role}_hidden_dims": Setting("hidden_dims") for role in ("actor", "critic")},
        **{f"{role}_obs_normalization": Setting("obs_normalization") for role in ("actor", "critic")},
        **same("activation"),
        **{name: Only(None) for name in ("rnn_type", "rnn_hidden_dim", "rnn_num_layers")},
    },
    "algorithm": {
        "class_name": Only("PPO"),
        **same(
            "num_learning_epochs",
            "num_mini_batches",
            "learning_rate",
            "schedule",
            "gamma",
            "lam",
            "clip_param",
            "use_clipped_value_loss",
            "value_loss_coef",
            "entropy_coef",
            "max_grad_norm",
            "normalize_advantage_per_mini_batch",
        ),
        "desired_kl": Setting("desired_kl", null=KEEP),
        "optimizer": Only("adam"),
        "use_mixed_precision": Only(False),
        "share_cnn_encoders": Only(False, None),
        "rnd_cfg": Only(None),
        "symmetry_cfg": Only(None),
        "grad_reduce_bucket_mb": Ours(),
    },
    **ours("experiment_name", "run_name", "logger", "wandb_project", "wandb_tags", "neptune_project", "upload_model"),
    **ours("log_interval", "resume", "load_run", "load_checkpoint", "device", "check_for_nan"),
}

MARKS = {"algorithm", "num_steps_per_env", "policy", "actor", "obs_groups", "max_iterations"}
"""Top-level keys that identify such a file."""
