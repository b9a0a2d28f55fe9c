"""skrl's PPO on JAX, on our envs and ranks. Its trainer, which logs and saves by itself, is not used; nor is JAX's own
way of joining processes: what ranks have in common goes through our group."""

import math
from typing import Any, cast

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import torch
from gymnasium.spaces import Box
from jax.flatten_util import ravel_pytree
from torch import Tensor, nn

from paceline.distributed.group import Group
from paceline.env.vec_env import VecEnv
from paceline.learners.rollout import Clock, Stepper, same_on_all_ranks, vector_widths
from paceline.learners.skrl.imports import without_launcher
from paceline.learners.skrl.jax_arrays import JaxDevice, flat, jax_device, random_key, to_jax, to_torch, unflat
from paceline.learners.skrl.settings import SkrlSettings
from paceline.tensors.statistics import moments

with without_launcher():
    import skrl
    from skrl.agents.jax import ExperimentCfg
    from skrl.agents.jax.ppo import PPO, PPO_CFG
    from skrl.memories.jax import RandomMemory
    from skrl.models.jax import DeterministicMixin, GaussianMixin, Model
    from skrl.resources.preprocessors.jax import RunningStandardScaler
    from skrl.resources.schedulers.jax import KLAdaptiveLR

_ACTIVATIONS = {"elu": (jax.nn.elu, nn.ELU), "relu": (jax.nn.relu, nn.ReLU), "tanh": (jnp.tanh, nn.Tanh)}
# By these skrl plans its logs and files, of which there are none here.
_NO_PLAN = {"timestep": 0, "timesteps": 0}


