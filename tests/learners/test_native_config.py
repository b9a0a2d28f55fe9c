"""Configuration files of the libraries, as their users have them, and invalid ones."""

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli.train_arguments import parse
from paceline.errors import UserError
from paceline.learners.learner import LEARNERS, settings_of
from paceline.learners.native_config import Native, read
from paceline.learners.native_keys import native_keys, support_table
from paceline.learners.rl_games.settings import RlGamesSettings
from paceline.learners.rsl_rl.settings import RslRlSettings
from paceline.learners.settings import Settings
from paceline.learners.skrl.network_parts import RecurrentSize
from paceline.learners.skrl.settings import SkrlSettings

RSL_RL = """
seed: 42
device: cuda:0
class_name: OnPolicyRunner
num_steps_per_env: 16
max_iterations: 150
save_interval: 50
experiment_name: cartpole_direct
run_name: ''
logger: tensorboard
resume: false
load_run: .*
load_checkpoint: model_.*.pt
clip_actions: null
obs_groups: {actor: [policy], critic: [policy]}
actor:
  class_name: MLPModel
  hidden_dims: [32, 32]
  activation: elu
  obs_normalization: false
  distribution_cfg: {class_name: GaussianDistribution, init_std: 0.5, std_type: log}
critic:
  class_name: MLPModel
  hidden_dims: [32, 32]
  activation: elu
  obs_normalization: false
algorithm:
  class_name: PPO
  value_loss_coef: 1.0
  use_clipped_value_loss: true
  clip_param: 0.2
  entropy_coef: 0.005
  num_learning_epochs: 5
  num_mini_batches: 4
  learning_rate: 1.0e-3
  schedule: adaptive
  gamma: 0.99
  lam: 0.95
  desired_kl: 0.01
  max_grad_norm: 1
  normalize_advantage_per_mini_batch: false
  rnd_cfg: null
  symmetry_cfg: null
"""

OLDER_RSL_RL = """
num_steps_per_env: 16
max_iterations: 150
empirical_normalization: null
actor: {}
critic: {}
obs_groups: {}
store_code_state: false
policy:
  class_name: ActorCritic
  init_noise_std: 0.5
  noise_std_type: log
  actor_obs_normalization: false
  critic_obs_normalization: false
  actor_hidden_dims: [32, 32]
  critic_hidden_dims: [32, 32]
  activation: elu
algorithm: {class_name: PPO, entropy_coef: 0.005, learning_rate: 1e-3}
"""

RL_GAMES = """
params:
  seed: 42
  env: {clip_actions: 1.0}
  algo: {name: a2c_continuous}
  model: {name: continuous_a2c_logstd}
  network:
    name: actor_critic
    separate: False
    space:
      continuous:
        mu_activation: None
        sigma_activation: None
        mu_init: {name: default}
        sigma_init: {name: const_initializer, val: 0}
        fixed_sigma: True
    mlp:
      units: [32, 32]
      activation: elu
      d2rl: False
      initializer: {name: default}
      regularizer: {name: None}
  load_checkpoint: False
  load_path: ''
  config:
    name: cartpole_direct
    env_name: rlgpu
    device: 'cuda:0'
    device_name: 'cuda:0'
    multi_gpu: False
    ppo: True
    mixed_precision: False
    normalize_input: True
    normalize_value: True
    num_actors: -1
    reward_shaper: {scale_value: 0.1}
    normalize_advantage: True
    gamma: 0.99
    tau: 0.95
    learning_rate: 5e-4
    lr_schedule: adaptive
    kl_threshold: 0.008
    score_to_win: 20000
    max_epochs: 150
    save_best_after: 50
    save_frequency: 25
    grad_norm: 1.0
    entropy_coef: 0.0
    truncate_grads: True
    e_clip: 0.2
    horizon_length: 32
    minibatch_size: 16384
    mini_epochs: 8
    critic_coef: 4
    clip_value: True
    seq_length: 4
    bounds_loss_coef: 0.0001
"""

