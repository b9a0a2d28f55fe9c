"""RSL-RL's PPO on our envs and ranks: its networks, its storage, its returns, its objective.

The loop around them is ours. Stock waits for the device a hundred times per iteration and has the ranks meet three
times per minibatch; here the rollout is one CUDA graph and the update another, with one collective per minibatch. A
test holds the update to stock's.
"""

from typing import Any, cast

import torch
from rsl_rl.algorithms import PPO
from rsl_rl.models import MLPModel
from rsl_rl.modules import EmpiricalNormalization
from rsl_rl.modules.distribution import GaussianDistribution
from rsl_rl.storage import RolloutStorage
from tensordict import TensorDict
from torch import Tensor, nn

from paceline.distributed.group import Group
from paceline.env.vec_env import VecEnv
from paceline.learners.networks import fold_normalizer
from paceline.learners.rollout import Clock, Stepper, same_on_all_ranks, vector_widths
from paceline.learners.rsl_rl.settings import RslRlSettings
from paceline.tensors.flat import FlatAdam, FlatParameters
from paceline.tensors.graph import capture
from paceline.tensors.statistics import moments, standardized

_LOSS_NAMES = ("loss/surrogate", "loss/value", "loss/entropy", "policy/kl")
# Between which the learning rate is adapted, in steps of a factor 1.5; as in RSL-RL.
_LEARNING_RATES = (1e-5, 1e-2)