class SkrlJax:
    """A `Learner`; the critic sees the group "critic" where the env has one."""

    def __init__(self, env: VecEnv, config: SkrlSettings, seed: int, group: Group):
        self.env, self.config, self.iteration = env, config, 0
        self._stepper = Stepper(env, seed, group)
        self._device = jax_device(env.device)
        # Where skrl, and JAX itself, put what comes from nowhere.
        skrl.config.jax.device = self._device
        jax.config.update("jax_default_device", self._device)
        torch.manual_seed(seed)
        self._agent = _Agent(self._stepper, config, self._device)
        for network in self._agent.networks.values():
            parameters = flat(network.state_dict.params)
            same_on_all_ranks(group, list(parameters.values()))
            _set_parameters(network, parameters)

    def learn(self) -> dict[str, float]:
        agent, stepper = self._agent, self._stepper
        stepper.begin(self.iteration, self.config.rollouts)
        agent.begin()
        clock = Clock(self.env.device)
        self._collect()
        clock.lap()
        agent.update(**_NO_PLAN)
        clock.lap()
        self.iteration += 1
        return stepper.report(agent.metrics(), clock)

    def first_non_finite(self) -> str | None:
        return self._stepper.first_non_finite()

    def policy(self) -> nn.Module:
        layers: list[nn.Module] = []
        if scaler := self._agent.scalers.get("observation"):
            layers.append(_Normalizer(scaler))
        parameters: Any = self._agent.policy.state_dict.params["params"]
        for index in range(len(self.config.layers) + 1):
            kernel, bias = (to_torch(parameters[f"Dense_{index}"][name]).cpu() for name in ("kernel", "bias"))
            linear = nn.Linear(kernel.shape[0], kernel.shape[1])
            linear.load_state_dict({"weight": kernel.T, "bias": bias})
            layers += [linear, _ACTIVATIONS[self.config.activations][1]()]
        return nn.Sequential(*layers[:-1]).requires_grad_(False)

    def state(self) -> dict[str, Any]:
        agent = self._agent
        return {
            "networks": {name: flat(network.state_dict.params) for name, network in agent.networks.items()},
            "normalizers": {name: flat(scaler.statistics()) for name, scaler in agent.scalers.items()},
            "optimizer": {
                "learning_rate": float(agent.policy_learning_rate),
                **{name: flat(moments) for name, moments in agent.adam.states.items()},
            },
            "iteration": self.iteration,
            "envs": self._stepper.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        agent = self._agent
        self.load_policy(state)
        _set_parameters(agent.value, state["networks"]["value"])
        for name, scaler in agent.scalers.items():
            scaler.load(state["normalizers"][name])
        for name, adam in agent.adam.states.items():
            agent.adam.states[name] = unflat(adam, state["optimizer"][name])
        agent.policy_learning_rate = agent.value_learning_rate = state["optimizer"]["learning_rate"]
        self._stepper.load_state(state["envs"])

    def set_learning_rate(self, learning_rate: float) -> None:
        self._agent.policy_learning_rate = self._agent.value_learning_rate = learning_rate

    def load_policy(self, state: dict[str, Any]) -> None:
        self.iteration = state["iteration"]
        _set_parameters(self._agent.policy, state["networks"]["policy"])
        if scaler := self._agent.scalers.get("observation"):
            scaler.load(state["normalizers"]["observation"])

    def _collect(self) -> None:
        inputs = self._inputs(self._stepper.obs)
        for _ in range(self.config.rollouts):
            actions, _ = self._agent.act(*inputs, **_NO_PLAN)
            step = self._stepper.step(to_torch(actions))
            cut, ended = step.truncated.unsqueeze(1), step.terminated.unsqueeze(1)
            # Of an episode that was cut, its own last observations and not the next one's first.
            beyond = self._inputs({name: torch.where(cut, step.final_obs[name], obs) for name, obs in step.obs.items()})
            self._agent.record_transition(
                observations=inputs[0],
                states=cast("jax.Array", inputs[1]),
                actions=actions,
                rewards=to_jax(step.reward.unsqueeze(1), self._device),
                next_observations=beyond[0],
                next_states=cast("jax.Array", beyond[1]),
                # Stock, where it does not bootstrap a cut episode, has it go on into the next.
                terminated=to_jax(ended if self.config.time_limit_bootstrap else ended | cut, self._device),
                truncated=to_jax(cut, self._device),
                infos={},
                **_NO_PLAN,
            )
            inputs = self._inputs(step.obs)

    def _inputs(self, obs: dict[str, Tensor]) -> tuple[jax.Array, jax.Array | None]:
        """What skrl calls observations and states."""
        states = to_jax(obs["critic"], self._device) if "critic" in obs else None
        return to_jax(obs["policy"], self._device), states


class _Agent(PPO):
    """skrl's own, with parts in it that are the same on all ranks: to itself it is alone."""

    policy: "_Policy"
    value: "_Value"
    memory: "_Memory"

    def __init__(self, stepper: Stepper, config: SkrlSettings, device: JaxDevice):
        self._group, self._share, self._divergences = stepper.group, stepper.share, list[float]()
        group, widths, actions = stepper.group, vector_widths(stepper.env, "skrl_jax"), stepper.env.num_actions
        self.networks = make_networks(widths, actions, config, device)
        memory = _Memory(group, memory_size=config.rollouts, num_envs=stepper.env.num_envs, device=device)
        spaces = _spaces(widths, actions, device)
        super().__init__(models=self.networks, memory=memory, cfg=_agent_config(config), **spaces)
        self.scalers: dict[str, _Scaler] = {}
        if config.observation_normalization:
            self.scalers["observation"] = self._observation_preprocessor = _Scaler(widths["policy"], group, device)
        if config.observation_normalization and "critic" in widths:
            self.scalers["state"] = self._state_preprocessor = _Scaler(widths["critic"], group, device)
        if config.value_normalization:
            self.scalers["value"] = _Scaler(1, group, device)
        self._value_preprocessor = memory.values = _Values(self.scalers.get("value"))

        stock = {"policy": self.policy_optimizer, "value": self.value_optimizer}
        self.adam = self.policy_optimizer = self.value_optimizer = _SharedAdam(
            stock, self.networks, group, stepper.share
        )
        self._adapt = self.policy_scheduler if config.learning_rate_scheduler == "KLAdaptiveLR" else None
        self.policy_scheduler, self.value_scheduler = cast("Any", (self._next_rate, self._same_rate))
        self.init()
        self.enable_training_mode(True)

    def begin(self) -> None:
        """An iteration. The noise of actions and the order of samples follow torch's generator, which starts anew in
        each."""
        self.policy._g_key, self.policy._g_i = random_key(), 0
        np.random.seed(int(torch.randint(2**32, ())))

    def metrics(self) -> dict[str, float | Tensor]:
        """Of the latest update."""
        log_std = to_torch(cast("Any", self.policy.state_dict.params)["params"]["log_std"])
        found = {
            "loss/surrogate": self.tracking_data["Loss / Policy loss"][-1],
            "loss/value": self.tracking_data["Loss / Value loss"][-1],
            "loss/entropy": (0.5 + 0.5 * math.log(2.0 * math.pi) + log_std).sum(),
            "policy/kl": float(np.mean(self._divergences)),
            "policy/learning_rate": self.policy_learning_rate,
            "policy/std": log_std.exp(),
        }
        self.tracking_data.clear()
        self._divergences.clear()
        return found

    def _next_rate(self, timestep: int, *, lr: float, kl: float) -> float:
        """By how far the policy has moved in the samples of all ranks."""
        own = torch.tensor(float(kl) * self._share, dtype=torch.float64)
        divergence = float(self._group.sum_(own))
        self._divergences.append(divergence)
        return self._adapt(timestep, lr=lr, kl=divergence) if self._adapt else lr

    def _same_rate(self, timestep: int, *, lr: float, kl: float) -> float:
        """The critic's is the policy's, which skrl asks for first."""
        return self.policy_learning_rate


def _agent_config(config: SkrlSettings) -> PPO_CFG:
    same = ("rollouts", "learning_epochs", "mini_batches", "discount_factor", "learning_rate", "grad_norm_clip")
    same += ("ratio_clip", "value_clip", "entropy_loss_scale", "value_loss_scale", "time_limit_bootstrap")
    return PPO_CFG(
        **{name: getattr(config, name) for name in same},
        gae_lambda=config.gae_lambda,
        # Also where the rate is fixed: skrl then hands it to every step, and tells how far the policy has moved.
        learning_rate_scheduler=cast("type", KLAdaptiveLR),
        learning_rate_scheduler_kwargs={"kl_threshold": config.kl_threshold},
        # Each rank would stop by itself, and leave the others waiting.
        kl_threshold=0.0,
        rewards_shaper=lambda rewards, timestep, timesteps: rewards * config.rewards_shaper_scale,
        experiment=ExperimentCfg(write_interval=0, checkpoint_interval=0),
    )


def make_networks(widths: dict[str, int], actions: int, config: SkrlSettings, device: JaxDevice) -> dict[str, Model]:
    """Policy and value, with weights from torch's generator."""
    options = {"layers": config.layers, "activation": config.activations, **_spaces(widths, actions, device)}
    networks = {"policy": _Policy(initial_log_std=config.initial_log_std, **options), "value": _Value(**options)}
    for network in networks.values():
        network.init_state_dict(key=random_key())
    return networks


class _Policy(GaussianMixin, Model):
    """Mean actions by a multi-layer perceptron, with noise that is the same in all states."""

    layers: tuple[int, ...] = ()
    activation: str = "elu"
    initial_log_std: float = 0.0

    def __init__(self, *, layers: tuple[int, ...], activation: str, initial_log_std: float, **spaces: Any):
        self.layers, self.activation, self.initial_log_std = layers, activation, initial_log_std
        Model.__init__(self, **spaces)
        GaussianMixin.__init__(self)

    @flax.linen.compact
    def __call__(self, inputs: dict[str, Any], role: str) -> tuple[jax.Array, dict[str, Any]]:
        mean = _perceptron(inputs["observations"], self.layers, self.activation, self.num_actions, last_gain=0.01)
        log_std = self.param("log_std", lambda _: jnp.full(self.num_actions, self.initial_log_std, jnp.float32))
        return mean, {"log_std": log_std}


class _Value(DeterministicMixin, Model):
    layers: tuple[int, ...] = ()
    activation: str = "elu"

    def __init__(self, *, layers: tuple[int, ...], activation: str, **spaces: Any):
        self.layers, self.activation = layers, activation
        Model.__init__(self, **spaces)
        DeterministicMixin.__init__(self)

    @flax.linen.compact
    def __call__(self, inputs: dict[str, Any], role: str) -> tuple[jax.Array, dict[str, Any]]:
        states = inputs["observations"] if inputs["states"] is None else inputs["states"]
        return _perceptron(states, self.layers, self.activation, 1, last_gain=1.0), {}


def _perceptron(x: jax.Array, layers: tuple[int, ...], activation: str, outputs: int, last_gain: float) -> jax.Array:
    """With orthogonal weights; `last_gain` scales the output layer's."""
    for width in layers:
        dense = flax.linen.Dense(width, kernel_init=jax.nn.initializers.orthogonal(math.sqrt(2.0)))
        x = _ACTIVATIONS[activation][0](dense(x))
    return flax.linen.Dense(outputs, kernel_init=jax.nn.initializers.orthogonal(last_gain))(x)


class GradientMean:
    """Over the samples of all ranks, of which this one has a `share`; the gradient is a tree like `parameters`."""

    def __init__(self, parameters: Any, group: Group, share: float):
        self._group = group
        _, unpack = ravel_pytree(parameters)
        # One array for all layers, and compiled once: skrl's own sum is compiled anew at every call.
        self._pack, self._unpack = jax.jit(lambda tree: ravel_pytree(tree)[0] * share), jax.jit(unpack)

    def __call__(self, gradient: Any) -> Any:
        if self._group.alone:
            return gradient
        # In place, because nobody else has this array.
        return self._unpack(jax.dlpack.from_dlpack(self._group.sum_(to_torch(self._pack(gradient)))))


class _SharedAdam:
    """skrl's optimisers of both networks, on the gradients of all ranks. It asks for the policy's step and then for the
    value's; both are done at the second, so that one sum serves both."""

    def __init__(self, adams: dict[str, Any], networks: dict[str, Model], group: Group, share: float):
        # Bound to the device from the start, as they are after a step: else the first would be compiled for itself.
        self.states = {name: jax.device_put(adam.state, networks[name].device) for name, adam in adams.items()}
        self._adams, self._networks, self._waiting = adams, networks, dict[str, Any]()
        self._mean = GradientMean({name: network.state_dict.params for name, network in networks.items()}, group, share)

    def step(self, *, grad: Any, model: Model, lr: float) -> "_SharedAdam":
        name = next(name for name, network in self._networks.items() if network is model)
        self._waiting[name] = grad
        if self._waiting.keys() == self._networks.keys():
            for name, mean in self._mean(self._waiting).items():
                adam = self._adams[name].replace(state=self.states[name])
                self.states[name] = adam.step(grad=mean, model=self._networks[name], lr=lr).state
            self._waiting = {}
        return self


class _Scaler(RunningStandardScaler):
    """Statistics of the samples of all ranks."""

    def __init__(self, width: int, group: Group, device: JaxDevice):
        super().__init__(width, device=device)
        self._group = group

    def __call__(self, x: jax.Array | None, *, train: bool = False, inverse: bool = False) -> jax.Array | None:
        if train and x is not None:
            self._merge(to_torch(x))
        return super().__call__(x, inverse=inverse)

    def statistics(self) -> dict[str, jax.Array]:
        return cast("Any", self.state_dict).params

    def load(self, statistics: dict[str, Tensor]) -> None:
        self.state_dict = unflat(self.statistics(), statistics)

    def _merge(self, rows: Tensor) -> None:
        before, mean, variance = (
            to_torch(found).double() for found in (self.current_count, self.running_mean, self.running_variance)
        )
        count, new_mean, new_variance = moments(self._group.sum_, rows, mean)
        total, shift = before + count, new_mean - mean
        mean += shift * count / total
        variance = (variance * before + new_variance * count + shift.square() * before * count / total) / total
        self.running_mean, self.running_variance, self.current_count = (
            to_jax(merged.float(), self.device) for merged in (mean, variance, total)
        )


class _Values:
    """Normalises values, if there is a scaler. In an update skrl does so with the rollout's values and then with its
    returns, and what these were before is kept: the difference is the advantages, which nothing else tells."""

    def __init__(self, scaler: _Scaler | None):
        self._scaler, self._raw = scaler, list[jax.Array]()

    def __call__(self, x: jax.Array, *, train: bool = False, inverse: bool = False) -> jax.Array | None:
        if train:
            self._raw.append(x)
        return self._scaler(x, train=train, inverse=inverse) if self._scaler else x

    def take_advantages(self) -> jax.Array:
        values, returns = self._raw
        self._raw.clear()
        return returns - values


class _Memory(RandomMemory):
    """Advantages are normalised over the samples of all ranks, not by each rank over its own."""

    values: _Values

    def __init__(self, group: Group, **options: Any):
        super().__init__(**options)
        self._group = group

    def set_tensor_by_name(self, name: str, tensor: jax.Array) -> None:
        if name == "advantages":
            advantages = self.values.take_advantages()
            _, mean, variance = moments(self._group.sum_, to_torch(advantages))
            tensor = _standardized(advantages, float(mean), float(variance.sqrt()))
        super().set_tensor_by_name(name, tensor)


@jax.jit
def _standardized(values: jax.Array, mean: float, std: float) -> jax.Array:
    return (values - mean) / (std + 1e-8)


class _Normalizer(nn.Module):
    """What a scaler does, in torch. It clips, so that it cannot be folded into the first layer."""

    mean: Tensor
    std: Tensor

    def __init__(self, scaler: _Scaler):
        super().__init__()
        mean, variance = (to_torch(found).cpu() for found in (scaler.running_mean, scaler.running_variance))
        self.register_buffer("mean", mean.clone())
        self.register_buffer("std", variance.sqrt() + scaler.epsilon)
        self.limit = scaler.clip_threshold

    def forward(self, obs: Tensor) -> Tensor:
        return ((obs - self.mean) / self.std).clamp(-self.limit, self.limit)


def _spaces(widths: dict[str, int], actions: int, device: JaxDevice) -> dict[str, Any]:
    """As all of skrl's parts take them."""
    sizes = {"observation_space": widths["policy"], "state_space": widths.get("critic"), "action_space": actions}
    return {"device": device} | {name: Box(-np.inf, np.inf, (size,)) if size else None for name, size in sizes.items()}


def _set_parameters(network: Model, parameters: dict[str, Tensor]) -> None:
    network.state_dict = network.state_dict.replace(params=unflat(network.state_dict.params, parameters))
