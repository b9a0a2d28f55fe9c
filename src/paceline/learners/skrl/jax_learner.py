"""skrl's PPO on JAX, on Paceline's envs and ranks. The distributed runtime of JAX is not used: ranks communicate
through Paceline's process group."""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from paceline.distributed.group import Group
from paceline.distributed.launcher import without_launcher
from paceline.env.vec_env import VecEnv
from paceline.errors import UserError
from paceline.learners.encoders import ImageEncoder
from paceline.learners.networks import mlp_of
from paceline.learners.optimizers import broadcast_parameters
from paceline.learners.rollout import RolloutEnv
from paceline.learners.settings import flag
from paceline.learners.skrl.jax_networks import (
    ACTIVATIONS,
    CategoricalPolicy,
    Policy,
    Value,
    make_networks,
    random_key,
)
from paceline.learners.skrl.learner import (
    ObservationRows,
    SharedMemory,
    SkrlLearner,
    UnscaledValues,
    agent_config,
    make_encoder,
)
from paceline.learners.skrl.settings import SkrlSettings
from paceline.tensors.statistics import merge_, row_sums

# Read when JAX starts. By default it allocates most of the GPU memory, which torch and Warp need as well.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

with without_launcher():
    import jax
    import jax.numpy as jnp
    import skrl
    from jax.flatten_util import ravel_pytree
    from skrl.agents.jax.ppo import PPO, PPO_CFG
    from skrl.memories.jax import RandomMemory
    from skrl.models.jax import Model
    from skrl.resources.preprocessors.jax import RunningStandardScaler
    from skrl.resources.schedulers.jax import KLAdaptiveLR

JaxDevice = Any
"""jax.Device, which type checkers do not accept as a class."""


class SkrlJax(SkrlLearner):
    """skrl's PPO on JAX."""

    agent: "_Agent"

    def __init__(self, env: VecEnv, config: SkrlSettings, seed: int, group: Group):
        for name, supported in {"network": "", "mixed_precision": False, "rnn_type": "none"}.items():
            if getattr(config, name) != supported:
                raise UserError(f"{flag(config, name)} needs skrl on torch: use --learner skrl")
        rows = ObservationRows(env, "skrl_jax")
        super().__init__(env, config, seed, group, rows)
        if len(choices := self._rollout_env.actions.choices) > 1:
            # All columns would be sampled with the same random numbers.
            raise UserError(
                f"learner skrl_jax does not support actions of several choices, {choices}: use one of the learners "
                "ppo, rsl_rl, rl_games and skrl"
            )
        self._device = jax_device(env.device)
        # Device on which skrl and JAX create arrays.
        skrl.config.jax.device = self._device
        jax.config.update("jax_default_device", self._device)
        torch.manual_seed(seed)
        self.agent = agent = _Agent(self._rollout_env, rows, config, self._device, self.average_kl)
        networks = {name: SavedArrays(network) for name, network in agent.networks.items()}
        for network in networks.values():
            parameters = network.state()
            broadcast_parameters(group, parameters.values())
            network.load_state(parameters)
        normalizers = {name: SavedArrays(scaler) for name, scaler in agent.scalers.items()}
        self.parts = {"networks": networks, "normalizers": normalizers, "optimizer": agent}

    def collect(self) -> None:
        """Collect a rollout, with the noise of actions and the order of samples seeded from torch's generator."""
        self.agent.policy.set_key(random_key())
        np.random.seed(int(torch.randint(2**32, ())))
        super().collect()

    def from_torch(self, tensor: Tensor) -> jax.Array:
        return to_jax(tensor, self._device)

    def set_learning_rate(self, learning_rate: float) -> None:
        self.agent.policy_learning_rate = self.agent.value_learning_rate = learning_rate


