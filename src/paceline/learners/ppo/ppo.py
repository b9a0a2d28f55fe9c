"""Proximal policy optimisation (Schulman et al. 2017), written so that the device never waits for the host.

On CUDA the whole rollout is one graph and the whole update another; on a CPU the same code runs eagerly. All
random numbers are functions of (seed, world, step), so k ranks with N/k worlds draw what one rank with N draws.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.device.cpu import torch_threads
from paceline.distributed.group import Group
from paceline.distributed.rank import Rank
from paceline.env.vec_env import VecEnv
from paceline.learners.networks import fold_normalizer, mlp, plain, through
from paceline.learners.non_finite import in_rollout
from paceline.learners.ppo.cpu_update import Twins
from paceline.learners.ppo.objective import derived, divergence, log_prob, objective
from paceline.learners.ppo.returns import advantages
from paceline.learners.ppo.settings import LEARNING_RATES, PpoSettings
from paceline.learners.rollout import Clock, LatestObservations, vector_widths
from paceline.tensors import random as draw
from paceline.tensors.flat import FlatAdam, FlatParameters
from paceline.tensors.graph import capture, fuse
from paceline.tensors.statistics import RunningStatistics, sums

# Numbers in a layer's output from which two threads were faster than one (measured: 1.05 times here, 1.2 at twice it).
_SHARED_LAYER = 2**14
# Where it stands among a sample's columns.
_ADVANTAGE = -4
_FAULT_NAMES = ("failures", "overflows")
_LOSS_NAMES = ("loss/surrogate", "loss/value", "loss/entropy", "policy/kl")
_NORM_NAMES = ("policy/gradient_norm", "critic/gradient_norm")


@dataclass(frozen=True)
class Rollout:
    """An iteration's experience, [step, world, ...]; observations as the env gave them."""

    obs: Tensor
    critic_obs: Tensor
    """One step longer than the rest: it ends with what the next rollout starts from."""
    final_critic_obs: Tensor
    action: Tensor
    mean: Tensor
    log_std: Tensor
    """[actions]; the same for all samples."""
    noise: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    log: Tensor
    faults: Tensor
    """[2]"""