class RslRl:
    """A `Learner`; the critic sees the group "critic" where the env has one."""

    def __init__(self, env: VecEnv, config: RslRlSettings, seed: int, group: Group):
        self.env, self.config, self.iteration = env, config, 0
        vector_widths(env, "rsl_rl")
        self._stepper = Stepper(env, seed, group)
        self.algorithm = _Algorithm(self._rows(self._stepper.obs), self._stepper, config, seed)
        collect, improve = torch.no_grad()(self._roll_out), torch.no_grad()(self.algorithm.improve)
        self._collect = capture(collect, env.device, warp=True) if env.capturable else collect
        self._improve = capture(improve, env.device) if group.capturable else improve

    def learn(self) -> dict[str, float]:
        self._stepper.begin(self.iteration)
        clock = Clock(self.env.device)
        self._collect()
        clock.lap()
        losses = self._improve()
        clock.lap()
        self.iteration += 1
        told: dict[str, float | Tensor] = dict(zip(_LOSS_NAMES, losses.unbind(0), strict=True))
        told["policy/learning_rate"] = self.algorithm.adam.learning_rate
        told["policy/std"] = self.algorithm.noise.detach().clone()
        return self._stepper.report(told, clock)

    def _roll_out(self) -> None:
        algorithm, steps = self.algorithm, self.config.num_steps_per_env
        algorithm.storage.clear()
        self.env.prefetch_random(steps)
        obs = self._rows(self._stepper.obs)
        for _ in range(steps):
            step = self._stepper.take(algorithm.act(obs))
            obs = self._rows(step.obs)
            done = (step.terminated | step.truncated).long()
            algorithm.process_env_step(obs, step.reward, done, {"time_outs": step.truncated})
        algorithm.compute_returns(obs)

    def _rows(self, obs: dict[str, Tensor]) -> TensorDict:
        return TensorDict(cast("Any", obs), batch_size=[self.env.num_envs], device=self.env.device)

    def first_non_finite(self) -> str | None:
        return self._stepper.first_non_finite()

    def policy(self) -> nn.Module:
        actor = self.algorithm.actor
        if not self.config.obs_normalization:
            return fold_normalizer(actor.mlp, torch.zeros(1), torch.ones(1))
        normalizer = cast("EmpiricalNormalization", actor.obs_normalizer)
        return fold_normalizer(actor.mlp, normalizer.mean, normalizer.std + normalizer.eps)

    def state(self) -> dict[str, Any]:
        return {
            "networks": {
                name: {key: tensor.clone() for key, tensor in network.state_dict().items()}
                for name, network in self._networks().items()
            },
            "adam": self.algorithm.adam.state(),
            "iteration": self.iteration,
            "envs": self._stepper.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.iteration = state["iteration"]
        for name, network in self._networks().items():
            network.load_state_dict(state["networks"][name])
        self.algorithm.adam.load_state(state["adam"])
        self._stepper.load_state(state["envs"])

    def set_learning_rate(self, learning_rate: float) -> None:
        self.algorithm.adam.learning_rate.fill_(learning_rate)

    def load_policy(self, state: dict[str, Any]) -> None:
        self.iteration = state["iteration"]
        self.algorithm.actor.load_state_dict(state["networks"]["actor"])

    def _networks(self) -> dict[str, MLPModel]:
        return {"actor": self.algorithm.actor, "critic": self.algorithm.critic}


class _Algorithm(PPO):
    """Acts, stores and computes returns as stock does; improves the policy over the samples of all ranks."""

    def __init__(self, obs: TensorDict, stepper: Stepper, config: RslRlSettings, seed: int):
        env, group = stepper.env, stepper.group
        self._group, self._share, self._config = group, stepper.share, config
        groups = {"actor": ["policy"], "critic": ["critic" if "critic" in obs.keys() else "policy"]}  # noqa: SIM118
        device = cast("str", env.device)
        torch.manual_seed(seed)
        network = (config.hidden_dims, config.activation, config.obs_normalization)
        noise = {"class_name": _Gaussian, "init_std": config.init_std, "std_type": config.std_type}
        actor = MLPModel(obs, groups, "actor", env.num_actions, *network, noise)
        critic = MLPModel(obs, groups, "critic", 1, *network)
        for model in (actor, critic) if config.obs_normalization else ():
            model.obs_normalizer = _Normalizer(model.obs_dim, group)
        storage = RolloutStorage("rl", env.num_envs, config.num_steps_per_env, obs, [env.num_actions], device)
        # Stock normalises advantages over this rank's samples, unless told that it comes later: see `improve`.
        super().__init__(
            actor,
            critic,
            storage,
            gamma=config.gamma,
            lam=config.lam,
            normalize_advantage_per_mini_batch=True,
            device=device,
        )
        same_on_all_ranks(group, [*actor.parameters(), *critic.parameters()])
        self._flat = FlatParameters(list(actor.parameters()), list(critic.parameters()), beside=len(_LOSS_NAMES))
        self.adam = FlatAdam(self._flat, config.learning_rate)

    @property
    def noise(self) -> Tensor:
        """The standard deviation of actions, [actions]."""
        distribution = cast("GaussianDistribution", self.actor.distribution)
        return distribution.log_std_param.exp() if distribution.std_type == "log" else distribution.std_param

    def improve(self) -> Tensor:
        """All epochs; returns the means of `_LOSS_NAMES`."""
        config = self._config
        if not config.normalize_advantage_per_mini_batch:
            self.storage.advantages = standardized(self._group.sum_, self.storage.advantages)
        parts = []
        for batch in self.storage.mini_batch_generator(config.num_mini_batches, config.num_learning_epochs):
            if config.normalize_advantage_per_mini_batch:
                batch.advantages = standardized(self._group.sum_, cast("Tensor", batch.advantages))
            with torch.enable_grad():
                loss, losses = self._losses(batch)
                self._flat.differentiate(loss)
            torch.stack(losses, out=self._flat.beside)
            self._group.sum_(self._flat.message.mul_(self._share))
            parts.append(self._flat.beside.clone())
            if config.schedule == "adaptive":
                self._adapt(parts[-1][-1])
            self._flat.clip(config.max_grad_norm)
            self.adam.step()
        obs = self.storage.observations.flatten(0, 1)
        for model in (self.actor, self.critic):
            model.update_normalization(obs)
        return torch.stack(parts).mean(0)

    def _losses(self, batch: RolloutStorage.Batch) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What to descend, and `_LOSS_NAMES`."""
        config, actor = self._config, self.actor
        advantage, old_log_prob, old_value, target = (
            cast("Tensor", column).squeeze(-1)
            for column in (batch.advantages, batch.old_actions_log_prob, batch.values, batch.returns)
        )
        actor(batch.observations, stochastic_output=True)
        value, entropy = self.critic(batch.observations).squeeze(-1), actor.output_entropy.mean()
        ratio = (actor.get_output_log_prob(cast("Tensor", batch.actions)) - old_log_prob).exp()
        held = ratio.clamp(1.0 - config.clip_param, 1.0 + config.clip_param)
        surrogate = -torch.min(advantage * ratio, advantage * held).mean()
        error = (value - target).square()
        if config.use_clipped_value_loss:
            near = old_value + (value - old_value).clamp(-config.clip_param, config.clip_param)
            error = torch.max(error, (near - target).square())
        with torch.no_grad():
            before, after = cast("tuple[Tensor, ...]", batch.old_distribution_params), actor.output_distribution_params
            divergence = actor.get_kl_divergence(before, after).mean()
        loss = surrogate + config.value_loss_coef * error.mean() - config.entropy_coef * entropy
        return loss, (surrogate.detach(), error.mean().detach(), entropy.detach(), divergence)

    def _adapt(self, divergence: Tensor) -> None:
        """Follow the policy's movement with the learning rate, without asking the host."""
        desired, rate = self._config.desired_kl, self.adam.learning_rate
        slower, faster = divergence > 2.0 * desired, (divergence < 0.5 * desired) & (divergence > 0.0)
        rate.copy_(torch.where(slower, rate / 1.5, torch.where(faster, rate * 1.5, rate)).clamp(*_LEARNING_RATES))


class _Gaussian(GaussianDistribution):
    def sample(self) -> Tensor:
        """Without the look at the standard deviation for which torch.normal has the host wait."""
        return self.mean + self.std * torch.randn_like(self.mean)


class _Normalizer(EmpiricalNormalization):
    """The same statistics on all ranks, by one collective; in place, because a graph holds on to its tensors."""

    def __init__(self, width: int, group: Group):
        super().__init__(width)
        self._group = group

    def update(self, x: Tensor) -> None:
        seen, mean, variance = moments(self._group.sum_, x, self._mean[0])
        self.count += seen.long()
        share, shift = seen / self.count, mean - self._mean
        self._var += (share * (variance - self._var + shift.square() * (1.0 - share))).float()
        self._mean += (share * shift).float()
        self._std.copy_(self._var.sqrt())