class _Agent(PPO):
    """Learns from the samples of all ranks. skrl's own distributed training is off."""

    policy: Policy | CategoricalPolicy
    value: Value
    memory: "_Memory"

    def __init__(
        self,
        rollout_env: RolloutEnv,
        rows: ObservationRows,
        config: SkrlSettings,
        device: JaxDevice,
        average_kl: Callable[[float], float],
    ):
        self._config, self._average_kl = config, average_kl
        # Checks the settings of the encoder, and receives its weights in `policy_networks`.
        self._encoder = make_encoder(rows.images, config, torch.Generator())
        env, group = rollout_env.env, rollout_env.group
        boxes = rows.spaces(rollout_env.actions, device)
        self.networks = make_networks(config, boxes, rows.images)
        memory = _Memory(memory_size=config.rollouts, num_envs=env.num_envs, device=device)
        memory.observation_dtype = jnp.dtype(str(rows.dtype).removeprefix("torch."))
        super().__init__(
            models=self.networks,
            memory=memory,
            cfg=agent_config(
                PPO_CFG,
                config,
                rows.widths,
                partial(_Scaler, group=group, device=device),
                # Also for a fixed learning rate, because skrl then passes it to every step and computes the divergence.
                learning_rate_scheduler=KLAdaptiveLR,
                learning_rate_scheduler_kwargs={"kl_threshold": config.kl_threshold},
            ),
            **boxes,
        )
        modules = self.checkpoint_modules.items()
        self.scalers = {name: module for name, module in modules if isinstance(module, _Scaler)}
        self._value_preprocessor = memory.values = UnscaledValues(self._value_preprocessor, group, correction=0)
        adams = {"policy": self.policy_optimizer, "value": self.value_optimizer}
        self.adam = self.policy_optimizer = self.value_optimizer = _SharedAdam(
            adams, self.networks, group, rollout_env.share
        )
        self._adapt = self.policy_scheduler if config.learning_rate_scheduler == "KLAdaptiveLR" else None
        self.policy_scheduler, self.value_scheduler = cast("Any", (self._policy_scheduler, self._value_scheduler))
        self.init()
        self.enable_training_mode(True)

    def log_std(self) -> Tensor:
        return torch.from_dlpack(cast("Any", self.policy.state_dict.params)["params"]["log_std"])

    def learning_rate(self) -> float:
        return float(self.policy_learning_rate)

    def policy_networks(self) -> tuple[nn.Module, ImageEncoder | None]:
        """Return a torch network that computes mean actions or logits from features and the normalized vector, and the
        encoder."""
        dense = [f"Dense_{index}" for index in range(len(self._config.layers) + 1)]
        network = mlp_of(map(self._torch_layer, dense), ACTIVATIONS[self._config.activations][1])
        if self._encoder:
            layers = [layer for layer in self._encoder.layers if isinstance(layer, (nn.Conv2d, nn.Linear))]
            names = [*(f"Conv_{index}" for index in range(len(layers) - 1)), "features"]
            for layer, (weight, bias) in zip(layers, map(self._torch_layer, names), strict=True):
                layer.load_state_dict({"weight": weight, "bias": bias})
        return network, self._encoder

    def _torch_layer(self, name: str) -> tuple[Tensor, Tensor]:
        """Return weight and bias of a layer of the policy, in the order of torch."""
        parameters: Any = self.policy.state_dict.params["params"]
        kernel, bias = (torch.from_dlpack(parameters[name][part]).cpu() for part in ("kernel", "bias"))
        return kernel.permute(3, 2, 0, 1) if kernel.dim() == 4 else kernel.T, bias

    def state(self) -> dict[str, Any]:
        """Return the state of the optimizers."""
        moments = {name: flat(moments) for name, moments in self.adam.states.items()}
        return {"learning_rate": self.learning_rate(), **moments}

    def load_state(self, state: dict[str, Any]) -> None:
        self.adam.states = {name: unflat(moments, state[name]) for name, moments in self.adam.states.items()}
        self.policy_learning_rate = self.value_learning_rate = state["learning_rate"]

    def _policy_scheduler(self, timestep: int, *, lr: float, kl: float) -> float:
        """Adapt the learning rate to the KL divergence over all ranks."""
        average = self._average_kl(float(kl))
        return self._adapt(timestep, lr=lr, kl=average) if self._adapt else lr

    def _value_scheduler(self, timestep: int, *, lr: float, kl: float) -> float:
        """Return the learning rate of the policy, which skrl schedules first."""
        return self.policy_learning_rate


class GradientMean:
    """Averages a gradient, a tree like `parameters`, over ranks, weighted by this rank's `share` of all samples."""

    def __init__(self, parameters: Any, group: Group, share: float):
        self._group = group
        _, unpack = ravel_pytree(parameters)
        # One array for all layers, and compiled once: skrl's own sum is compiled at every call.
        self._pack, self._unpack = jax.jit(lambda tree: ravel_pytree(tree)[0] * share), jax.jit(unpack)

    def __call__(self, gradient: Any) -> Any:
        if not self._group.is_distributed:
            return gradient
        # In place, because nothing else uses this array.
        return self._unpack(jax.dlpack.from_dlpack(self._group.sum_(torch.from_dlpack(self._pack(gradient)))))