SKRL = """
seed: 42
models:
  separate: False
  policy:
    class: GaussianMixin
    clip_actions: False
    clip_log_std: True
    min_log_std: -20.0
    max_log_std: 2.0
    initial_log_std: 0.0
    network:
      - name: net
        input: OBSERVATIONS
        layers: [32, 32]
        activations: elu
    output: ACTIONS
  value:
    class: DeterministicMixin
    clip_actions: False
    network:
      - name: net
        input: STATES
        layers: [32, 32]
        activations: [elu, elu]
    output: ONE
memory: {class: RandomMemory, memory_size: -1}
agent:
  class: PPO
  rollouts: 32
  learning_epochs: 8
  mini_batches: 8
  discount_factor: 0.99
  lambda: 0.95
  learning_rate: 5.0e-04
  learning_rate_scheduler: KLAdaptiveLR
  learning_rate_scheduler_kwargs: {kl_threshold: 0.008}
  state_preprocessor: RunningStandardScaler
  state_preprocessor_kwargs: null
  value_preprocessor: null
  value_preprocessor_kwargs: null
  random_timesteps: 0
  learning_starts: 0
  grad_norm_clip: 1.0
  ratio_clip: 0.2
  value_clip: 0.2
  clip_predicted_values: True
  entropy_loss_scale: 0.0
  value_loss_scale: 2.0
  kl_threshold: 0.0
  rewards_shaper_scale: 0.1
  time_limit_bootstrap: False
  experiment: {directory: cartpole, experiment_name: '', write_interval: auto, checkpoint_interval: 320}
trainer: {class: SequentialTrainer, timesteps: 4800, environment_info: log}
"""

FILES = {"rsl_rl": RSL_RL, "rl_games": RL_GAMES, "skrl": SKRL, "skrl_jax": SKRL}

RSL_RL_SETTINGS = RslRlSettings(
    num_steps_per_env=16,
    hidden_dims=(32, 32),
    critic_hidden_dims=(32, 32),
    action_space="continuous",
    obs_normalization=False,
    init_std=0.5,
    std_type="log",
)


def write(folder: Path, text: str) -> Path:
    file = folder / "learner.yaml"
    file.write_text(text)
    return file


def changed(text: str, path: str, value: Any) -> str:
    """Return a file with one value changed or added."""
    content = yaml.safe_load(text)
    *above, last = path.split(".")
    group = content
    for name in above:
        group = group[int(name)] if isinstance(group, list) else group.setdefault(name, {})
    group[last] = value
    return yaml.safe_dump(content, sort_keys=False)


def native(learner: str, file: Path, base: Settings | None = None, num_envs: int | None = 4096, **given: Any) -> Native:
    return read(learner, file, base or LEARNERS[learner].settings(), given, num_envs)


def test_a_file_of_rsl_rl_becomes_settings_and_options_of_the_run(tmp_path: Path):
    found = native("rsl_rl", write(tmp_path, RSL_RL))
    assert found.settings == RSL_RL_SETTINGS
    assert found.run == {"max_iterations": 150, "seed": 42, "checkpoint_every": 50}
    assert {"device", "experiment_name", "logger", "resume", "load_run"} <= set(found.ignored)


def test_a_file_of_an_older_rsl_rl_as_isaac_lab_writes_it_gives_the_same_settings(tmp_path: Path):
    found = native("rsl_rl", write(tmp_path, OLDER_RSL_RL))
    assert (found.settings, found.run, found.ignored) == (
        RSL_RL_SETTINGS,
        {"max_iterations": 150},
        ("store_code_state",),
    )


def test_a_file_as_mjlab_writes_it_gives_the_same_settings(tmp_path: Path):
    text = RSL_RL.replace("[32, 32]", "!!python/tuple [32, 32]").replace("[policy]", "!!python/tuple [actor]")
    recurrent = "  rnn_type: null\n  rnn_hidden_dim: 256\n  rnn_num_layers: 1\n  cnn_cfg: null\n  hidden_dims"
    text = text.replace("  hidden_dims", recurrent) + "upload_model: true\nwandb_tags: !!python/tuple []\n"
    found = native("rsl_rl", write(tmp_path, text))
    assert found.settings == RSL_RL_SETTINGS
    assert "actor.rnn_hidden_dim (rnn_type is null and class_name is MLPModel)" in found.ignored


RNN = {"rnn_type": "gru", "rnn_hidden_dim": 64, "rnn_num_layers": 2}


def test_recurrent_models_of_rsl_rl_are_read(tmp_path: Path):
    content, older = yaml.safe_load(RSL_RL), yaml.safe_load(OLDER_RSL_RL)
    models = (
        (content, "actor", "RNNModel"),
        (content, "critic", "RNNModel"),
        (older, "policy", "ActorCriticRecurrent"),
    )
    for file, role, name in models:
        file[role] |= {"class_name": name} | RNN
    for file in (content, older):
        settings = native("rsl_rl", write(tmp_path, yaml.safe_dump(file))).settings
        assert {name: getattr(settings, name) for name in RNN} == RNN
    for file, role, _ in models:
        file[role] = {key: value for key, value in file[role].items() if key not in RNN}
    for file in (content, older):
        settings = native("rsl_rl", write(tmp_path, yaml.safe_dump(file))).settings
        assert (vars(settings)["rnn_type"], vars(settings)["rnn_hidden_dim"]) == ("lstm", 256)


