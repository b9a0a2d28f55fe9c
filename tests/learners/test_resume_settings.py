"""Settings that are changed when a run is resumed take effect, or are refused by name: each setting of each learner."""

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
import torch
from rich.console import Console

from paceline.errors import UserError
from paceline.learners.learner import LEARNERS, settings_of
from paceline.learners.ppo.settings import PpoSettings
from paceline.learners.rl_games.settings import RlGamesSettings
from paceline.learners.rsl_rl.settings import RslRlSettings
from paceline.learners.settings import Settings
from paceline.learners.skrl.settings import SkrlSettings
from paceline.run import checkpoint
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.train import train

# Values and gradients are not clipped, so that every weight in the loss can be seen.
SKRL = SkrlSettings(rollouts=8, learning_epochs=2, mini_batches=2, layers=(8,), value_clip=0.0, grad_norm_clip=100.0)
SETTINGS: dict[str, Settings] = {
    "ppo": PpoSettings(horizon=8, epochs=2, minibatches=2, hidden=(8,), max_gradient_norm=100.0),
    "rsl_rl": RslRlSettings(
        num_steps_per_env=8, num_learning_epochs=2, num_mini_batches=2, hidden_dims=(8,), max_grad_norm=100.0
    ),
    "rl_games": RlGamesSettings(
        horizon_length=8, minibatch_size_per_env=4, mini_epochs=2, units=(8,), normalize_value=False, grad_norm=100.0
    ),
    "skrl": SKRL,
    "skrl_jax": SKRL,
}

_SKRL_CHANGES: dict[str, Any] = {
    "sequence_length": 2,
    "rollouts": 4,
    "learning_epochs": 1,
    "mini_batches": 4,
    "learning_rate": 1e-4,
    "learning_rate_scheduler": "none",
    "kl_threshold": 1e-6,
    "discount_factor": 0.5,
    "gae_lambda": 0.5,
    "ratio_clip": 1e-4,
    "value_clip": 1e-3,
    "entropy_loss_scale": 0.1,
    "value_loss_scale": 0.5,
    "grad_norm_clip": 1e-3,
    "time_limit_bootstrap": False,
    "rewards_shaper_scale": 0.1,
    "mixed_precision": True,
}
CHANGES: dict[str, dict[str, Any]] = {
    "ppo": {
        "horizon": 4,
        "epochs": 1,
        "minibatches": 4,
        "learning_rate": 1e-4,
        "desired_kl": 1e-6,
        "discount": 0.5,
        "gae_lambda": 0.5,
        "clip": 1e-4,
        "clip_value": False,
        "value_weight": 0.5,
        "entropy_weight": 0.5,
        "max_gradient_norm": 1e-3,
    },
    "rsl_rl": {
        "num_steps_per_env": 4,
        "num_learning_epochs": 1,
        "num_mini_batches": 4,
        "learning_rate": 1e-4,
        "schedule": "fixed",
        "desired_kl": 1e-6,
        "gamma": 0.5,
        "lam": 0.5,
        "clip_param": 1e-4,
        "use_clipped_value_loss": False,
        "value_loss_coef": 0.5,
        "entropy_coef": 0.5,
        "max_grad_norm": 1e-3,
        "normalize_advantage_per_mini_batch": True,
        "use_mixed_precision": True,
        "clip_actions": 0.1,
        "std_range": (0.1, 0.2),
    },
    "rl_games": {
        "horizon_length": 4,
        "minibatch_size_per_env": 2,
        "mini_epochs": 1,
        "normalize_advantage": False,
        "value_bootstrap": False,
        "learning_rate": 1e-4,
        "lr_schedule": "none",
        "schedule_type": "standard",
        "kl_threshold": 1e-6,
        "max_epochs": 30,
        "gamma": 0.5,
        "tau": 0.5,
        "e_clip": 1e-4,
        "clip_value": False,
        "critic_coef": 0.5,
        "entropy_coef": 0.5,
        "bounds_loss_coef": 1.0,
        "grad_norm": 1e-3,
        "truncate_grads": False,
        "reward_scale": 0.1,
        "clip_actions": True,
        "action_limit": 0.1,
        "clip_observations": 0.01,
        "seq_length": 2,
    },
    "skrl": _SKRL_CHANGES,
    "skrl_jax": _SKRL_CHANGES,
}
# Settings that show only together with others: a value that is clipped, a schedule that is followed.
WITH: dict[tuple[str, str], dict[str, Any]] = {
    ("ppo", "clip_value"): {"clip": 1e-3},
    ("rsl_rl", "schedule"): {"desired_kl": 1e-6},
    ("rsl_rl", "use_clipped_value_loss"): {"clip_param": 1e-3},
    ("rl_games", "clip_value"): {"e_clip": 1e-3},
    # The task clips actions to -1 to 1 itself.
    ("rl_games", "clip_actions"): {"action_limit": 0.1},
    ("rl_games", "seq_length"): {"rnn_name": "lstm", "rnn_units": 8},
    ("skrl", "sequence_length"): {"rnn_type": "gru", "rnn_hidden_size": 8},
    ("rl_games", "truncate_grads"): {"grad_norm": 1e-3},
    ("rl_games", "max_epochs"): {"lr_schedule": "linear", "max_epochs": 10},
    # Actions beyond 1.1 are penalized; a policy that learns very fast has some.
    ("rl_games", "bounds_loss_coef"): {"lr_schedule": "none", "learning_rate": 0.5},
}
# They have no effect on the task of these tests: tests/learners/ppo/test_images.py and test_file_settings.py test them.
# Mixed precision of RL-Games has no effect on a CPU.
TESTED_ELSEWHERE = {
    "ppo": ("image_learning_rate",),
    "rl_games": (
        "mixed_precision",
        *("central_value_learning_rate", "central_value_lr_schedule", "central_value_mini_epochs"),
        *("central_value_minibatch_size_per_env", "central_value_clip_value", "central_value_truncate_grads"),
    ),
}
# JAX compiles for seconds after every change; skrl on torch has the same settings and is tested with all of them.
JAX_CHANGES = ("learning_rate", "learning_rate_scheduler", "discount_factor", "ratio_clip")

