"""RSL-RL's PPO on Paceline's envs and ranks, with its networks, storage and returns.

The training loop is Paceline's. The runner of RSL-RL waits for the device a hundred times per iteration and
synchronizes the ranks three times per minibatch. Here the rollout is one CUDA graph and the update another, with one
collective per minibatch. A test compares the update with that of RSL-RL.
"""

import copy
from collections.abc import Iterator
from typing import Any, cast

import torch
from rsl_rl.algorithms import PPO
from rsl_rl.models import CNNModel, MLPModel
from rsl_rl.modules import EmpiricalNormalization
from rsl_rl.modules.distribution import Distribution, GaussianDistribution, HeteroscedasticGaussianDistribution
from rsl_rl.storage import RolloutStorage
from tensordict import TensorDict
from torch import Tensor, nn

from paceline.distributed.group import Group
from paceline.env.vec_env import TensorSpec, VecEnv
from paceline.learners import categorical
from paceline.learners.categorical import log_softmax, most_likely, one_hot, with_choices
from paceline.learners.encoders import common_size, feature_map_size, images_of, scaled
from paceline.learners.learner import Learner
from paceline.learners.networks import Encoder, Policy, fold_normalizer, with_layers
from paceline.learners.optimizers import KlAdaptiveLearningRate, broadcast_parameters
from paceline.learners.ppo.objective import surrogate_loss, value_loss
from paceline.learners.rollout import RolloutEnv, vector_widths
from paceline.learners.rsl_rl.recurrent import RecurrentModel, sequence_batches
from paceline.learners.rsl_rl.settings import RslRlSettings
from paceline.learners.settings import check_action_space, refuse, refuse_recurrent
from paceline.tensors.flat import FlatAdam, FlatParameters
from paceline.tensors.graph import capture
from paceline.tensors.statistics import merge_, row_sums, standardize

_LOSS_NAMES = ("loss/surrogate", "loss/value", "loss/entropy", "policy/kl")


class RslRl(Learner):
    """Learner whose actor uses the observation group "policy" and all images. The critic uses the group "critic" if the
    env has one, and the groups of the actor otherwise."""

    def __init__(self, env: VecEnv, config: RslRlSettings, seed: int, group: Group):
        super().__init__(env, seed, group)
        self.config = config
        self.algorithm = _Algorithm(self._tensor_dict(self._rollout_env.obs), self._rollout_env, config, seed)
        networks = {"actor": self.algorithm.actor, "critic": self.algorithm.critic}
        self.parts = {"networks": networks, "adam": self.algorithm.adam}
        models = {name: model for name, model in networks.items() if isinstance(model, RecurrentModel)}
        self.env_parts = {f"{name}_state": model.state for name, model in models.items()}
        collect, update = torch.no_grad()(self._collect), torch.no_grad()(self.algorithm.update_policy)
        self.collect = capture(collect, env.device, warp=True) if env.capturable else collect
        self._update_graph = capture(update, env.device) if group.capturable else update

    def update(self) -> dict[str, Tensor]:
        losses = dict(zip(_LOSS_NAMES, self._update_graph().unbind(0), strict=True))
        std = {} if self._rollout_env.actions.choices else {"policy/std": self.algorithm.action_std.detach().clone()}
        return {**losses, "policy/learning_rate": self.algorithm.adam.learning_rate, **std}

    def _collect(self) -> None:
        """Collect a rollout into the storage of the algorithm."""
        algorithm, steps = self.algorithm, self.config.num_steps_per_env
        limit = None if self._rollout_env.actions.choices else self.config.clip_actions
        algorithm.begin_rollout()
        obs = self._tensor_dict(self._rollout_env.begin_rollout(steps, captured=True))
        for _ in range(steps):
            actions = algorithm.act(obs)
            step = self._rollout_env.step_captured(actions.clamp(-limit, limit) if limit else actions)
            obs = self._tensor_dict(step.obs)
            done = (step.terminated | step.truncated).long()
            algorithm.process_env_step(obs, step.reward, done, {"time_outs": step.truncated})
        algorithm.compute_returns(obs)

    def _tensor_dict(self, obs: dict[str, Tensor]) -> TensorDict:
        return TensorDict(cast("Any", obs), batch_size=[self.env.num_envs], device=self.env.device)

    def policy(self) -> Policy:
        actor = self.algorithm.actor
        network, encoder = actor.network() if isinstance(actor, RecurrentModel) else actor.mlp, None
        if isinstance(actor, _ImageModel):
            network, encoder = actor.mlp_features_first(), _Encoder(actor)
        if actor.obs_normalization:
            normalizer = cast("EmpiricalNormalization", actor.obs_normalizer)
            network = fold_normalizer(network, normalizer.mean, normalizer.std + normalizer.eps)
        if choices := self._rollout_env.actions.choices:
            return Policy(with_choices(network, choices), tuple(actor.obs_groups), encoder)
        if self.config.state_dependent_std:
            distribution = cast("GaussianDistribution", actor.distribution)
            network = with_layers(network, distribution.as_deterministic_output_module())
        if limit := self.config.clip_actions:
            network = with_layers(network, nn.Hardtanh(-limit, limit))
        return Policy(network, tuple(actor.obs_groups), encoder)

    def set_learning_rate(self, learning_rate: float) -> None:
        self.algorithm.adam.learning_rate.fill_(learning_rate)