class _SharedAdam:
    """skrl's optimizers of both networks, on the gradients of all ranks. skrl steps the policy first and then the
    value; both steps are done at the second call, so that one sum over ranks covers both gradients."""

    def __init__(self, adams: dict[str, Any], networks: dict[str, Model], group: Group, share: float):
        # On the device from the start, as they are after a step: otherwise the first step would be compiled separately.
        self.states = {name: jax.device_put(adam.state, networks[name].device) for name, adam in adams.items()}
        self._adams, self._networks, self._pending = adams, networks, dict[str, Any]()
        self._mean = GradientMean({name: network.state_dict.params for name, network in networks.items()}, group, share)

    def step(self, *, grad: Any, model: Model, lr: float) -> "_SharedAdam":
        name = next(name for name, network in self._networks.items() if network is model)
        self._pending[name] = grad
        if self._pending.keys() == self._networks.keys():
            for name, mean in self._mean(self._pending).items():
                adam = self._adams[name].replace(state=self.states[name])
                self.states[name] = adam.step(grad=mean, model=self._networks[name], lr=lr).state
            self._pending = {}
        return self


class _Scaler(RunningStandardScaler):
    """Scaler of the first `width` columns with the statistics of the samples of all ranks."""

    def __init__(self, width: int, group: Group, device: JaxDevice):
        super().__init__(width, device=device)
        self._group, self._width = group, width

    def __call__(self, x: jax.Array | None, *, train: bool = False, inverse: bool = False) -> jax.Array | None:
        if x is not None and x.shape[-1] > self._width:
            vector, images = jnp.split(x, [self._width], axis=-1)
            vector = cast("jax.Array", self(vector, train=train, inverse=inverse))
            return jnp.concatenate((vector, images), axis=-1)
        if train and x is not None:
            self._merge(torch.from_dlpack(x))
        return super().__call__(x, inverse=inverse)

    def _merge(self, rows: Tensor) -> None:
        arrays = (self.current_count, self.running_mean, self.running_variance)
        count, mean, variance = (torch.from_dlpack(array).double() for array in arrays)
        merge_(count, mean, variance, self._group.sum_(row_sums(rows, mean)))
        self.current_count, self.running_mean, self.running_variance = (
            to_jax(merged.float(), self.device) for merged in (count, mean, variance)
        )


class _Memory(SharedMemory, RandomMemory):
    def from_torch(self, tensor: Tensor) -> jax.Array:
        return to_jax(tensor, self.device)


class SavedArrays:
    """State of a model or a preprocessor of skrl."""

    def __init__(self, module: Any):
        self._module = module

    def state(self) -> dict[str, Tensor]:
        return flat(self._module.state_dict.params)

    def load_state(self, state: dict[str, Tensor]) -> None:
        current = self._module.state_dict
        self._module.state_dict = current.replace(params=unflat(current.params, state))


# Conversion between torch and JAX


def jax_device(device: torch.device) -> JaxDevice:
    """Return the JAX device of a torch device, or the CPU if JAX is installed without CUDA."""
    if device.type == "cuda":
        with suppress(RuntimeError):
            return jax.devices("cuda")[device.index or 0]
    return jax.devices("cpu")[0]


def to_jax(tensor: Tensor, device: JaxDevice) -> jax.Array:
    """Return an array that shares the memory of the tensor, or a copy if JAX is on another device. Booleans become
    int8. The memory must not be changed afterwards. The inverse is `torch.from_dlpack`."""
    tensor = (tensor.to(torch.int8) if tensor.dtype == torch.bool else tensor).contiguous()
    return jax.dlpack.from_dlpack(tensor.cpu() if device.platform == "cpu" else tensor)


def flat(tree: Any) -> dict[str, Tensor]:
    """Return copies of the arrays of a tree by their paths."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {_name(path): torch.from_dlpack(leaf).clone() for path, leaf in leaves}


def unflat(like: Any, arrays: dict[str, Tensor]) -> Any:
    """Return a tree of the same structure as `like` with copies of the arrays of `flat`."""
    leaves, form = jax.tree.flatten_with_path(like)
    found = []
    for path, leaf in leaves:
        tensor = arrays[_name(path)]
        if tensor.shape != leaf.shape:
            raise RuntimeError(f"{_name(path)} has shape {tuple(tensor.shape)} and should have {leaf.shape}")
        found.append(jnp.array(tensor.cpu().numpy(), dtype=leaf.dtype, device=leaf.device))
    return jax.tree.unflatten(form, found)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
