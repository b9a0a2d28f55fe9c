"""RL-Games' continuous agent on Paceline's envs and ranks, without its runner and its distributed training."""

import io
from contextlib import redirect_stdout
from dataclasses import asdict
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from gymnasium.spaces import Box
from rl_games.algos_torch.a2c_continuous import A2CAgent
from rl_games.algos_torch.model_builder import register_network
from rl_games.algos_torch.network_builder import A2CBuilder
from rl_games.algos_torch.running_mean_std import RunningMeanStd
from rl_games.algos_torch.torch_ext import mean_list, policy_kl, torch_to_numpy_dtype_dict
from rl_games.common.algo_observer import AlgoObserver
from torch import Tensor, nn

from paceline.distributed.group import Group
from paceline.env.vec_env import TensorSpec, VecEnv
from paceline.errors import UserError
from paceline.learners.encoders import feature_map_size, images_of, network_input, num_channels
from paceline.learners.image_packing import ImagePacking
from paceline.learners.learner import Learner
from paceline.learners.networks import Encoder, Policy
from paceline.learners.optimizers import GradientHook, broadcast_parameters, set_learning_rate
from paceline.learners.rl_games.settings import RlGamesSettings
from paceline.learners.rollout import RolloutEnv, vector_widths
from paceline.learners.settings import refuse
from paceline.tensors.flat import pack, unpack
from paceline.tensors.statistics import merge_, row_sums, standardize

# Name of the network for images in the registry of RL-Games.
_IMAGE_NETWORK = "paceline_images"


class RlGames(Learner):
    """Learner whose agent uses the observation group "policy" or all images. It has a central value network for the
    group "critic" if the env has one."""

    def __init__(self, env: VecEnv, config: RlGamesSettings, seed: int, group: Group):
        super().__init__(env, seed, group)
        self.config = config
        torch.manual_seed(seed)
        self.agent = agent = _Agent(self._rollout_env, config)
        trained: dict[str, Any] = {"model": agent}
        if agent.has_central_value:
            trained["central_value"] = agent.central_value_net
        self._optimizers = {name: each.optimizer for name, each in trained.items()}
        networks = {name: each.model for name, each in trained.items()}
        for network in networks.values():
            broadcast_parameters(group, network.parameters())
        self.parts = {"networks": networks, "optimizers": self._optimizers}

    def collect(self) -> None:
        self._rollout_env.begin_rollout(self.config.horizon_length)
        self.agent.collect()

    def update(self) -> dict[str, Any]:
        agent = self.agent
        agent.update_epoch()
        *_, surrogates, values, _bounds, entropies, divergences, _rate, _factor = agent.train_epoch()
        return {
            "loss/surrogate": mean_list(surrogates),
            "loss/value": agent.central_loss if agent.has_central_value else mean_list(values),
            "loss/entropy": mean_list(entropies),
            "policy/kl": mean_list(divergences),
            "policy/learning_rate": agent.last_lr,
            "policy/std": agent.std(),
        }

    def policy(self) -> Policy:
        model, network = self.agent.model, self.agent.model.a2c_network
        normalizer = [model.running_mean_std] if model.normalize_input else []
        layers = nn.Sequential(*normalizer, network.actor_mlp, network.mu)
        images = self.agent.images
        return Policy(layers, (), _Encoder(network.actor_cnn, images.specs)) if images else Policy(layers)

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.agent.continue_from(self.iteration)

    def set_learning_rate(self, learning_rate: float) -> None:
        for optimizer in self._optimizers.values():
            set_learning_rate(optimizer, learning_rate)
        self.agent.continue_from(self.iteration)


