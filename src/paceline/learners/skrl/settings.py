"""Settings of skrl, under its own names, the same for torch and JAX, and the keys of its configuration files."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.learners.native_keys import Ignored, Keys, Only, RunOption, Setting, ignored, only, same
from paceline.learners.settings import Settings, derived, translated
from paceline.validation import Bounded, LayerWidths, NonNegative, PerIteration, Positive, UnitInterval


@dataclass(frozen=True)
class SkrlSettings(Settings):
    """Settings of skrl's PPO. The defaults suit locomotion."""

    flags: ClassVar[str] = "skrl"
    horizon_field: ClassVar[str] = "rollouts"
    minibatches_field: ClassVar[str] = "mini_batches"
    fixed: ClassVar[tuple[str, ...]] = (
        "layers",
        "activations",
        "initial_log_std",
        "observation_normalization",
        "value_normalization",
    )
    horizon = derived(lambda settings: settings.rollouts)
    minibatches = derived(lambda settings: settings.mini_batches)

    rollouts: PerIteration = translated("horizon")
    learning_epochs: PerIteration = translated("epochs")
    mini_batches: PerIteration = translated("minibatches")
    layers: LayerWidths = translated("hidden_layers")
    activations: Literal["elu", "relu", "tanh"] = translated("activation")
    initial_log_std: Bounded = translated(lambda task: math.log(task.initial_std))
    """Natural logarithm of the initial standard deviation of the action noise."""
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
    grad_norm_clip: Positive = translated("max_gradient_norm")
    observation_normalization: bool = translated("normalize_observations")
    value_normalization: bool = True
    """Normalize values and returns by their running mean and standard deviation."""
    time_limit_bootstrap: bool = True
    """Bootstrap the return of an episode that the time limit ends from the value of its last observation."""
    rewards_shaper_scale: Positive = 1.0
    """Factor of the rewards that the learner receives, above 0. Metrics show the unscaled rewards."""


def _model(kind: str, output: str) -> Keys:
    return {
        "class": Only(kind),
        "clip_actions": Only(False),
        "network": {"name": Ignored(), "input": Only("STATES", "OBSERVATIONS"), **same("layers activations")},
        "output": Only(output),
    }


_SCALER = {"RunningStandardScaler": True, None: False}
_SCHEDULERS = {"KLAdaptiveLR": "KLAdaptiveLR", "KLAdaptiveRL": "KLAdaptiveLR", None: "none"}

NATIVE_KEYS: Keys = {
    "seed": RunOption("seed", minimum=0),
    "models": {
        "separate": Ignored("policy and value have separate layers"),
        "policy": {
            **_model("GaussianMixin", "ACTIONS"),
            **same("initial_log_std"),
            **only(False, "clip_mean_actions fixed_log_std"),
            "clip_log_std": Only(True),
            "min_log_std": Only(-20),
            "max_log_std": Only(2),
            "reduction": Only("sum"),
        },
        "value": _model("DeterministicMixin", "ONE"),
    },
    "memory": {"class": Only("RandomMemory"), "memory_size": Ignored()},
    "agent": {
        "class": Only("PPO"),
        **same("rollouts learning_epochs mini_batches discount_factor gae_lambda learning_rate ratio_clip value_clip"),
        **same("entropy_loss_scale value_loss_scale grad_norm_clip time_limit_bootstrap"),
        # The name before version 2.
        "lambda": Setting("gae_lambda"),
        "learning_rate_scheduler": Setting("learning_rate_scheduler", _SCHEDULERS),
        "learning_rate_scheduler_kwargs": {
            **same("kl_threshold"),
            "min_lr": Only(1e-6),
            "max_lr": Only(1e-2),
            "kl_factor": Only(2),
            "lr_factor": Only(1.5),
            "last_epoch": Only(-1),
            "verbose": Only(False),
        },
        # In version 2 only the critic uses the state; before, the state was the observation.
        "observation_preprocessor": Setting("observation_normalization", _SCALER),
        "state_preprocessor": Setting("observation_normalization", _SCALER, unless="observation_preprocessor"),
        "value_preprocessor": Setting("value_normalization", _SCALER),
        **{f"{data}_preprocessor_kwargs": Only(None, {}) for data in ("observation", "state", "value")},
        "rewards_shaper_scale": Setting("rewards_shaper_scale", null=1.0),
        "rewards_shaper": Only(None, remedy="give rewards_shaper_scale"),
        "kl_threshold": Only(0, remedy="give learning_rate_scheduler KLAdaptiveLR its kl_threshold"),
        "clip_predicted_values": Only(True, remedy="give value_clip 0"),
        **only(0, "random_timesteps learning_starts"),
        "mixed_precision": Only(False),
        "experiment": {
            "checkpoint_interval": RunOption("checkpoint_every", auto=True, in_steps=True),
            **ignored("directory experiment_name write_interval store_separately wandb wandb_kwargs"),
        },
    },
    "trainer": {
        "class": Only("SequentialTrainer"),
        "timesteps": RunOption("max_iterations", in_steps=True),
        **ignored("headless render_interval disable_progressbar close_environment_at_exit environment_info"),
        **ignored("stochastic_evaluation"),
    },
    **only(None, "motion_dataset reply_buffer"),
}
"""All keys of skrl's configuration files."""