class Ppo:
    """Actor and critic are separate networks; the critic sees the group "critic" where the env has one."""

    def __init__(self, env: VecEnv, config: PpoSettings, seed: int, group: Group | None = None):
        self.env, self.config, self.seed, self.iteration = env, config, seed, 0
        self._group = group or Group(Rank())
        device = env.device
        self._latest = LatestObservations(env)
        self._widths = widths = vector_widths(env, "ppo")
        self._critic_group = "critic" if "critic" in widths else "policy"
        generator = torch.Generator().manual_seed(seed)
        self.actor = mlp(widths["policy"], config.hidden, env.num_actions, config.activation, 0.01, generator).to(
            device
        )
        self.critic = mlp(widths[self._critic_group], config.hidden, 1, config.activation, 1.0, generator).to(device)
        self.log_std = nn.Parameter(torch.full((env.num_actions,), math.log(config.initial_std), device=device))
        used = dict.fromkeys(("policy", self._critic_group))
        self.normalizers = {group: RunningStatistics(widths[group], device) for group in used}

        on_gpu = device.type == "cuda"
        # On a GPU products are faster where the inputs' rows have whole multiples of 16 bytes (measured on an H200 with
        # 101 and 113 observations: an update in 0.92 of the time).
        self._columns = 8 if on_gpu else 1

        self._networks = nn.ModuleDict({"actor": self.actor, "critic": self.critic})
        self._networks.register_parameter("log_std", self.log_std)
        # Clipped apart: a large error of the critic is no reason for the actor to take a smaller step.
        self._flat = FlatParameters(
            [self.log_std, *self.actor.parameters()], list(self.critic.parameters()), beside=len(_LOSS_NAMES)
        )
        self._adam = FlatAdam(self._flat, config.learning_rate)
        # Tensors, because an operation with a number costs twice as much on a CPU.
        self._rate_bounds = torch.tensor((config.desired_kl / 2.0, config.desired_kl * 2.0), device=device).unbind(0)
        self._rate_factors = torch.tensor((1.5, 1.0, 1.0 / 1.5), device=device).unbind(0)
        self._world = torch.arange(env.first_env, env.first_env + env.num_envs, device=device)
        # What the random numbers are counted by, so that none is drawn twice even if the settings change on the way.
        self._steps = torch.zeros((), dtype=torch.int64, device=device)
        self._epochs = torch.zeros_like(self._steps)
        # Inference mode makes an operation on a CPU cheaper still than no_grad does; a compiler does not take it.
        without_autograd = torch.no_grad() if on_gpu else torch.inference_mode()
        collect = without_autograd(self._roll_out)
        self._collect = capture(collect, device, warp=True) if env.capturable else collect
        update = without_autograd(self._update)
        self._improve = capture(update, device) if self._group.capturable else update
        # The formula where a compiler takes care of it, its hand-derived form where autograd would run it.
        self._differentiate = self._differentiate_compiled if on_gpu else self._differentiate_by_hand
        self._log_std_gradient = self._flat.together(self.log_std)[1]
        self._twins = Twins((self.actor, self.critic), self._flat)
        self._mean = plain(self.actor)
        self._act = fuse(self._choose_actions, device)
        self._samples = fuse(self._pack_samples, device)
        self._head = fuse(self._own_sums, device)
        self._finish = fuse(self._standardize, device)
        self._losses = fuse(self._minibatch_losses, device)
        self._tame = fuse(self._clip_and_adapt, device)

    # One iteration

    def learn(self) -> dict[str, float]:
        self._latest.start()
        clock = Clock(self.env.device)
        self._rollout = self._collect()
        clock.lap()
        with torch_threads(self._update_threads()):
            summary = self._improve()
        clock.lap()
        values = summary.tolist()
        self.iteration += 1
        descent = (*_LOSS_NAMES, *_NORM_NAMES, "policy/learning_rate", "policy/std")
        names = ("episodes", *self.env.log_names, *_FAULT_NAMES, *descent)
        collect_seconds, update_seconds = clock.laps()
        return dict(zip(names, values, strict=True)) | {
            "seconds/collect": collect_seconds,
            "seconds/update": update_seconds,
        }

    def _roll_out(self) -> Rollout:
        env = self.env
        env.prefetch_random(self.config.horizon)
        noise = self._noise()
        pushes = noise * self.log_std.exp()

        # A copy, because the latest observations are written back into the original below.
        obs = {group: first.clone() for group, first in self._latest.groups.items()}
        seen, means, actions, steps = [], [], [], []
        for push in pushes.unbind(0):
            seen.append(obs)
            mean, action = self._act(obs["policy"], push)
            result = env.step(action)
            means.append(mean)
            actions.append(action)
            steps.append(result)
            obs = result.obs
        self._latest.set(obs)

        critic = self._critic_group
        critic_obs = torch.stack([o[critic] for o in (*seen, obs)])
        return Rollout(
            obs=torch.stack([o["policy"] for o in seen]) if critic == "critic" else critic_obs[:-1],
            critic_obs=critic_obs,
            final_critic_obs=torch.stack([s.final_obs[critic] for s in steps]),
            action=torch.stack(actions),
            mean=torch.stack(means),
            log_std=self.log_std.detach().clone(),
            noise=noise,
            reward=torch.stack([s.reward for s in steps]),
            terminated=torch.stack([s.terminated for s in steps]),
            truncated=torch.stack([s.truncated for s in steps]),
            log=torch.stack([s.log for s in steps]),
            faults=env.faults(),
        )

    def _update(self) -> Tensor:
        rollout, config = self._rollout, self.config
        samples = self._samples(rollout)
        own = self._head(rollout, samples)
        # The head of an update: what must be known of all ranks' samples before the first gradient.
        head = self._group.sum_(own.clone())
        self._share = (own[0] / head[0]).float()
        self._finish(samples, head)
        losses: list[Tensor] = []
        minibatches = self._minibatches(samples)
        minibatch = next(minibatches)
        while minibatch is not None:
            finish = self._over_all_ranks(self._differentiate(minibatch, rollout.log_std))
            # Gathered while the sum over all ranks is under way.
            minibatch = next(minibatches, None)
            losses.extend(self._descend(finish()))
        count, _, moments, sums = self._take_head_apart(head)
        for statistics, group_moments in zip(self.normalizers.values(), moments, strict=True):
            statistics.merge(count, group_moments)
        self._steps += config.horizon
        self._epochs += config.epochs
        descent = torch.stack(losses).unflatten(0, (-1, len(_LOSS_NAMES) + len(_NORM_NAMES))).mean(0)
        return torch.cat((sums, descent, torch.stack((self._adam.learning_rate, self.log_std.exp().mean()))))

    def _update_threads(self) -> int:
        """On a CPU the update is done by one thread, unless a layer is large enough for several to share."""
        layer = self.env.num_envs * self.config.horizon // self.config.minibatches * max(self.config.hidden)
        return self._group.rank.cores if layer >= _SHARED_LAYER else 1

    # Its parts

    def _noise(self) -> Tensor:
        """Standard normal numbers for an iteration's actions, [step, world, actions]."""
        horizon, env = self.config.horizon, self.env
        step = self._steps + torch.arange(horizon, device=env.device)[:, None]
        return draw.normal(self.seed, self._world, step, draw.Stream.ACTION, env.num_actions)

    def _pack_samples(self, rollout: Rollout) -> Tensor:
        """Everything a minibatch needs, one row per sample, [step * world, columns]; `_take_apart` undoes it."""
        config = self.config
        critic_obs = torch.cat((rollout.critic_obs, rollout.final_critic_obs))
        critic_obs = self._wider(self._normalize(self._critic_group, critic_obs))
        value, final_value = through(self.critic, critic_obs).squeeze(-1).split((config.horizon + 1, config.horizon))
        critic_obs = critic_obs[: config.horizon]
        next_value = torch.where(rollout.truncated, final_value, value[1:])
        value, done = value[:-1], rollout.terminated | rollout.truncated
        advantage = advantages(
            rollout.reward, value, next_value, rollout.terminated, done, config.discount, config.gae_lambda
        )
        target = advantage + value
        scalars = torch.stack((advantage, target, value, log_prob(rollout.noise, rollout.log_std)), dim=-1)
        seen = (critic_obs,)
        if self._critic_group == "critic":
            seen = (self._wider(self._normalize("policy", rollout.obs)), critic_obs)
        rest = (rollout.action, rollout.mean, scalars)
        missing = -sum(part.shape[-1] for part in rest) % self._columns
        unused = rollout.reward.new_zeros((*rollout.reward.shape, missing))
        return torch.cat((*seen, unused, *rest), dim=-1).flatten(0, 1)

    def _own_sums(self, rollout: Rollout, samples: Tensor) -> Tensor:
        """What this rank's samples add to the head, float64; `_take_head_apart` says what is in it."""
        moments = [statistics.sums(self._seen(rollout, group)) for group, statistics in self.normalizers.items()]
        done = rollout.terminated | rollout.truncated
        ended = rollout.log.masked_fill(~done[..., None], 0.0).sum((0, 1))
        count = torch.full((1,), samples.shape[0], dtype=torch.float64, device=samples.device)
        parts = (sums(samples[:, _ADVANTAGE, None]), *moments, done.sum().view(1), ended, rollout.faults)
        return torch.cat((count, *(part.flatten().double() for part in parts)))

    def _take_head_apart(self, head: Tensor) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
        """The number of samples; the moments of advantages, and of each group of observations; and sums to be told:
        of episodes, of what they logged, of faults."""
        widths = [2 * len(statistics.mean) for statistics in self.normalizers.values()]
        count, advantage, *moments, told = head.split([1, 2, *widths, len(head) - 3 - sum(widths)])
        return count[0], advantage, [group.view(2, -1) for group in moments], told

    def _standardize(self, samples: Tensor, head: Tensor) -> None:
        """Give the advantages of all ranks together zero mean and unit spread."""
        count, moments, *_ = self._take_head_apart(head)
        mean, square = (moments / count).unbind(0)
        advantage = samples[:, _ADVANTAGE]
        # Where all are alike, rounding may take their variance below zero.
        spread = (square - mean.square()).clamp(min=0.0).sqrt()
        advantage.sub_(mean.float()).div_(spread.float() + 1e-8)

    def _seen(self, rollout: Rollout, group: str) -> Tensor:
        """The observations that were acted upon."""
        return rollout.critic_obs[:-1] if group == self._critic_group else rollout.obs

    def _orders(self) -> Tensor:
        """For each epoch an order of the samples, [epoch, step * world], in which every minibatch has the same number
        of time steps from every world, so that it does not matter how the worlds are spread over ranks."""
        epochs, horizon = self.config.epochs, self.config.horizon
        step = self._epochs + torch.arange(epochs, device=self.env.device)[:, None]
        keys = draw.uniform(self.seed, self._world, step, draw.Stream.MINIBATCH, horizon)
        order = keys.argsort(dim=-1).transpose(1, 2) * self.env.num_envs
        return (order + torch.arange(self.env.num_envs, device=self.env.device)).flatten(1)

    def _minibatches(self, samples: Tensor) -> Iterator[Tensor]:
        """Of all epochs, one after the other."""
        for order in self._orders():
            for part in order.chunk(self.config.minibatches):
                yield samples.index_select(0, part)

    def _over_all_ranks(self, losses: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        """Begin to sum gradient and losses over the samples of all ranks, in one collective: each rank's count by their
        number. The function that is returned waits for it, and returns the losses."""
        if self._group.alone:
            return lambda: losses
        torch.stack(losses, out=self._flat.beside)
        self._flat.message.mul_(self._share)
        wait = self._group.begin_sum_(self._flat.message)

        def finish() -> tuple[Tensor, ...]:
            wait()
            return self._flat.beside.clone().unbind(0)

        return finish

    def _descend(self, losses: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """One gradient step; returns `_LOSS_NAMES` and `_NORM_NAMES`."""
        norms = self._tame(losses[-1])
        self._adam.step()
        return *losses, *norms

    def _differentiate_compiled(self, minibatch: Tensor, old_log_std: Tensor) -> tuple[Tensor, ...]:
        """Puts the gradient into place; returns `_LOSS_NAMES`."""
        with torch.enable_grad():
            loss, *parts = self._losses(minibatch, old_log_std)
            self._flat.differentiate(loss)
        return tuple(parts)

    def _differentiate_by_hand(self, minibatch: Tensor, old_log_std: Tensor) -> tuple[Tensor, ...]:
        """The same, without autograd."""
        obs, critic_obs, action, old_mean, scalars = self._take_apart(minibatch)
        mean, value = self._twins.forward((obs, critic_obs))
        parts, (to_mean, to_log_std, to_value) = derived(
            mean, self.log_std, value.squeeze(1), action, scalars, self.config
        )
        self._twins.backward((to_mean, to_value.unsqueeze(1)))
        self._log_std_gradient.copy_(to_log_std)
        return *parts, divergence(old_mean, old_log_std, mean, self.log_std)

    def _choose_actions(self, obs: Tensor, push: Tensor) -> tuple[Tensor, Tensor]:
        """The policy's mean and, off it by `push`, the action."""
        mean = self._mean(self._normalize("policy", obs))
        return mean, mean + push

    def _minibatch_losses(self, minibatch: Tensor, old_log_std: Tensor) -> tuple[Tensor, ...]:
        """The loss to descend; its parts; and how far the policy has moved from the one that acted."""
        obs, critic_obs, action, old_mean, scalars = self._take_apart(minibatch)
        mean, value = through(self.actor, obs), through(self.critic, critic_obs).squeeze(-1)
        losses = objective(mean, self.log_std, value, action, scalars, self.config)
        return *losses, divergence(old_mean, old_log_std, mean.detach(), self.log_std.detach())

    def _take_apart(self, minibatch: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """What `_pack_samples` packed: observations, the critic's, actions, their means, and four scalars."""
        groups, actions = dict.fromkeys(("policy", self._critic_group)), self.env.num_actions
        widths = [math.ceil(self._widths[group] / self._columns) * self._columns for group in groups]
        seen, rest = minibatch.tensor_split([sum(widths)], dim=1)
        obs, *others = seen.split(widths, dim=1)
        action, mean, scalars = rest[:, -2 * actions - 4 :].split((actions, actions, 4), dim=1)
        return obs, others[0] if others else obs, action, mean, scalars.unbind(1)

    def _clip_and_adapt(self, kl: Tensor) -> tuple[Tensor, ...]:
        """Clip the gradient, and follow the divergence with the learning rate: slower when the policy moves more than
        twice as far as desired, faster below half of it. Returns the gradients' norms."""
        if self.config.desired_kl:
            (low, high), (faster, same, slower) = self._rate_bounds, self._rate_factors
            factor = torch.where(kl > high, slower, torch.where(kl < low, faster, same))
            self._adam.learning_rate.mul_(factor).clamp_(*LEARNING_RATES)
        return self._flat.clip(self.config.max_gradient_norm)

    def _wider(self, obs: Tensor) -> Tensor:
        """With columns of zeros, up to a multiple of `_columns`."""
        missing = -obs.shape[-1] % self._columns
        return functional.pad(obs, (0, missing)) if missing else obs

    def _normalize(self, group: str, obs: Tensor) -> Tensor:
        return self.normalizers[group].normalize(obs) if self.config.normalize_observations else obs

    # What outlives an iteration

    def first_non_finite(self) -> str | None:
        rollout, critic = self._rollout, self._critic_group
        obs, final_obs = {"policy": rollout.obs, critic: rollout.critic_obs}, {critic: rollout.final_critic_obs}
        return in_rollout(self.env, obs, final_obs, rollout.reward, rollout.truncated, rollout.log)

    def policy(self) -> nn.Module:
        if not self.config.normalize_observations:
            return fold_normalizer(self.actor, torch.zeros(1), torch.ones(1))
        statistics = self.normalizers["policy"]
        return fold_normalizer(self.actor, statistics.mean, statistics.std())

    def state(self) -> dict[str, Any]:
        return {
            "networks": {name: tensor.detach().clone() for name, tensor in self._networks.state_dict().items()},
            "normalizers": {group: statistics.state() for group, statistics in self.normalizers.items()},
            "adam": self._adam.state(),
            "iteration": self.iteration,
            "steps": self._steps.clone(),
            "epochs": self._epochs.clone(),
            "envs": self.env.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.load_policy(state)
        self._adam.load_state(state["adam"])
        self._steps.copy_(state["steps"])
        self._epochs.copy_(state["epochs"])
        self.env.load_state(state["envs"])
        self._latest.set(self.env.observe())

    def set_learning_rate(self, learning_rate: float) -> None:
        self._adam.learning_rate.fill_(learning_rate)

    def load_policy(self, state: dict[str, Any]) -> None:
        """Networks and normalisers alone: enough to play and to export."""
        self.iteration = state["iteration"]
        self._networks.load_state_dict(state["networks"])
        for group, statistics in self.normalizers.items():
            statistics.load_state(state["normalizers"][group])