class _Agent(A2CAgent):
    """Agent whose gradients, KL divergence, advantages and normalizers are those of the samples of all ranks."""

    def __init__(self, rollout_env: RolloutEnv, config: RlGamesSettings):
        self._group, self._normalize_advantage = rollout_env.group, config.normalize_advantage
        self.images = _pack_images(rollout_env.env)
        # RL-Games prints each part that it builds, and always opens a log.
        with redirect_stdout(io.StringIO()), TemporaryDirectory(prefix="paceline_") as folder:
            super().__init__("paceline", _parameters(rollout_env, self.images, config, folder))
            cast("Any", self.writer).close()
            self.writer = None
            self._normalizers = self._replace_normalizers()
        self.init_tensors()
        self.central_loss = 0.0
        max_norm = config.grad_norm if config.truncate_grads else None
        self._gradient_hook = GradientHook(self.optimizer, rollout_env, max_norm)
        if self.has_central_value:
            self.central_value_net.writter = None
            GradientHook(self.central_value_net.optimizer, rollout_env, max_norm)

    @torch.no_grad()
    def collect(self) -> None:
        """Collect the rollout that `train_epoch` uses."""
        self.reset_envs()
        self.set_eval()
        self._batch = super().play_steps()

    def _preproc_obs(self, obs_batch: Tensor) -> Tensor:
        """Scale images when the network uses them; the rollout keeps them as they are in the env."""
        return network_input(self.images.unpack(obs_batch), self.images.specs) if self.images else obs_batch

    def play_steps(self) -> dict[str, Any]:
        return self._batch

    def prepare_dataset(self, batch_dict: dict[str, Any]) -> None:
        values, returns = batch_dict["values"], batch_dict["returns"]
        advantages = (returns - values).sum(1)
        rows = {
            "obses": batch_dict["obses"],
            "states": batch_dict.get("states"),
            "values": torch.cat((values, returns)),
        }
        sums = [row_sums(rows[name], normalizer.running_mean) for name, normalizer in self._normalizers.items()]
        sums.append(row_sums(advantages.unsqueeze(1)))
        *normalizer_sums, advantage_sums = unpack(self._group.sum_(pack(sums)), sums)
        for normalizer, each in zip(self._normalizers.values(), normalizer_sums, strict=True):
            merge_(normalizer.count, normalizer.running_mean, normalizer.running_var, each)
        super().prepare_dataset(batch_dict)
        if self._normalize_advantage:
            self.dataset.values_dict["advantages"] = standardize(advantages.unsqueeze(1), advantage_sums).squeeze(1)

    def train_actor_critic(self, input_dict: dict[str, Tensor], opt_step: bool = True) -> tuple[Any, ...]:
        self._old_distribution = input_dict["mu"], input_dict["sigma"]
        surrogate, value, entropy, _, *rest = super().train_actor_critic(input_dict)
        return surrogate, value, entropy, self._gradient_hook.kl, *rest

    def calc_losses(self, *arguments: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *_, mean, _entropy, _masks = arguments
        # RL-Games computes it after the sum over ranks; here it is averaged together with the gradient.
        self._gradient_hook.kl = policy_kl(mean.detach(), self.std(), *self._old_distribution)
        return super().calc_losses(*arguments)

    def train_central_value(self) -> float:
        self.central_loss = super().train_central_value()
        return self.central_loss

    def std(self) -> Tensor:
        return self.model.a2c_network.sigma.detach().exp()

    def continue_from(self, iteration: int) -> None:
        """Set the iteration and the learning rate of the optimizers, which RL-Games does not restore."""
        self.epoch_num, self.last_lr = iteration, self.optimizer.param_groups[0]["lr"]
        if self.has_central_value:
            central = self.central_value_net
            central.epoch_num, central.lr = iteration, central.optimizer.param_groups[0]["lr"]

    def _replace_normalizers(self) -> dict[str, "_Normalizer"]:
        """Replace RL-Games' normalizers; return the new ones by the name of their data in a batch."""
        models, made = {"obses": self.model}, {}
        if self.has_central_value:
            models["states"] = self.central_value_net.model
        for name, model in models.items():
            if model.normalize_input:
                made[name] = model.running_mean_std = _Normalizer(model.obs_shape).to(self.ppo_device)
        if self.normalize_value:
            # One for all models: with a central value network, RL-Games never updates that of the agent.
            made["values"] = self.value_mean_std = _Normalizer((1,)).to(self.ppo_device)
            for model in models.values():
                model.value_mean_std = self.value_mean_std
        return made


class _Normalizer(RunningMeanStd):
    """Normalizer that is updated once per iteration. That of RL-Games is updated with each minibatch of every epoch,
    and only with those of this rank."""

    def train(self, mode: bool = True) -> "_Normalizer":
        return super().train(False)


class _ImageBuilder(A2CBuilder):
    """Builds the network of RL-Games for images that the agent has scaled."""

    def build(self, name: str, **options: Any) -> A2CBuilder.Network:
        return super().build(name, **options | {"input_shape": self.params["cnn"]["input_shape"]})


class _Encoder(Encoder):
    """Convolutions of a network."""

    def __init__(self, cnn: nn.Module, specs: dict[str, TensorSpec]):
        super().__init__()
        self.groups = tuple(specs)
        self._cnn, self._specs = cnn, specs

    def forward(self, images: dict[str, Tensor]) -> Tensor:
        return self._cnn(network_input(images, self._specs)).flatten(1)


class _VecEnv:
    """Adapts a `RolloutEnv` to the interface that the agent calls."""

    def __init__(self, rollout_env: RolloutEnv, images: ImagePacking | None):
        self._rollout_env, self._images = rollout_env, images

    def reset(self) -> dict[str, Tensor]:
        """Return the latest observations: the agent calls this once per iteration, and episodes continue."""
        return self._renamed(self._rollout_env.obs)

    def step(self, actions: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, dict[str, Tensor]]:
        step = self._rollout_env.step(actions)
        return self._renamed(step.obs), step.reward, step.terminated | step.truncated, {"time_outs": step.truncated}

    def set_train_info(self, *_: Any) -> None: ...

    def _renamed(self, obs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the observations under the names that RL-Games gives them."""
        states = {"states": obs["critic"]} if "critic" in obs else {}
        return states | {"obs": self._images.pack(obs) if self._images else obs["policy"]}


def _pack_images(env: VecEnv) -> ImagePacking | None:
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
        "activation": config.activation,
        "initializer": {"name": "default"},
        "permute_input": False,
        "input_shape": (sum(num_channels(spec) for spec in images.specs.values()), height, width),
        "convs": [dict(zip(names, layer, strict=True)) | {"padding": 0} for layer in zip(*layers, strict=True)],
    }
    register_network(_IMAGE_NETWORK, _ImageBuilder)
    return {"name": _IMAGE_NETWORK, "cnn": cnn}


def _parameters(
    rollout_env: RolloutEnv, images: ImagePacking | None, config: RlGamesSettings, folder: str
) -> dict[str, Any]:
    """Return the settings in the form of RL-Games' configuration files."""
    env = rollout_env.env
    widths = vector_widths(env, "rl_games", tuple(images_of(env)))
    names = {"policy": "observation_space", "critic": "state_space"}
    spaces = {names[group]: Box(-torch.inf, torch.inf, (width,)) for group, width in widths.items()}
    mlp = {"units": config.units, "activation": config.activation, "initializer": {"name": "default"}}
    actions = {
        "mu_activation": "None",
        "sigma_activation": "None",
        "mu_init": {"name": "default"},
        "sigma_init": {"name": "const_initializer", "val": 0.0},
        "fixed_sigma": True,
    }
    # Paceline does both over the samples of all ranks; RL-Games would do it over those of this rank.
    settings = asdict(config) | {"normalize_advantage": False, "truncate_grads": False}
    central = settings | {"network": {"name": "actor_critic", "central_value": True, "mlp": mlp}}
    network = {"name": "actor_critic", "separate": config.separate, "space": {"continuous": actions}, "mlp": mlp}
    if images:
        network |= _image_network(images, config) | {"mlp": mlp | {"units": (config.image_features, *config.units)}}
        spaces["observation_space"] = Box(0, 255, images.shape, dtype=torch_to_numpy_dtype_dict[images.dtype])
        settings["normalize_input"] = False
    settings |= {
        "name": "paceline",
        "env_name": "paceline",
        "train_dir": folder,
        "device": str(env.device),
        "num_actors": env.num_envs,
        "vec_env": _VecEnv(rollout_env, images),
        "env_info": spaces | {"action_space": Box(-1.0, 1.0, (env.num_actions,))},
        "features": {"observer": AlgoObserver()},
        "reward_shaper": lambda reward: reward * config.reward_scale,
        # Tasks clip actions themselves.
        "clip_actions": False,
        # Not recurrent. With the default the number of samples would have to be a multiple of 4.
        "seq_length": 1,
        "central_value_config": central if "state_space" in spaces else None,
    }
    return {"model": {"name": "continuous_a2c_logstd"}, "network": network, "config": settings}