def test_recurrent_networks_of_rl_games_are_read(tmp_path: Path):
    content = yaml.safe_load(RL_GAMES)
    rnn = {"name": "lstm", "units": 64, "layers": 2, "before_mlp": True, "concat_input": True, "layer_norm": True}
    content["params"]["network"]["rnn"] = rnn
    content["params"]["config"]["seq_length"] = 8
    for central, name in (({"rnn": rnn}, "lstm"), ({}, "none")):
        content["params"]["config"]["central_value_config"] = {"network": {"name": "actor_critic"} | central}
        settings = vars(native("rl_games", write(tmp_path, yaml.safe_dump(content))).settings)
        assert {key: settings[f"rnn_{key}"] for key in rnn} == rnn
        assert (settings["seq_length"], settings["central_value_rnn_name"]) == (8, name)


@pytest.mark.parametrize("separate", [True, False])
def test_recurrent_parts_of_skrl_are_read(separate: bool, tmp_path: Path):
    content = yaml.safe_load(changed(SKRL, "models.separate", separate))
    gru = {"name": "gru", "input": "net", "type": "GRU", "layers": [64], "num_layers": 2}
    for role in ("policy", "value"):
        content["models"][role]["network"] = [
            {"name": "net", "input": "STATES", "layers": [32], "activations": "elu"},
            gru,
        ]
    settings = native("skrl", write(tmp_path, yaml.safe_dump(content))).settings
    assert isinstance(settings, SkrlSettings)
    assert (settings.recurrent, settings.separate) == (RecurrentSize("gru", 64, 2), separate)
    for role in ("policy", "value"):
        content["models"][role]["network"] = [gru | {"input": "OBSERVATIONS"}]
    settings = native("skrl", write(tmp_path, yaml.safe_dump(content))).settings
    assert isinstance(settings, SkrlSettings)
    assert settings.recurrent == RecurrentSize("gru", 64, 2)


def test_settings_of_a_recurrent_network_beside_no_type_have_no_effect(tmp_path: Path):
    content = yaml.safe_load(RSL_RL)
    content["actor"] |= RNN | {"rnn_type": None}
    assert vars(native("rsl_rl", write(tmp_path, yaml.safe_dump(content))).settings)["rnn_type"] == "none"


def test_a_file_of_rl_games_becomes_settings_and_options_of_the_run(tmp_path: Path):
    found = native("rl_games", write(tmp_path, RL_GAMES))
    assert found.settings == RlGamesSettings(
        horizon_length=32,
        minibatch_size_per_env=4,
        mini_epochs=8,
        units=(32, 32),
        learning_rate=5e-4,
        kl_threshold=0.008,
        critic_coef=4.0,
        bounds_loss_coef=1e-4,
        action_space="continuous",
        reward_scale=0.1,
        max_epochs=150,
        clip_actions=True,
        action_limit=1.0,
        central_value_rnn_name="none",
    )
    assert type(vars(found.settings)["critic_coef"]) is float
    assert found.run == {"max_iterations": 150, "seed": 42, "checkpoint_every": 25}
    assert {"params.config.score_to_win", "params.config.env_name"} <= set(found.ignored)


@pytest.mark.parametrize("learner", ["skrl", "skrl_jax"])
def test_a_file_of_skrl_becomes_settings_and_options_of_the_run(learner: str, tmp_path: Path):
    found = native(learner, write(tmp_path, SKRL))
    on_torch = learner == "skrl"
    assert found.settings == SkrlSettings(
        separate=not on_torch,
        value_layers=None if on_torch else (32, 32),
        rollouts=32,
        learning_epochs=8,
        mini_batches=8,
        layers=(32, 32),
        learning_rate=5e-4,
        kl_threshold=0.008,
        action_space="continuous",
        value_normalization=False,
        time_limit_bootstrap=False,
        rewards_shaper_scale=0.1,
    )
    # The file counts 4800 steps, 32 per iteration.
    assert found.run == {"max_iterations": 150, "seed": 42, "checkpoint_every": 10}
    shared = "models.value (the value shares the layers of the policy)"
    assert (shared if on_torch else "models.separate (skrl on JAX has no shared layers)") in found.ignored


def test_settings_that_a_file_omits_are_those_of_the_library_and_are_named(tmp_path: Path):
    base = RslRlSettings(gamma=0.5, entropy_coef=0.3, image_channels=(1, 2))
    found = native("rsl_rl", write(tmp_path, "num_steps_per_env: 7\nalgorithm: {lam: 0.9}"), base, clip_param=0.1)
    values = dict(RslRlSettings.library_defaults)
    values |= {"num_steps_per_env": 7, "lam": 0.9, "clip_param": 0.1, "image_channels": (1, 2)}
    assert found.settings == dataclasses.replace(base, **values)
    omitted, replaced = found.notes
    assert "defaults of RSL-RL: hidden_dims [256, 256, 256]" in omitted
    assert "gamma 0.99" in omitted
    assert "lam " not in omitted
    assert "clip_param" not in omitted
    assert replaced == "flags replace its clip_param"