class _Algorithm(PPO):
    """Acts, stores and computes returns as RSL-RL does, and updates the policy on the samples of all ranks."""

    def __init__(self, obs: TensorDict, rollout_env: RolloutEnv, config: RslRlSettings, seed: int):
        env, group, actions = rollout_env.env, rollout_env.group, rollout_env.actions
        check_action_space(config, actions)
        self._group, self._share, self._config = group, rollout_env.share, config
        images = images_of(env)
        widths = vector_widths(env, "rsl_rl", tuple(images))
        actor_groups = [*widths.keys() & {"policy"}, *images]
        groups = {"actor": actor_groups, "critic": ["critic"] if "critic" in widths else actor_groups}
        device = cast("str", env.device)

        def make_model(role: str, outputs: int, distribution: dict[str, Any] | None) -> MLPModel:
            normalized = config.obs_normalization and not widths.keys().isdisjoint(groups[role])
            layers = (config.activation, normalized, distribution)
            hidden = config.critic_hidden_dims or config.hidden_dims if role == "critic" else config.hidden_dims
            if config.rnn_type != "none":
                model = RecurrentModel(obs, groups, role, outputs, hidden, *layers, config=config)
            elif images.keys().isdisjoint(groups[role]):
                model = MLPModel(obs, groups, role, outputs, hidden, *layers)
            else:
                hidden = (config.image_features, *hidden)
                model = _ImageModel(images, config, obs, groups, role, outputs, hidden, *layers)
            if normalized:
                model.obs_normalizer = _Normalizer(model.obs_dim, group)
            return model

        if images:
            refuse_recurrent(config, "rnn_type")
        torch.manual_seed(seed)
        kind = _StateDependentGaussian if config.state_dependent_std else _Gaussian
        names = ("init_std", "std_type", "std_range", *(() if config.state_dependent_std else ("learn_std",)))
        distribution = {"class_name": kind} | {name: getattr(config, name) for name in names}
        if actions.choices:
            distribution = {"class_name": _Categorical, "choices": actions.choices}
        actor, critic = make_model("actor", actions.num_outputs, distribution), make_model("critic", 1, None)
        storage = RolloutStorage("rl", env.num_envs, config.num_steps_per_env, obs, [env.num_actions], device)
        super().__init__(
            actor,
            critic,
            storage,
            gamma=config.gamma,
            lam=config.lam,
            # Prevents RSL-RL from normalizing advantages over the samples of this rank only; see `update_policy`.
            normalize_advantage_per_mini_batch=True,
            device=device,
        )
        broadcast_parameters(group, [*actor.parameters(), *critic.parameters()])
        learned = ([each for each in model.parameters() if each.requires_grad] for model in (actor, critic))
        self._flat = FlatParameters(*learned, extra=len(_LOSS_NAMES))
        self.adam = FlatAdam(self._flat, config.learning_rate)
        self._adaptive_rate = KlAdaptiveLearningRate(config.desired_kl, env.device)

    @property
    def action_std(self) -> Tensor:
        """Standard deviation of continuous actions, [actions], or of those of the rollout, [step, env, actions]."""
        if self._config.state_dependent_std:
            return cast("tuple[Tensor, ...]", self.storage.distribution_params)[1]
        distribution = cast("GaussianDistribution", self.actor.distribution)
        std = distribution.log_std_param.exp() if distribution.std_type == "log" else distribution.std_param
        return std.clamp(*distribution.std_range)

    def begin_rollout(self) -> None:
        """Start to store a rollout."""
        self.storage.clear()
        if isinstance(self.actor, RecurrentModel) and isinstance(self.critic, RecurrentModel):
            self._start_states = self.actor.state.clone(), self.critic.state.clone()

    def _batches(self) -> Iterator[RolloutStorage.Batch]:
        counts = self._config.num_mini_batches, self._config.num_learning_epochs
        if isinstance(self.actor, RecurrentModel):
            return sequence_batches(self.storage, self._start_states, *counts)
        return self.storage.mini_batch_generator(*counts)

    def update_policy(self) -> Tensor:
        """Run all epochs; return the means of `_LOSS_NAMES`."""
        config = self._config
        if not config.normalize_advantage_per_mini_batch:
            self.storage.advantages = self._standardize(self.storage.advantages)
        losses = []
        for batch in self._batches():
            if config.normalize_advantage_per_mini_batch:
                batch.advantages = self._standardize(cast("Tensor", batch.advantages))
            with torch.enable_grad():
                loss, parts = self._losses(batch)
                self._flat.backward(loss)
            losses.append(self._flat.begin_average(self._group.begin_sum_, self._share, parts)())
            if config.schedule == "adaptive":
                kl = losses[-1][-1]
                # RSL-RL keeps the learning rate where the divergence is exactly zero.
                self._adaptive_rate.update_(self.adam.learning_rate, kl.where(kl > 0.0, config.desired_kl))
            self._flat.clip(config.max_grad_norm)
            self.adam.step()
        obs = self.storage.observations.flatten(0, 1)
        for model in (self.actor, self.critic):
            model.update_normalization(obs)
        return torch.stack(losses).mean(0)

    def _standardize(self, advantages: Tensor) -> Tensor:
        return standardize(advantages, self._group.sum_(row_sums(advantages)))

    def _losses(self, batch: RolloutStorage.Batch) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the loss to minimize, and the values of `_LOSS_NAMES`."""
        config, actor = self._config, self.actor
        advantage, old_log_prob, old_value, target = (
            cast("Tensor", column).squeeze(-1)
            for column in (batch.advantages, batch.old_actions_log_prob, batch.values, batch.returns)
        )
        actor_state, critic_state = batch.hidden_states
        with torch.autocast(
            self._flat.values.device.type, torch.bfloat16, enabled=config.use_mixed_precision, cache_enabled=False
        ):
            actor(batch.observations, batch.masks, actor_state, stochastic_output=True)
            value = self.critic(batch.observations, batch.masks, critic_state).squeeze(-1).float()
        entropy = actor.output_entropy.mean()
        ratio = (actor.get_output_log_prob(cast("Tensor", batch.actions)) - old_log_prob).exp()
        surrogate = surrogate_loss(ratio, advantage, config.clip_param)
        clip = config.clip_param if config.use_clipped_value_loss else None
        squared_error = value_loss(value, old_value, target, clip)
        with torch.no_grad():
            before, after = cast("tuple[Tensor, ...]", batch.old_distribution_params), actor.output_distribution_params
            kl = actor.get_kl_divergence(before, after).mean()
        loss = surrogate + config.value_loss_coef * squared_error - config.entropy_coef * entropy
        return loss, (surrogate.detach(), squared_error.detach(), entropy.detach(), kl)


class _ImageModel(CNNModel):
    """RSL-RL's model with one convolutional network for each image, on scaled images. The storage keeps them as they
    are in the env."""

    def __init__(self, images: dict[str, TensorSpec], config: RslRlSettings, obs: TensorDict, *arguments: Any):
        refuse(config, "image_pooling", "spatial_softmax", "flatten", "ppo, skrl or skrl_jax")
        refuse(config, "image_training", "targets", "policy", "ppo")
        self.images = images
        layers = (config.image_channels, config.image_kernels, config.image_strides)
        for name, spec in images.items():
            feature_map_size(*common_size({name: spec}), *layers)
        names = ("output_channels", "kernel_size", "stride")
        cnn = dict(zip(names, layers, strict=True)) | {"activation": config.activation}
        super().__init__(TensorDict(self._scaled(obs), obs.batch_size), *arguments, cnn_cfg=cnn)

    def get_latent(self, obs: TensorDict, masks: Tensor | None = None, hidden_state: Any = None) -> Tensor:
        return super().get_latent(self._scaled(obs))

    def _scaled(self, obs: TensorDict) -> Any:
        return dict(obs.items()) | {name: scaled(obs[name], spec) for name, spec in self.images.items()}

    def mlp_features_first(self) -> nn.Sequential:
        """Return a copy of the MLP for the features of images followed by vectors, which RSL-RL puts first."""
        mlp = copy.deepcopy(self.mlp)
        first = cast("nn.Linear", mlp[0])
        first.weight.data = first.weight.data.roll(self.cnn_latent_dim, 1)
        return mlp


class _Encoder(Encoder):
    """Convolutional networks of a model."""

    def __init__(self, model: _ImageModel):
        super().__init__()
        self.groups = tuple(model.images)
        self._cnns, self._images = model.cnns, model.images

    def forward(self, images: dict[str, Tensor]) -> Tensor:
        parts = [self._cnns[name](scaled(images[name], self._images[name])) for name in self.groups]
        return torch.cat(parts, dim=1)


class _Gaussian(GaussianDistribution):
    def sample(self) -> Tensor:
        """Sample without the host sync of torch.normal, which checks the standard deviation."""
        return self.mean + self.std * torch.randn_like(self.mean)


class _StateDependentGaussian(HeteroscedasticGaussianDistribution):
    sample = _Gaussian.sample


class _Categorical(Distribution):
    """Discrete actions, which RSL-RL does not have. The outputs of the network are logits; actions are indices."""

    def __init__(self, output_dim: int, choices: tuple[int, ...]):
        super().__init__(output_dim)
        self._choices = choices

    @property
    def input_dim(self) -> int:
        return self.output_dim

    def update(self, mlp_output: Tensor) -> None:
        self._log_probs = log_softmax(mlp_output, self._choices)

    def sample(self) -> Tensor:
        noise = -torch.empty_like(self._log_probs).exponential_().log()
        return most_likely(self._log_probs + noise, self._choices)

    def deterministic_output(self, mlp_output: Tensor) -> Tensor:
        return most_likely(mlp_output, self._choices)

    @property
    def entropy(self) -> Tensor:
        return categorical.entropy(self._log_probs)

    @property
    def params(self) -> tuple[Tensor, ...]:
        return (self._log_probs,)

    def log_prob(self, outputs: Tensor) -> Tensor:
        return (one_hot(outputs, self._choices) * self._log_probs).sum(-1)

    def kl_divergence(self, old_params: tuple[Tensor, ...], new_params: tuple[Tensor, ...]) -> Tensor:
        return categorical.kl_divergence(*old_params, *new_params)


class _Normalizer(EmpiricalNormalization):
    """Normalizer with the statistics of all ranks. It is updated in place, because CUDA graphs hold its tensors."""

    def __init__(self, width: int, group: Group):
        super().__init__(width)
        self._group = group

    def update(self, x: Tensor) -> None:
        merge_(self.count, self._mean, self._var, self._group.sum_(row_sums(x, self._mean[0])))
        self._std.copy_(cast("Tensor", self._var).sqrt())
