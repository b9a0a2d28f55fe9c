"""Configuration of RL-Games' agents from the settings of the learner, and the env in the form that they take."""

from dataclasses import asdict
from typing import Any

import torch
from gymnasium.spaces import Box, Discrete, Tuple
from rl_games.algos_torch.model_builder import register_network
from rl_games.algos_torch.network_builder import A2CBuilder
from rl_games.algos_torch.torch_ext import torch_to_numpy_dtype_dict
from rl_games.common.algo_observer import AlgoObserver
from torch import Tensor

from paceline.env.vec_env import ActionSpec, VecEnv
from paceline.errors import UserError
from paceline.learners.encoders import feature_map_size, images_of, num_channels
from paceline.learners.image_packing import ImagePacking
from paceline.learners.rl_games.recurrent import rnn_parameters
from paceline.learners.rl_games.settings import RlGamesSettings
from paceline.learners.rollout import RolloutEnv, vector_widths
from paceline.learners.settings import refuse, refuse_recurrent

# Name of the network for images in the registry of RL-Games.
_IMAGE_NETWORK = "paceline_images"


class _ImageBuilder(A2CBuilder):
    """Builds the network of RL-Games for images that the agent has scaled."""

    def build(self, name: str, **options: Any) -> A2CBuilder.Network:
        return super().build(name, **options | {"input_shape": self.params["cnn"]["input_shape"]})