CASES = [
    (learner, name)
    for learner, changes in CHANGES.items()
    for name in changes
    if learner != "skrl_jax" or name in JAX_CHANGES
]


def run(path: Path, learner: str, settings: Any, iterations: int, resume: bool, **changes: Any) -> dict[str, Any]:
    """Train, or resume from the newest checkpoint, and return the learner's state after the last iteration."""
    config = TrainConfig(
        "cartpole",
        {"episode_seconds": 0.4},
        learner,
        asdict(settings),
        num_envs=6,
        max_iterations=iterations,
        logger=("none",),
    )
    directory = RunDir(path)
    resume_from = checkpoint.newest(directory.checkpoints) if resume else None
    train(dataclasses.replace(config, **changes), directory, Console(quiet=True), resume_from)
    return checkpoint.load(checkpoint.newest(directory.checkpoints))["learner"]


def differ(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return any(differ(one[name], other[name]) for name in one)
    return not torch.equal(one, other) if isinstance(one, torch.Tensor) else one != other


@pytest.mark.parametrize("learner", LEARNERS)
def test_every_setting_is_decided(learner: str):
    kind = LEARNERS[learner].settings
    names = {field.name for field in dataclasses.fields(kind)}
    assert names == {*CHANGES[learner], *kind.fixed, *TESTED_ELSEWHERE.get(learner, ())}
    assert set(kind.fixed).isdisjoint(CHANGES[learner])


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Settings], tuple[Path, dict[str, Any]]]:
    """A function that returns a run of two iterations, which tests must not change, and the learner's state after two
    more iterations with the same settings."""

    @cache
    def train_once(learner: str, settings: Settings) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp(learner)
        run(folder / "run", learner, settings, 2, resume=False)
        shutil.copytree(folder / "run", folder / "same")
        return folder / "run", run(folder / "same", learner, settings, 4, resume=True)

    return train_once


