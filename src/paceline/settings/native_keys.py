"""What becomes of each key of the libraries' own files. A key that is not here the library does not know either."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEEP = object()
"""Means that a setting stays as it is."""


@dataclass(frozen=True)
class Setting:
    """Becomes a setting of the learner's; several keys of one setting must agree."""

    name: str
    words: Mapping[Any, Any] | None = None
    """What the file may say, and what it means to us; by default any value of the setting's type."""
    null: Any = None
    """What null means, as in `words`; by default it is refused."""
    unless: str = ""
    """Where the file has this key beside it, that one counts."""


@dataclass(frozen=True)
class RunOption:
    """Becomes an option of the run."""

    name: str
    least: int = 1
    """What is below it, such as -1, leaves the choice to the library, and here to Paceline."""
    in_steps: bool = False
    """Counted in steps of each world, where ours are iterations."""
    unset: tuple[str, ...] = ()
    """Words that do the same."""
    setting: str = ""
    """The learner's setting that it becomes too."""


class Only:
    """Paceline supports these values alone, which are what most files have; if there is none, it lacks the thing."""

    def __init__(self, *values: Any, remedy: str = ""):
        self.values, self.remedy = values, remedy


@dataclass(frozen=True)
class Ours:
    """Paceline's own business, so the user is told that it has no effect."""

    note: str = ""


Key = Setting | RunOption | Only | Ours

Group = Mapping[str, Any]
"""Keys by name, or groups of them."""


def _same(*names: str) -> dict[str, Key]:
    """Settings of the same names."""
    return {name: Setting(name) for name in names}


def _ours(*names: str) -> dict[str, Key]:
    return {name: Ours() for name in names}


_NETWORK: Group = {
    "class_name": Only("MLPModel"),
    **_same("hidden_dims", "activation", "obs_normalization"),
    # Of the models with memory or eyes.
    **{name: Only(None) for name in ("rnn_type", "rnn_hidden_dim", "rnn_num_layers", "cnn_cfg")},
}

_RSL_RL: Group = {
    **_same("num_steps_per_env"),
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
        "critic": Ours("the critic sees the group critic where the task has one, and policy otherwise"),
    },
    "actor": {
        **_NETWORK,
        "distribution_cfg": {
            "class_name": Only("GaussianDistribution"),
            **_same("init_std", "std_type"),
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
        **_ours("init_noise_std", "noise_std_type", "state_dependent_std"),
    },
    # Before version 4.
    "policy": {
        "class_name": Only("ActorCritic"),
        "init_noise_std": Setting("init_std"),
        "noise_std_type": Setting("std_type"),
        "state_dependent_std": Only(False),
        **{f"{role}_hidden_dims": Setting("hidden_dims") for role in ("actor", "critic")},
        **{f"{role}_obs_normalization": Setting("obs_normalization") for role in ("actor", "critic")},
        **_same("activation"),
        **{name: Only(None) for name in ("rnn_type", "rnn_hidden_dim", "rnn_num_layers")},
    },
    "algorithm": {
        "class_name": Only("PPO"),
        **_same(
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
    **_ours("experiment_name", "run_name", "logger", "wandb_project", "wandb_tags", "neptune_project", "upload_model"),
    **_ours("log_interval", "resume", "load_run", "load_checkpoint", "device", "check_for_nan"),
}

_MLP: Group = {
    **_same("units", "activation"),
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
    **_same("minibatch_size", "minibatch_size_per_env", "mini_epochs", "learning_rate", "kl_threshold", "clip_value"),
    **_same("normalize_input", "truncate_grads", "grad_norm", "e_clip", "schedule_type"),
    "lr_schedule": _LR_SCHEDULE,
    "mixed_precision": Only(False),
    "weight_decay": Only(0.0),
    "freeze_critic": Only(False),
    "model": {"name": Only("central_value")},
    "network": {
        "name": Only("actor_critic"),
        "central_value": Ours("where the task has the group critic"),
        "mlp": _MLP,
    },
}

_RL_GAMES: Group = {
    "params": {
        "seed": RunOption("seed", least=0),
        **_ours("load_checkpoint", "load_path", "torch_threads"),
        # Isaac Lab's wrapper clips by these.
        "env": {name: Ours("the task sees to it") for name in ("clip_observations", "clip_actions", "obs_groups")}
        | {"concate_obs_groups": Ours()},
        "algo": {"name": Only("a2c_continuous")},
        "model": {"name": Only("continuous_a2c_logstd")},
        "network": {
            "name": Only("actor_critic"),
            **_same("separate"),
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
            **_same(
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
            "clip_actions": Ours("the task sees to it"),
            # Of networks with memory, which are refused above.
            **_ours("seq_length", "seq_len", "bptt_length", "zero_rnn_on_done"),
            **_ours("name", "env_name", "env_config", "env_info", "vec_env", "num_actors", "device", "device_name"),
            **_ours("full_experiment_name", "train_dir", "log_path", "network_path", "features", "player"),
            **_ours("multi_gpu", "torch_compile", "score_to_win", "save_best_after", "print_stats", "games_to_track"),
            **_ours("use_diagnostics", "pbt_idx", "adv_rms_momentum"),
        },
    }
}


def _skrl_model(kind: str, inputs: tuple[str, ...], output: str) -> Group:
    return {
        "class": Only(kind),
        "clip_actions": Only(False),
        "network": {"name": Ours(), "input": Only(*inputs), **_same("layers", "activations")},
        "output": Only(output),
    }


_SCALER = {"RunningStandardScaler": True, None: False}

_SKRL: Group = {
    "seed": RunOption("seed", least=0),
    "models": {
        "separate": Ours("policy and value have layers of their own"),
        "policy": {
            **_skrl_model("GaussianMixin", ("STATES", "OBSERVATIONS"), "ACTIONS"),
            **_same("initial_log_std"),
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
        **_same(
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
        # Its name before version 2, and from then on.
        "lambda": Setting("gae_lambda"),
        "gae_lambda": Setting("gae_lambda"),
        "learning_rate_scheduler": Setting(
            "learning_rate_scheduler", dict.fromkeys(("KLAdaptiveLR", "KLAdaptiveRL"), "KLAdaptiveLR") | {None: "none"}
        ),
        "learning_rate_scheduler_kwargs": {
            **_same("kl_threshold"),
            "min_lr": Only(1e-6),
            "max_lr": Only(1e-2),
            "kl_factor": Only(2),
            "lr_factor": Only(1.5),
            "last_epoch": Only(-1),
            "verbose": Only(False),
        },
        # In version 2 a state is what the critic alone sees; before, it was the observation.
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
            **_ours("directory", "experiment_name", "write_interval", "store_separately", "wandb", "wandb_kwargs"),
        },
    },
    "trainer": {
        "class": Only("SequentialTrainer"),
        "timesteps": RunOption("max_iterations", in_steps=True),
        **_ours("headless", "render_interval", "disable_progressbar", "close_environment_at_exit"),
        **_ours("environment_info", "stochastic_evaluation"),
    },
    "motion_dataset": Only(None),
    "reply_buffer": Only(None),
}

KEYS: dict[str, Group] = {"rsl_rl": _RSL_RL, "rl_games": _RL_GAMES, "skrl": _SKRL}

MARKS = {
    "rl_games": {"params"},
    "skrl": {"agent", "models", "trainer", "memory"},
    "rsl_rl": {"algorithm", "num_steps_per_env", "policy", "actor", "obs_groups", "max_iterations"},
}
"""Keys at the top by which a library's file is known."""