class _VecEnv:
    """Adapts a `RolloutEnv` to the interface that the agent calls."""

    def __init__(self, rollout_env: RolloutEnv, images: ImagePacking | None, config: RlGamesSettings):
        self._rollout_env, self._images = rollout_env, images
        self._action_limit = None if rollout_env.actions.choices else config.action_limit
        self._obs_limit = config.clip_observations

    def reset(self) -> dict[str, Tensor]:
        """Return the latest observations: the agent calls this once per iteration, and episodes continue."""
        return self._renamed(self._rollout_env.obs)

    def step(self, actions: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, dict[str, Tensor]]:
        # Discrete actions with one column are [env].
        actions, limit = actions.view(self._rollout_env.env.num_envs, -1), self._action_limit
        step = self._rollout_env.step(actions.clamp(-limit, limit) if limit else actions)
        return self._renamed(step.obs), step.reward, step.terminated | step.truncated, {"time_outs": step.truncated}

    def set_train_info(self, *_: Any) -> None: ...

    def _renamed(self, obs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the observations under the names that RL-Games gives them."""
        if limit := self._obs_limit:
            obs = {name: each.clamp(-limit, limit) if each.dim() == 2 else each for name, each in obs.items()}
        states = {"states": obs["critic"]} if "critic" in obs else {}
        return states | {"obs": self._images.pack(obs) if self._images else obs["policy"]}


def pack_images(env: VecEnv) -> ImagePacking | None:
    images = images_of(env)
    if images and "policy" in env.observation_spec:
        raise UserError(
            f'learner rl_games does not use the observation groups "policy" and {", ".join(images)} together: its '
            "network takes a vector or an image; use one of the learners ppo, rsl_rl, skrl and skrl_jax"
        )
    return ImagePacking(images) if images else None


def _image_network(images: ImagePacking, config: RlGamesSettings) -> dict[str, Any]:
    """Return the keys by which the network for images differs from the one for vectors."""
    # RL-Games has a spatial softmax, but exchanges height and width.
    refuse(config, "image_pooling", "spatial_softmax", "flatten", "ppo, skrl or skrl_jax")
    refuse(config, "image_training", "targets", "policy", "ppo")
    layers = (config.image_channels, config.image_kernels, config.image_strides)
    height, width, _ = images.shape
    feature_map_size(height, width, *layers)
    names = ("filters", "kernel_size", "strides")
    cnn = {
        "type": "conv2d",
        "activation": config.image_activation or config.activation,
        "initializer": {"name": "default"},
        "permute_input": False,
        "input_shape": (sum(num_channels(spec) for spec in images.specs.values()), height, width),
        "convs": [dict(zip(names, layer, strict=True)) | {"padding": 0} for layer in zip(*layers, strict=True)],
    }
    register_network(_IMAGE_NETWORK, _ImageBuilder)
    return {"name": _IMAGE_NETWORK, "cnn": cnn}


def _central_value(config: RlGamesSettings) -> dict[str, Any]:
    """Return the settings of the central value network that differ from those of the agent."""
    prefix = "central_value_"
    found = {name.removeprefix(prefix): value for name, value in vars(config).items() if name.startswith(prefix)}
    return {name: value for name, value in found.items() if name != "truncate_grads" and value is not None}


def agent_parameters(
    rollout_env: RolloutEnv, images: ImagePacking | None, config: RlGamesSettings, folder: str
) -> dict[str, Any]:
    """Return the settings in the form of RL-Games' configuration files."""
    env = rollout_env.env
    widths = vector_widths(env, "rl_games", tuple(images_of(env)))
    names = {"policy": "observation_space", "critic": "state_space"}
    spaces = {names[group]: Box(-torch.inf, torch.inf, (width,)) for group, width in widths.items()}
    mlp = {"units": config.units, "activation": config.activation, "initializer": {"name": "default"}}
    kind, model, space = _action_space(rollout_env.actions, config)
    # Paceline does both over the samples of all ranks; RL-Games would do it over those of this rank.
    settings = asdict(config) | {"normalize_advantage": False, "truncate_grads": False}
    settings["mixed_precision"] = config.mixed_precision and env.device.type == "cuda"
    central = settings | _central_value(config) | {"mixed_precision": False}
    layers = {"units": central["units"], "activation": central["activation"], "initializer": {"name": "default"}}
    central["network"] = {"name": "actor_critic", "central_value": True, "mlp": layers}
    central["network"] |= rnn_parameters(config.central_value_rnn_name or config.rnn_name, config)
    network = {"name": "actor_critic", "separate": config.separate, "space": kind, "mlp": mlp}
    network |= rnn_parameters(config.rnn_name, config)
    if images:
        refuse_recurrent(config, "rnn_name")
        features = (config.image_features,) if config.image_features else ()
        network |= _image_network(images, config) | {"mlp": mlp | {"units": (*features, *config.units)}}
        spaces["observation_space"] = Box(0, 255, images.shape, dtype=torch_to_numpy_dtype_dict[images.dtype])
        settings["normalize_input"] = False
    for part in (settings, central):
        if config.rnn_name != "none" and env.num_envs * part["minibatch_size_per_env"] % config.seq_length:
            # A policy is played in fewer envs than `RlGamesSettings.check_samples` allows in training.
            part["minibatch_size_per_env"] = config.horizon_length
    settings |= {
        "name": "paceline",
        "env_name": "paceline",
        "train_dir": folder,
        "device": str(env.device),
        "num_actors": env.num_envs,
        "vec_env": _VecEnv(rollout_env, images, config),
        "env_info": spaces | {"action_space": space},
        "features": {"observer": AlgoObserver()},
        "reward_shaper": lambda reward: reward * config.reward_scale,
        # Without a recurrent network the number of samples would have to be a multiple of it, too.
        "seq_length": config.seq_length if config.rnn_name != "none" else 1,
        "central_value_config": central if "state_space" in spaces else None,
    }
    return {"model": {"name": model}, "network": network, "config": settings}


def _action_space(actions: ActionSpec, config: RlGamesSettings) -> tuple[dict[str, Any], str, Any]:
    """Return the space of a network, the name of a model, and the action space of an env, as RL-Games takes them."""
    if len(actions.choices) == 1:
        return {"discrete": {}}, "discrete_a2c", Discrete(actions.choices[0])
    if actions.choices:
        return {"multi_discrete": {}}, "multi_discrete_a2c", Tuple([Discrete(count) for count in actions.choices])
    continuous = {
        "mu_activation": "None",
        "sigma_activation": "None",
        "mu_init": {"name": "default"},
        "sigma_init": {"name": "const_initializer", "val": config.sigma_init_val},
        "fixed_sigma": config.fixed_sigma,
    }
    limit = config.action_limit or 1.0
    return {"continuous": continuous}, "continuous_a2c_logstd", Box(-limit, limit, (actions.width,))