def test_a_constant_standard_deviation_of_rsl_rl_and_its_range_are_read(tmp_path: Path):
    distribution = {"class_name": "GaussianDistribution", "init_std": 0.5, "learn_std": False, "std_range": [0, 0.4]}
    settings = native("rsl_rl", write(tmp_path, changed(RSL_RL, "actor.distribution_cfg", distribution))).settings
    assert isinstance(settings, RslRlSettings)
    assert (settings.learn_std, settings.std_range) == (False, (0.0, 0.4))
    text = changed(RSL_RL, "actor.distribution_cfg", distribution | {"std_range": [0, "wide"]})
    with pytest.raises(UserError, match=r"std_range is \[0, wide\], but must be a list of numbers"):
        native("rsl_rl", write(tmp_path, text))
    distribution["class_name"] = "HeteroscedasticGaussianDistribution"
    with pytest.raises(UserError, match=r"--rsl-rl.no-learn-std with --rsl-rl.state-dependent-std: use only one"):
        native("rsl_rl", write(tmp_path, changed(RSL_RL, "actor.distribution_cfg", distribution)))


def test_a_setting_without_a_default_must_be_in_the_file_or_a_flag(tmp_path: Path):
    file = write(tmp_path, "algorithm: {lam: 0.9}")
    with pytest.raises(UserError, match=r"num_steps_per_env is missing, and RSL-RL has no default for it: add it, or"):
        native("rsl_rl", file)
    assert native("rsl_rl", file, num_steps_per_env=9).settings.horizon == 9


def test_the_defaults_are_those_of_the_installed_libraries():
    from rl_games.common.a2c_common import A2CBase, ContinuousA2CBase
    from rsl_rl.algorithms import PPO
    from rsl_rl.models import MLPModel
    from rsl_rl.modules.distribution import GaussianDistribution
    from skrl.agents.torch.ppo import PPO_CFG
    from skrl.resources.schedulers.torch import KLAdaptiveLR

    def defaults(*kinds: Any) -> dict[str, Any]:
        found = [parameter for kind in kinds for parameter in inspect.signature(kind).parameters.values()]
        return {parameter.name: parameter.default for parameter in found}

    def differing(kind: type[Settings], installed: dict[str, Any]) -> set[str]:
        ours = kind.library_defaults
        assert len(ours.keys() & installed.keys()) > 6
        return {name for name in ours.keys() & installed.keys() if ours[name] != installed[name]}

    assert not differing(RslRlSettings, defaults(PPO, MLPModel, GaussianDistribution))
    skrl = vars(PPO_CFG()) | {"kl_threshold": defaults(KLAdaptiveLR)["kl_threshold"]}
    assert differing(SkrlSettings, skrl) == {"learning_rate_scheduler"}
    assert [skrl[f"{name}_preprocessor"] for name in ("observation", "value")] == [None, None]
    assert skrl["learning_rate_scheduler"] is None
    source = inspect.getsource(A2CBase) + inspect.getsource(ContinuousA2CBase)
    read_with = re.findall(r"""config\.get\('(\w+)', ([-\w']+)\)""", source)
    # 0 and null mean the same to RL-Games.
    rl_games = {name: yaml.safe_load(value.lower().replace("none", "0")) for name, value in read_with}
    assert not differing(RlGamesSettings, rl_games)


def test_auto_null_and_negative_values_leave_options_unset(tmp_path: Path):
    text = changed(changed(SKRL, "agent.experiment.checkpoint_interval", "auto"), "seed", None)
    assert native("skrl", write(tmp_path, text)).run == {"max_iterations": 150}
    text = changed(changed(RL_GAMES, "params.config.max_epochs", -1), "params.seed", 0)
    assert native("rl_games", write(tmp_path, text)).run == {"seed": 0, "checkpoint_every": 25}


def test_an_observation_preprocessor_takes_precedence_over_a_state_preprocessor(tmp_path: Path):
    text = changed(changed(SKRL, "agent.observation_preprocessor", None), "agent.gae_lambda", 0.95)
    found = native("skrl", write(tmp_path, text))
    assert vars(found.settings)["observation_normalization"] is False
    assert "agent.state_preprocessor" in found.ignored


