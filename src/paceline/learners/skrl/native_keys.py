"""Keys of skrl's configuration files. Other keys are unknown to skrl as well."""

from paceline.learners.native_keys import Group, Only, Ours, RunOption, Setting, ours, same


def _skrl_model(kind: str, inputs: tuple[str, ...], output: str) -> Group:
    return {
        "class": Only(kind),
        "clip_actions": Only(False),
        "network": {"name": Ours(), "input": Only(*inputs), **same("layers", "activations")},
        "output": Only(output),
    }


_SCALER = {"RunningStandardScaler": True, None: False}

KEYS: Group = {
    "seed": RunOption("seed", least=0),
    "models": {
        "separate": Ours("policy and value have separate layers"),
        "policy": {
            **_skrl_model("GaussianMixin", ("STATES", "OBSERVATIONS"), "ACTIONS"),
            **same("initial_log_std"),
            "clip_mean_actions": Only(False),
            "clip_log_std": Only(True),
            "min_log_std": Only(-20),
            "max_log_std": Only(2),
            "reduction": Only("sum"),
            "fixed_log_std": Only(False),
        },
        "value": _skrl_model("DeterministicMixin", ("STATES", "OBSERVATIONS"), "ONE"),
    },
    "memory": {"class": Only("RandomMemory"), "memory_size": Ours()},
    "agent": {
        "class": Only("PPO"),
        **same(
            "rollouts",
            "learning_epochs",
            "mini_batches",
            "discount_factor",
            "learning_rate",
            "ratio_clip",
            "value_clip",
            "entropy_loss_scale",
            "value_loss_scale",
            "grad_norm_clip",
            "time_limit_bootstrap",
        ),
        # The name before version 2, and the current one.
        "lambda": Setting("gae_lambda"),
        "gae_lambda": Setting("gae_lambda"),
        "learning_rate_scheduler": Setting(
            "learning_rate_scheduler", dict.fromkeys(("KLAdaptiveLR", "KLAdaptiveRL"), "KLAdaptiveLR") | {None: "none"}
        ),
        "learning_rate_scheduler_kwargs": {
            **same("kl_threshold"),
            "min_lr": Only(1e-6),
            "max_lr": Only(1e-2),
            "kl_factor": Only(2),
            "lr_factor": Only(1.5),
            "last_epoch": Only(-1),
            "verbose": Only(False),
        },
        # In version 2 only the critic sees the state; before, the state was the observation.
        "observation_preprocessor": Setting("observation_normalization", _SCALER),
        "state_preprocessor": Setting("observation_normalization", _SCALER, unless="observation_preprocessor"),
        "value_preprocessor": Setting("value_normalization", _SCALER),
        **{f"{of}_preprocessor_kwargs": Only(None, {}) for of in ("observation", "state", "value")},
        "rewards_shaper_scale": Setting("rewards_shaper_scale", null=1.0),
        "rewards_shaper": Only(None, remedy="give rewards_shaper_scale"),
        "kl_threshold": Only(0, remedy="give learning_rate_scheduler KLAdaptiveLR its kl_threshold"),
        "clip_predicted_values": Only(True, remedy="give value_clip 0"),
        "random_timesteps": Only(0),
        "learning_starts": Only(0),
        "mixed_precision": Only(False),
        "experiment": {
            "checkpoint_interval": RunOption("checkpoint_every", in_steps=True, unset=("auto",)),
            **ours("directory", "experiment_name", "write_interval", "store_separately", "wandb", "wandb_kwargs"),
        },
    },
    "trainer": {
        "class": Only("SequentialTrainer"),
        "timesteps": RunOption("max_iterations", in_steps=True),
        **ours("headless", "render_interval", "disable_progressbar", "close_environment_at_exit"),
        **ours("environment_info", "stochastic_evaluation"),
    },
    "motion_dataset": Only(None),
    "reply_buffer": Only(None),
}

MARKS = {"agent", "models", "trainer", "memory"}
"""Top-level keys that identify such a file."""