@pytest.mark.parametrize(("learner", "name"), CASES)
def test_a_changed_setting_takes_effect(learner: str, name: str, unchanged: Any, tmp_path: Path):
    settings = dataclasses.replace(SETTINGS[learner], **WITH.get((learner, name), {}))  # pyright: ignore[reportArgumentType]
    start, same = unchanged(learner, settings)
    shutil.copytree(start, tmp_path / "changed")
    changed = dataclasses.replace(settings, **{name: CHANGES[learner][name]})
    assert differ(same["networks"], run(tmp_path / "changed", learner, changed, 4, resume=True)["networks"])
    assert settings_of(learner, RunDir(tmp_path / "changed").config().settings) == changed


@pytest.mark.parametrize("learner", LEARNERS)
def test_a_setting_that_cannot_change_is_rejected_by_name(learner: str, tmp_path: Path):
    settings = SETTINGS[learner]
    run(tmp_path / "run", learner, settings, 1, resume=False)
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    for name in settings.fixed:
        value = getattr(settings, name)
        texts = {
            "elu": "tanh",
            "any": "continuous",
            "scalar": "log",
            "flatten": "spatial_softmax",
            "policy": "targets",
            "bfloat16": "float32",
            "": "[{name: net, layers: [9]}]",
            "none": "lstm",
        }
        optional = {"activation": "tanh", "normalize_input": True, "rnn_name": "lstm"}
        of_none = next((other for end, other in optional.items() if name.endswith(end)), (9,))
        others = {bool: not value, tuple: (9,), str: texts.get(value), float: 0.5, int: 9, NoneType: of_none}
        other = others[type(value)]
        changed = dataclasses.replace(settings, **{name: other})  # pyright: ignore[reportArgumentType]
        with pytest.raises(UserError, match=f"--{settings.flags}.{name.replace('_', '-')} .* with --resume"):
            run(tmp_path / "run", learner, changed, 2, resume=True)
    assert {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("learner", LEARNERS)
def test_a_new_learning_rate_replaces_the_adapted_one(learner: str, tmp_path: Path):
    """Without adaptation the run continues with it; if the run is resumed again without a change, it stays."""
    fixed = {"ppo": {"desired_kl": 0.0}, "rsl_rl": {"schedule": "fixed"}, "rl_games": {"lr_schedule": "none"}}
    constant = fixed.get(learner, {"learning_rate_scheduler": "none"})
    run(tmp_path / "run", learner, SETTINGS[learner], 2, resume=False)
    new = dataclasses.replace(SETTINGS[learner], learning_rate=3e-4, **constant)  # pyright: ignore[reportArgumentType]
    for iterations in (3, 4):
        assert rate(run(tmp_path / "run", learner, new, iterations, resume=True)) == pytest.approx(3e-4)


def rate(state: dict[str, Any]) -> float:
    """Return the learning rate in a learner's state; the adapters of two libraries have several optimizers."""
    if "adam" in state:
        return float(state["adam"]["learning_rate"])
    found = state["optimizers"]["model"] if "optimizers" in state else state["optimizer"]
    value = found["learning_rate"]
    return float(value[0] if isinstance(value, list) else value)


def test_a_changed_seed_takes_effect(unchanged: Any, tmp_path: Path):
    start, same = unchanged("ppo", SETTINGS["ppo"])
    shutil.copytree(start, tmp_path / "changed")
    changed = run(tmp_path / "changed", "ppo", SETTINGS["ppo"], 4, resume=True, seed=9)
    assert differ(same["networks"], changed["networks"])