def test_a_central_value_network_has_its_own_settings(tmp_path: Path):
    central = {"minibatch_size": 32768, "mini_epochs": 4, "learning_rate": "5e-4", "lr_schedule": "adaptive"}
    central |= {"normalize_input": True, "kl_threshold": 0.016, "clip_value": False, "truncate_grads": True}
    central["network"] = {
        "name": "actor_critic",
        "central_value": True,
        "mlp": {"units": [64, 32], "activation": "relu"},
    }
    found = native("rl_games", write(tmp_path, changed(RL_GAMES, "params.config.central_value_config", central)))
    assert found.settings == dataclasses.replace(
        native("rl_games", write(tmp_path, RL_GAMES)).settings,  # pyright: ignore[reportArgumentType]
        central_value_units=(64, 32),
        central_value_activation="relu",
        central_value_mini_epochs=4,
        central_value_minibatch_size_per_env=8,
        central_value_learning_rate=5e-4,
        central_value_lr_schedule="none",
        central_value_clip_value=False,
        central_value_normalize_input=True,
        central_value_truncate_grads=True,
    )


def test_convolutions_of_rl_games_become_settings_of_the_image_encoder(tmp_path: Path):
    convs = [
        {"filters": 32, "kernel_size": 8, "strides": 4, "padding": 0},
        {"filters": 64, "kernel_size": 4, "strides": 2},
    ]
    cnn = {"type": "conv2d", "activation": "relu", "initializer": {"name": "default"}, "convs": convs}
    found = vars(native("rl_games", write(tmp_path, changed(RL_GAMES, "params.network.cnn", cnn))).settings)
    expected = {"image_channels": (32, 64), "image_kernels": (8, 4), "image_strides": (4, 2), "image_features": 0}
    assert {name: found[name] for name in expected} == expected
    assert found["image_activation"] == "relu"
    convs[1]["padding"] = 1
    with pytest.raises(UserError, match=r"cnn.convs\[1\].padding is 1: Paceline supports only 0"):
        native("rl_games", write(tmp_path, changed(RL_GAMES, "params.network.cnn", cnn)))


def test_a_network_of_several_parts_becomes_one_setting(tmp_path: Path):
    parts = [
        {"name": "a", "input": "OBSERVATIONS[0]", "layers": [16], "activations": "elu"},
        {"name": "net", "input": "a + a", "layers": [], "activations": []},
    ]
    found = vars(native("skrl", write(tmp_path, changed(SKRL, "models.policy.network", parts))).settings)
    assert yaml.safe_load(found["network"]) == parts


def test_the_initial_standard_deviation_of_rl_games_is_read(tmp_path: Path):
    text = changed(RL_GAMES, "params.network.space.continuous.sigma_init.val", -2)
    assert vars(native("rl_games", write(tmp_path, text)).settings)["sigma_init_val"] == -2.0


def test_population_based_training_must_be_disabled(tmp_path: Path):
    text = changed(RL_GAMES, "pbt", {"enabled": False, "num_policies": 8, "mutation": {"gamma": "mutate_discount"}})
    assert native("rl_games", write(tmp_path, text)).settings == native("rl_games", write(tmp_path, RL_GAMES)).settings
    with pytest.raises(UserError, match=r"pbt.enabled is true: Paceline supports only false"):
        native("rl_games", write(tmp_path, changed(text, "pbt.enabled", True)))


@pytest.mark.parametrize("per_env", [1, 2, 16, 32])
def test_minibatch_size_is_divided_by_the_number_of_envs(per_env: int, tmp_path: Path):
    found = native("rl_games", write(tmp_path, RL_GAMES), num_envs=16384 // per_env)
    assert vars(found.settings)["minibatch_size_per_env"] == per_env


@pytest.mark.parametrize(("num_envs", "near"), [(256, 32), (3000, 4), (100_000, 1)])
def test_a_minibatch_that_does_not_fit_the_envs_is_rounded_with_a_note(num_envs: int, near: int, tmp_path: Path):
    found = native("rl_games", write(tmp_path, RL_GAMES), num_envs=num_envs)
    assert vars(found.settings)["minibatch_size_per_env"] == near
    assert f"params.config.minibatch_size 16384 is not {num_envs} envs times a divisor" in found.notes[-1]
    assert f"rounded to {near * num_envs} (--rl-games.minibatch-size-per-env {near})" in found.notes[-1]


def test_minibatch_size_without_a_number_of_envs_is_rejected(tmp_path: Path):
    with pytest.raises(UserError, match=r"minibatch_size 16384 with --total-envs: give --rl-games.minibatch-size-per"):
        native("rl_games", write(tmp_path, RL_GAMES), num_envs=None)


ONLY = "Paceline supports only"
BAD = [
    ("rsl_rl", "num_step_per_env", 3, "unknown key 'num_step_per_env': did you mean 'num_steps_per_env'"),
    ("rsl_rl", "algorithm.gama", 3, "unknown key 'gama': did you mean 'gamma'"),
    ("rsl_rl", "algorithm.gamma", "high", "is high, but must be a number"),
    ("rsl_rl", "algorithm.lam", None, "is null, but must be a number"),
    ("rsl_rl", "algorithm", 3, "is 3, but must be a group of keys"),
    ("rsl_rl", "num_steps_per_env", 1.5, "is 1.5, but must be a whole number"),
    ("rsl_rl", "max_iterations", "many", "is many, but must be a whole number"),
    ("rsl_rl", "actor.activation", "mish", "is mish, but must be one of elu, relu"),
    ("rsl_rl", "algorithm.rnd_cfg", {"weight": 1.0}, f"is {{weight: 1.0}}: {ONLY} null"),
    ("rsl_rl", "algorithm.symmetry_cfg", {"use": True}, f"is {{use: true}}: {ONLY} null"),
    ("rsl_rl", "actor.class_name", "CNNModel", "is CNNModel, but must be one of MLPModel, RNNModel"),
    ("rsl_rl", "critic.class_name", "RNNModel", "is lstm, but actor.class_name is none: Paceline has one value"),
    ("rsl_rl", "actor.rnn_type", "rnn", "is rnn, but must be one of lstm, gru"),
    ("rsl_rl", "clip_actions", "much", "is much, but must be a number"),
    ("rsl_rl", "critic.activation", "relu", "is relu, but actor.activation is elu: Paceline has one value for both"),
    ("rl_games", "params.config.reward_shaper.scale", 1, "unknown key 'scale': did you mean 'scale_value'"),
    ("rl_games", "params.config.gamma", True, "is true, but must be a number"),
    ("rl_games", "params.network.mlp.units", ["a"], "is [a], but must be a list of whole numbers"),
    (
        "rl_games",
        "params.network.rnn",
        {"name": "identity", "units": 8, "layers": 1},
        ".name is identity, but must be one of lstm, gru",
    ),
    ("rl_games", "params.network.cnn.type", "conv1d", "is conv1d, but must be one of conv2d"),
    ("rl_games", "params.algo.name", "sac", "is sac, but must be one of a2c_continuous, a2c_discrete"),
    (
        "rl_games",
        "params.model.name",
        "discrete_a2c",
        "is discrete, but params.algo.name is continuous: Paceline has one value for both",
    ),
    ("rl_games", "params.network.space.discrete", {"a": 1}, "is {a: 1}, but must be null"),
    ("skrl", "models.policy.class", "DeterministicMixin", "but must be one of GaussianMixin, CategoricalMixin"),
    ("skrl", "models.policy.network.0.layer", [64], "unknown key 'layer': did you mean 'layers'"),
    ("skrl", "models.policy.network.0.activations", ["elu", "relu"], "is [elu, relu], but must be one of elu"),
    ("skrl", "models.policy.output", "ONE", f"is ONE: {ONLY} ACTIONS"),
    ("skrl", "agent.time_limit_bootstrap", 3, "is 3, but must be true or false"),
    ("skrl", "agent.learning_rate_scheduler", "StepLR", "is StepLR, but must be one of KLAdaptiveLR"),
    ("skrl", "agent.kl_threshold", 0.01, f"is 0.01: {ONLY} 0; give learning_rate_scheduler KLAdaptiveLR"),
    ("skrl", "agent.class", "SAC", f"is SAC: {ONLY} PPO"),
]


@pytest.mark.parametrize(("learner", "path", "value", "message"), BAD)
def test_an_unsupported_value_is_rejected_with_its_path(
    learner: str, path: str, value: Any, message: str, tmp_path: Path
):
    native(learner, write(tmp_path, FILES[learner]))
    with pytest.raises(UserError) as error:
        native(learner, write(tmp_path, changed(FILES[learner], path, value)))
    assert f"learner.yaml: {path.replace('.0', '')}" in str(error.value)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_all_problems_of_a_file_are_named_in_one_line_and_the_most_important_first(tmp_path: Path):
    text = changed(changed(RSL_RL, "sed", 3), "algorithm.gamma", "high")
    text = changed(changed(text, "algorithm.rnd_cfg", {"weight": 1}), "num_steps_per_env", {})
    with pytest.raises(UserError) as error:
        native("rsl_rl", write(tmp_path, text))
    found = str(error.value)
    assert "learner.yaml has 4 values that cannot be used: (1) algorithm.rnd_cfg is" in found
    assert "; (2) algorithm.gamma is high" in found
    assert "; (3) num_steps_per_env is missing" in found
    assert "; (4) sed: unknown key 'sed': did you mean 'seed'" in found
    assert len(found.splitlines()) == 1


@pytest.mark.parametrize("name", ["AMP", "MAPPO", "IPPO", "SAC"])
def test_a_file_of_another_algorithm_is_refused_by_its_name_alone(name: str, tmp_path: Path):
    text = changed(changed(SKRL, "agent.class", name), "agent.style_reward_weight", 1.0)
    with pytest.raises(UserError, match=f"learner.yaml: agent.class is {name}: Paceline supports only PPO$"):
        native("skrl", write(tmp_path, text))


def test_the_docs_list_the_supported_values_of_the_tables():
    docs = (Path(__file__).parents[2] / "docs" / "config_files.md").read_text()
    for learner in ("rsl_rl", "rl_games", "skrl"):
        table = support_table(learner)
        assert f"\n{table}\n" in docs, f"the table of {learner} in docs/config_files.md must be:\n{table}"


def test_a_value_out_of_bounds_is_rejected_with_the_file(tmp_path: Path):
    file = write(tmp_path, changed(RSL_RL, "algorithm.gamma", 1.5))
    with pytest.raises(UserError, match=r"learner.yaml, combined with the flags: --rsl-rl.gamma 1.5 must be at most 1"):
        native("rsl_rl", file)
    native("rsl_rl", file, gamma=0.9)


@pytest.mark.parametrize("learner", ["ppo", *FILES])
@pytest.mark.parametrize("other", ["rsl_rl", "rl_games", "skrl"])
def test_a_file_of_another_library_is_recognized(learner: str, other: str, tmp_path: Path):
    if other == learner.removesuffix("_jax"):
        return
    with pytest.raises(UserError, match=f"is a file of {other}, by its key '.*': use --learner {other}"):
        native(learner, write(tmp_path, FILES[other]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read --learner-config .*learner.yaml: No such file"),
        (b"a: [1", "is not plain YAML: .*line 1"),
        (b"a: !!python/name:os.system", "is not plain YAML: could not determine a constructor"),
        (b"a: !!python/object/apply:os.system [x]", "is not plain YAML: could not determine a constructor"),
        (b"\xff\xfe\xfa", "is not a text file"),
        (b"just words", "is not a configuration: it holds no keys"),
        (b"", "is not a configuration: it holds no keys"),
    ],
)
def test_a_file_that_cannot_be_read_is_rejected_in_one_line(content: bytes | None, message: str, tmp_path: Path):
    file = tmp_path / "learner.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        native("rsl_rl", file)
    assert len(str(error.value).splitlines()) == 1


def test_the_native_learner_has_no_file(tmp_path: Path):
    with pytest.raises(UserError, match="--learner ppo: choose from rsl_rl, rl_games, skrl"):
        native("ppo", write(tmp_path, "horizon: 3"))


def names(of: Any, *without: str) -> set[str]:
    return set(inspect.signature(of).parameters) - {"self", *without}


def test_the_keys_of_rsl_rl_are_those_of_the_installed_one():
    from rsl_rl.algorithms import PPO
    from rsl_rl.models import CNNModel, MLPModel, RNNModel
    from rsl_rl.modules.distribution import GaussianDistribution

    keys, made = native_keys("rsl_rl"), ("obs", "obs_groups", "obs_set", "output_dim")
    algorithm = names(PPO, "actor", "critic", "storage", "device", "multi_gpu_cfg")
    # share_cnn_encoders is taken out before the constructor.
    assert keys["algorithm"].keys() == algorithm | {"class_name", "share_cnn_encoders"}
    for role in ("actor", "critic"):
        known = keys[role].keys() - {"class_name", "stochastic", "init_noise_std", "noise_std_type"}
        of_models = names(MLPModel, *made) | names(RNNModel, *made) | names(CNNModel, *made, "cnns")
        assert known - {"state_dependent_std"} == of_models
    assert keys["actor"]["distribution_cfg"].keys() - {"class_name"} == names(GaussianDistribution, "output_dim")


def test_the_keys_of_skrl_are_those_of_the_installed_one():
    from skrl.agents.torch import ExperimentCfg
    from skrl.agents.torch.ppo import PPO_CFG
    from skrl.resources.schedulers.torch import KLAdaptiveLR
    from skrl.trainers.torch import SequentialTrainerCfg
    from skrl.utils.model_instantiators.torch import (
        categorical_model,
        deterministic_model,
        gaussian_model,
        multicategorical_model,
    )

    def fields(kind: type) -> set[str]:
        return {field.name for field in dataclasses.fields(kind)}

    keys, made = (
        native_keys("skrl"),
        ("observation_space", "state_space", "action_space", "device", "return_source"),
    )
    of_version_1 = {"lambda", "clip_predicted_values", "random_timesteps", "learning_starts"}
    assert keys["agent"].keys() - {"class", "rewards_shaper_scale"} == fields(PPO_CFG) | of_version_1
    assert keys["agent"]["experiment"].keys() == fields(ExperimentCfg)
    assert keys["agent"]["learning_rate_scheduler_kwargs"].keys() == names(KLAdaptiveLR, "optimizer")
    assert keys["trainer"].keys() - {"class"} == fields(SequentialTrainerCfg)
    policies = (gaussian_model, categorical_model, multicategorical_model)
    assert keys["models"]["policy"].keys() - {"class"} == {key for model in policies for key in names(model, *made)}
    assert keys["models"]["value"].keys() - {"class"} == names(deterministic_model, *made)


def test_the_keys_of_rl_games_are_those_that_the_installed_one_reads():
    from rl_games.algos_torch.a2c_continuous import A2CAgent
    from rl_games.algos_torch.a2c_discrete import DiscreteA2CAgent
    from rl_games.algos_torch.central_value import CentralValueTrain
    from rl_games.algos_torch.network_builder import A2CBuilder
    from rl_games.common.a2c_common import A2CBase, ContinuousA2CBase, DiscreteA2CBase
    from rl_games.common.tr_helpers import DefaultRewardsShaper

    def read_by(*kinds: Any, of: str) -> set[str]:
        source = "".join(inspect.getsource(kind) for kind in kinds)
        return set(re.findall(rf"""\b{of}(?:\.get\(|\[)['"](\w+)['"]""", source))

    keys = native_keys("rl_games")["params"]
    agents = (A2CBase, ContinuousA2CBase, A2CAgent, DiscreteA2CBase, DiscreteA2CAgent)
    # "network" is put there by the library itself.
    assert read_by(*agents, of="config") - {"network"} <= keys["config"].keys()
    central = keys["config"]["central_value_config"].keys() | {"device", "print_stats"}
    assert read_by(CentralValueTrain, of="config") <= central
    network = read_by(A2CBuilder, of="params")
    assert "separate" in network
    assert network <= keys["network"].keys()
    assert keys["config"]["reward_shaper"].keys() == names(DefaultRewardsShaper)


def test_flags_take_precedence_over_the_file_and_the_file_over_the_task(tmp_path: Path):
    argv = ["cartpole", "--gpu-ids", "none", "--learner", "rsl_rl", "--learner_config", str(write(tmp_path, RSL_RL))]
    config = parse([*argv, "--rsl-rl.lam=0.5", "--rsl_rl.num_learning_epochs", "3", "--seed", "7"]).config
    expected = dataclasses.replace(RSL_RL_SETTINGS, lam=0.5, num_learning_epochs=3)
    assert settings_of("rsl_rl", config.settings) == expected
    assert (config.seed, config.max_iterations, config.checkpoint_every) == (7, 150, 50)


def test_flags_decide_what_a_minibatch_must_fit(tmp_path: Path):
    file = str(write(tmp_path, RL_GAMES))
    argv = ["cartpole", "--gpu-ids", "none", "--learner", "rl_games", "--learner-config", file]
    commands = [
        parse([*argv, *more])
        for more in (
            ["--num-envs", "1024"],
            ["--rl-games.minibatch-size-per-env", "8"],
            ["--rl-games.horizon-length", "64"],
            ["--num-envs", "16"],
        )
    ]
    settings = [settings_of("rl_games", command.config.settings) for command in commands]
    assert [(each.horizon, each.minibatches) for each in settings] == [(32, 2), (32, 4), (64, 1), (32, 1)]
    assert [sum("rounded to 512" in note for note in command.notes) for command in commands] == [0, 0, 0, 1]


def test_a_file_with_a_run_to_resume_is_rejected(tiny_run: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"--learner-config file.yaml with --resume: the run has its settings"):
        parse(["--resume", str(tiny_run), "--learner-config", "file.yaml"])


def test_a_run_trains_with_the_horizon_of_the_file_and_lists_ignored_keys(tmp_path: Path):
    write(tmp_path, RSL_RL)
    argv = ["--learner", "rsl_rl", "--learner-config", "learner.yaml", "--gpu-ids", "none", "--num-envs", "8"]
    command = [
        sys.executable,
        "-m",
        "paceline",
        "train",
        "cartpole",
        *argv,
        "--max-iterations",
        "2",
        "--run-dir",
        "run",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second, *_ = done.stdout.splitlines()
    assert first.startswith("learner.yaml: it omits these settings, which have the defaults of RSL-RL: std_range ")
    assert re.match("learner.yaml: Paceline itself sets .*experiment_name.*device", second)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["iterations"], result["env_steps"]) == (2, 2 * 16 * 8)
