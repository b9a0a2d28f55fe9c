"""Proximal policy optimization (Schulman et al. 2017) without host syncs.

On CUDA the whole rollout is one graph and the whole update another; on a CPU the same code runs eagerly. All random
numbers are functions of (seed, env, step), so k ranks with N/k envs sample what one rank with N envs samples.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.device.cpu import torch_threads
from paceline.distributed.group import Group
from paceline.distributed.rank import Rank
from paceline.env.vec_env import TensorSpec, VecEnv, action_spec
from paceline.errors import UserError
from paceline.learners.categorical import with_choices
from paceline.learners.encoders import TARGETS, ImageEncoder, images_of
from paceline.learners.learner import Learner
from paceline.learners.networks import Policy, eager_forward, fold_normalizer, forward_padded, mlp, vector_input
from paceline.learners.optimizers import KlAdaptiveLearningRate
from paceline.learners.ppo.cpu_update import BatchedActorCritic
from paceline.learners.ppo.distributions import make_distribution
from paceline.learners.ppo.image_regression import ImageRegression
from paceline.learners.ppo.parameter_averaging import Averaging, ParameterAveraging
from paceline.learners.ppo.samples import PackedSamples, Rollout, SamplePacking, Samples, advantages, minibatch_orders
from paceline.learners.ppo.settings import PpoSettings
from paceline.learners.rollout import Clock, RolloutEnv, first_non_finite, vector_widths
from paceline.tensors.flat import FlatAdam, FlatParameters, pack, unpack
from paceline.tensors.graph import capture, fuse
from paceline.tensors.statistics import RunningStatistics, row_sums, standardize

# Number of outputs of a layer from which several threads are faster than one (measured: 1.05 times; 1.2 at 2**15).
_PARALLEL_LAYER_SIZE = 2**14
_LOSS_NAMES = ("loss/surrogate", "loss/value", "loss/entropy", "policy/kl")
_NORM_NAMES = ("policy/gradient_norm", "critic/gradient_norm")
_REGRESSION_NAMES = ("images/loss", "images/target_error")
"""Loss of the image encoder, and the root mean square of its error in the units of the targets."""


class Ppo(Learner):
    """Learner with separate networks for actor and critic. The critic uses the observation group "critic" if the env
    has one, and the group "policy" otherwise. Images are encoded by a network that actor and critic share, or that is
    trained by regression.

    By default the ranks average the gradient of each minibatch, so they compute what one rank computes with all envs.
    With `averaging` each rank updates with its own samples, and the ranks average their parameters from time to time.

    `gpu_update` selects the update of a GPU, where the compiler optimizes the objective and rows are padded, instead of
    that of a CPU. By default the device of the env decides.
    """

    is_recurrent: ClassVar[bool] = False
    """True if actor and critic have a state; see `RecurrentPpo`."""
    actor: Any
    critic: Any
    _act: Callable[..., tuple[Tensor, ...]]

    def __init__(
        self,
        env: VecEnv,
        config: PpoSettings,
        seed: int,
        group: Group | None = None,
        averaging: Averaging | None = None,
        gpu_update: bool | None = None,
    ):
        super().__init__(env, seed, group or Group(Rank()))
        assert (config.rnn_type != "none") == self.is_recurrent
        self.config, self.seed = config, seed
        device = env.device
        # The update of a rank that averages parameters communicates with no other.
        self._update_group = Group(Rank()) if averaging else self._group
        gpu_update = device.type == "cuda" if gpu_update is None else gpu_update

        images = images_of(env)
        widths = vector_widths(env, "ppo", tuple(images))
        self._actor_groups = ("policy",) if "policy" in widths else ()
        self._critic_groups = ("critic",) if "critic" in widths else self._actor_groups
        self._regresses = bool(images) and config.image_training == "targets"
        self._num_targets = self._check_targets() if self._regresses else 0
        generator = torch.Generator().manual_seed(seed)
        self.encoder = self._make_encoder(images, generator) if images else None
        self._critic_uses_images = bool(images) and "critic" not in widths
        num_features = (self._num_targets or config.image_features) if images else 0

        def make_network(groups: tuple[str, ...], uses_images: bool, outputs: int, gain: float) -> nn.Module:
            inputs = sum(widths[name] for name in groups) + (num_features if uses_images else 0)
            return self._make_network(inputs, outputs, gain, generator).to(device)

        self.distribution = make_distribution(action_spec(env), config.initial_std, device)
        self.actor = make_network(self._actor_groups, bool(images), self.distribution.num_outputs, 0.01)
        self.critic = make_network(self._critic_groups, self._critic_uses_images, 1, 1.0)
        networks = nn.ModuleDict({"actor": self.actor, "critic": self.critic})
        if self.encoder:
            networks["encoder"] = self.encoder
        self._images = {name: self._image_storage(spec) for name, spec in images.items()}
        for name, parameter in self.distribution.parameters.items():
            networks.register_parameter(name, parameter)
        self.normalizers = {name: RunningStatistics(width, device) for name, width in widths.items()}
        if self._regresses:
            self.normalizers[TARGETS] = RunningStatistics(self._num_targets, device)
            # For the update the predictions are a part of the vector of the policy.
            widths["policy"] += self._num_targets
        self._sample_groups = (*widths, *(() if self._regresses else images))
        # On a GPU matrix products are faster if rows are multiples of 16 bytes (measured on an H200 with 101 and 113
        # observations: an update takes 0.92 of the time).
        self._alignment = 8 if gpu_update else 1
        padded_widths = {name: width + -width % self._alignment for name, width in widths.items()}
        self._packing = SamplePacking(padded_widths, self.distribution.num_outputs, self._alignment)

        # Actor and critic are clipped separately: a large error of the critic does not shorten the actor's step.
        of_distribution = self.distribution.parameters.values()
        self.flat_parameters = FlatParameters(
            [*of_distribution, *self.actor.parameters(), *self._encoder_of_policy_parameters()],
            list(self.critic.parameters()),
            extra=len(_LOSS_NAMES),
        )
        self.adam = FlatAdam(self.flat_parameters, config.learning_rate)
        self._adaptive_rate = KlAdaptiveLearningRate(config.desired_kl, device) if config.desired_kl else None
        self._env_index = torch.arange(env.first_env, env.first_env + env.num_envs, device=device)
        # Counters of the random numbers, so that none is used twice even if the settings change on resume.
        self._steps = torch.zeros((), dtype=torch.int64, device=device)
        self._epochs = torch.zeros_like(self._steps)
        self.parts = {
            "networks": networks,
            "adam": self.adam,
            "steps": self._steps,
            "epochs": self._epochs,
        }
        # A checkpoint has no empty parts.
        if self.normalizers:
            self.parts["normalizers"] = self.normalizers
        self._regression = None
        if self.encoder and self._regresses:
            self._regression = ImageRegression(
                self.encoder,
                self.normalizers[TARGETS],
                config.image_learning_rate,
                self._update_group,
                self._rollout_env.share,
            )
            self.parts["image_regression"] = self._regression
        self._averaging = self._make_averaging(averaging) if averaging else None

        # Inference mode makes operations on a CPU cheaper than no_grad does, but cannot be compiled.
        by_autograd = gpu_update or self.is_recurrent or bool(self._encoder_of_policy_parameters())
        without_autograd = torch.no_grad() if by_autograd or self._regresses else torch.inference_mode()
        collect, update = without_autograd(self._collect), without_autograd(self._update)
        self.collect = capture(collect, device, warp=True) if env.capturable else collect
        """Collects a rollout."""
        self.update = capture(update, device) if self._update_group.capturable else update
        """Updates the policy on `rollout` and returns the values of the metrics."""
        self._compute_gradient = self._gradient_by_autograd if by_autograd else self._gradient_by_hand
        self._distribution_gradients = [self.flat_parameters.views(each)[1] for each in of_distribution]
        if not by_autograd:
            self._batched = BatchedActorCritic((self.actor, self.critic), self.flat_parameters)
        if not self.is_recurrent:
            self._actor_forward = eager_forward(self.actor)
        self._act = fuse(self._choose_actions, device)
        self._estimate = fuse(self._estimate_value, device)
        self._pack_samples = fuse(lambda rollout: self._packing.pack(self.make_samples(rollout)), device)
        self._rank_sums = fuse(self._sums_of_this_rank, device)
        self._standardize = fuse(self._standardize_advantages, device)
        self._losses = fuse(self._minibatch_losses, device)
        self._clip_and_adapt = fuse(self._clip_and_adapt_lr, device)

    def _make_network(self, inputs: int, outputs: int, last_gain: float, generator: torch.Generator) -> nn.Module:
        return mlp(inputs, self.config.hidden, outputs, self.config.activation, last_gain, generator)

    def _make_encoder(self, images: dict[str, TensorSpec], generator: torch.Generator) -> ImageEncoder:
        config = self.config
        layers = config.image_channels, config.image_kernels, config.image_strides
        sizes = config.image_features, config.image_pooling, generator, self._num_targets
        return ImageEncoder(images, *layers, *sizes, getattr(torch, config.image_dtype)).to(self.env.device)

    def _make_averaging(self, settings: Averaging) -> ParameterAveraging:
        optimizers = [self.adam, *([self._regression.adam] if self._regression else [])]
        adapted = [self.adam.learning_rate] if self._adaptive_rate else []
        num_totals = 1 + len(self.env.log_names) + len(self.env.faults())
        share = self._rollout_env.share
        return ParameterAveraging(settings, self._group, share, optimizers, adapted, self.normalizers, num_totals)

    def _encoder_of_policy_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the encoder if the loss of the policy trains it."""
        return list(self.encoder.parameters()) if self.encoder and not self._regresses else []

    def _check_targets(self) -> int:
        """Return the number of targets of the regression. Raise UserError if the env lacks a group."""
        missing = {"policy", "critic", TARGETS} - self.env.observation_spec.keys()
        if missing:
            raise UserError(
                f"--ppo.image-training targets: the task has no observation group {', '.join(sorted(missing))}; use "
                "--ppo.image-training policy, or add the group to Task.observe"
            )
        return self.env.observation_spec[TARGETS].shape[0]

    def _image_storage(self, spec: TensorSpec) -> Tensor:
        """Return memory for the images of a rollout, [step, env, height, width, channel]."""
        channels, height, width = spec.shape
        shape = (self.config.horizon + 1, self.env.num_envs, height, width, channels)
        return torch.zeros(shape, dtype=spec.dtype, device=self.env.device)

    # One iteration

    def learn(self) -> dict[str, float]:
        self._rollout_env.reset_once()
        clock = Clock(self.env.device)
        self.rollout = self.collect()
        clock.lap()
        with torch_threads(self._update_threads()):
            values = self.update()
            if self._averaging:
                values = self._averaging.end_iteration(values)
        clock.lap()
        regression = _REGRESSION_NAMES if self._regresses else ()
        loss_names = (*_LOSS_NAMES, *_NORM_NAMES, "policy/learning_rate", *self.distribution.metric_names, *regression)
        metrics = self._rollout_env.metrics(values.tolist(), loss_names, clock)
        self.iteration += 1
        return metrics

    def _collect(self) -> Rollout:
        env = self.env
        env.prefetch_random(self.config.horizon)
        noise = self._sample_noise()
        scaled_noise = self.distribution.scale_noise(noise)
        observations, outputs, actions, steps = [self._store_images(0, self._rollout_env.obs)], [], [], []
        values: list[Tensor] = []
        features: list[Tensor] = []
        for index, step_noise in enumerate(scaled_noise.unbind(0), start=1):
            step, output, action, *more = self._step(observations[-1], step_noise)
            outputs.append(output)
            actions.append(action)
            (features if self._regresses else values).extend(more)
            steps.append(step)
            observations.append(self._store_images(index, step.obs))
        self._rollout_env.set_obs(observations[-1])
        if values:
            values.append(self._estimate(observations[-1]))
        final_groups = () if self._critic_uses_images else self._critic_groups
        return Rollout(
            obs={name: torch.stack([obs[name] for obs in observations]) for name in self.normalizers} | self._images,
            final_obs={name: torch.stack([step.final_obs[name] for step in steps]) for name in final_groups},
            value=torch.stack(values) if values else None,
            features=torch.stack(features) if features else None,
            action=torch.stack(actions),
            output=torch.stack(outputs),
            log_std=self.distribution.log_std.detach().clone(),
            noise=noise,
            faults=env.faults(),
            **{name: torch.stack([getattr(step, name) for step in steps]) for name in Rollout.step_fields},
        )

    def _update(self) -> Tensor:
        """Run all epochs on the latest rollout. Return the values of the metrics."""
        rollout = self.rollout
        packed = self._pack_samples(rollout)
        # One collective for all statistics over the samples of all ranks.
        sums = self._rank_sums(rollout, packed)
        advantage_sums, totals, *group_sums = unpack(self._update_group.sum_(pack(sums)), sums)
        self._standardize(packed, advantage_sums)
        self.samples = self._packing.unpack(packed)
        """Samples of the latest iteration, with standardized advantages."""
        losses: list[Tensor] = []
        minibatches = self._minibatches(packed)
        minibatch = next(minibatches)
        while minibatch is not None:
            finish_average = self._begin_average(self._compute_gradient(minibatch, rollout.log_std))
            # The next minibatch is gathered while the sum over ranks is computed.
            minibatch = next(minibatches, None)
            losses.extend(self._optimizer_step(finish_average()))
        if self._averaging:
            self._averaging.add(totals, group_sums)
        for normalizer, sums in zip(self.normalizers.values(), group_sums, strict=True):
            normalizer.merge(sums)
        errors = self._train_encoder(rollout)
        self._steps += self.config.horizon
        self._epochs += self.config.epochs
        means = torch.stack(losses).unflatten(0, (-1, len(_LOSS_NAMES) + len(_NORM_NAMES))).mean(0)
        of_policy = torch.stack((self.adam.learning_rate, *self.distribution.metrics()))
        return torch.cat((totals, means, of_policy, errors))

    def _train_encoder(self, rollout: Rollout) -> Tensor:
        """Train the encoder by regression, if it is, on one minibatch per step of the rollout, so that each sample is
        used once. Return the values of `_REGRESSION_NAMES`, or an empty tensor."""
        if self._regression is None:
            return self.adam.learning_rate.new_zeros(0)
        images = {name: rollout.obs[name][:-1].flatten(0, 1) for name in self._images}
        targets = rollout.obs[TARGETS][:-1].flatten(0, 1)
        (order,) = minibatch_orders(self.seed, self._env_index, self._epochs.view(1), self.config.horizon)
        losses = [
            self._regression.step({name: image[index] for name, image in images.items()}, targets[index])
            for index in order.chunk(self.config.horizon)
        ]
        loss, squared_error = torch.stack(losses).mean(0).unbind(0)
        return torch.stack((loss, squared_error.sqrt()))

    def _update_threads(self) -> int:
        """Return the number of threads for the update: one, unless a layer is large enough to be divided."""
        if self.encoder:
            return self._group.rank.cores
        return self._group.rank.cores if self._layer_size() >= _PARALLEL_LAYER_SIZE else 1

    def _layer_size(self) -> int:
        """Return the number of outputs of the largest layer in a minibatch."""
        return self.env.num_envs * self.config.horizon // self.config.minibatches * max(self.config.hidden)

    # The rollout

    def _sample_noise(self) -> Tensor:
        """Sample random numbers for the actions of an iteration, [step, env, outputs of the actor]."""
        step = self._steps + torch.arange(self.config.horizon, device=self.env.device)[:, None]
        return self.distribution.sample_noise(self.seed, self._env_index, step)

    def _store_images(self, index: int, obs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy images, which the env overwrites, into the rollout. Return the observations with the copies."""
        for name, images in self._images.items():
            images[index].copy_(obs[name].permute(0, 2, 3, 1))
        return obs | {name: images[index].permute(0, 3, 1, 2) for name, images in self._images.items()}

    def _step(self, obs: dict[str, Tensor], noise: Tensor) -> tuple[Any, ...]:
        """Step the env. Return the step and the results of `_choose_actions`."""
        output, action, *more = self._act(obs, noise)
        return self.env.step(action), output, action, *more

    def _choose_actions(self, obs: dict[str, Tensor], noise: Tensor) -> tuple[Tensor, ...]:
        """Return the output of the actor, and the action for the scaled `noise`. If the encoder is trained by
        regression, also return its predictions; otherwise, if the critic uses images, the value, because both networks
        share the features."""
        vectors = {name: self._normalize(name, obs[name]) for name in self._actor_groups}
        features = self.encoder(obs) if self.encoder else None
        x = vector_input(vectors, self._actor_groups, features)
        output = self._actor_forward(x)
        action = self.distribution.act(output, noise)
        if self._regresses and features is not None:
            return output, action, features
        # The critic has the inputs of the actor if it uses images.
        value = (self.critic(x).squeeze(-1),) if self._critic_uses_images else ()
        return output, action, *value

    def _estimate_value(self, obs: dict[str, Tensor]) -> Tensor:
        vectors = {name: self._normalize(name, obs[name]) for name in self._critic_groups}
        features = self.encoder(obs) if self.encoder else None
        return self.critic(vector_input(vectors, self._critic_groups, features)).squeeze(-1)

    def _normalize(self, group: str, obs: Tensor) -> Tensor:
        return self.normalizers[group].normalize(obs) if self.config.normalize_observations else obs

    def _pad(self, rows: Tensor) -> Tensor:
        """Add columns of zeros up to a multiple of the alignment."""
        padding = -rows.shape[-1] % self._alignment
        return functional.pad(rows, (0, padding)) if padding else rows

    # From the rollout to minibatches

    def make_samples(self, rollout: Rollout) -> Samples:
        """Compute values and advantages, which are not standardized yet. The tensors are [step, env, ...]."""
        if rollout.value is not None:
            return self._samples_with_value(rollout, rollout.value)
        config = self.config
        critic_obs = {
            name: self._pad(self._normalize(name, torch.cat((rollout.obs[name], final_obs))))
            for name, final_obs in rollout.final_obs.items()
        }
        values = forward_padded(self.critic, vector_input(critic_obs, self._critic_groups)).squeeze(-1)
        value, final_value = values.split((config.horizon + 1, config.horizon))
        next_value = torch.where(rollout.truncated, final_value, value[1:])
        obs = {
            name: critic_obs[name][: config.horizon] if name in critic_obs else self._sample_obs(name, rollout)
            for name in self._sample_groups
        }
        return self._samples(rollout, obs, value[:-1], next_value)

    def _samples_with_value(self, rollout: Rollout, value: Tensor) -> Samples:
        """Do the same with values that the rollout has. There are no images of the states before a reset, so after a
        time limit the value of the state before the step is used, as RSL-RL and RL-Games do."""
        obs = {name: self._sample_obs(name, rollout) for name in self._sample_groups}
        final_value = value[:-1] if rollout.final_value is None else rollout.final_value
        return self._samples(rollout, obs, value[:-1], torch.where(rollout.truncated, final_value, value[1:]))

    def _sample_obs(self, name: str, rollout: Rollout) -> Tensor:
        rows = rollout.obs[name][:-1]
        if name in self._images:
            return rows
        rows = self._normalize(name, rows)
        return self._pad(torch.cat((rollout.features, rows), dim=-1) if rollout.features is not None else rows)

    def _samples(self, rollout: Rollout, obs: dict[str, Tensor], value: Tensor, next_value: Tensor) -> Samples:
        discount, decay = self.config.discount, self.config.gae_lambda
        advantage = advantages(rollout.reward, value, next_value, rollout.terminated, rollout.done, discount, decay)
        action, log_prob = self.distribution.samples_of(rollout)
        return Samples(
            obs=obs,
            action=action,
            output=rollout.output,
            advantage=advantage,
            value_target=advantage + value,
            value=value,
            log_prob=log_prob,
        )

    def _sums_of_this_rank(self, rollout: Rollout, packed: PackedSamples) -> list[Tensor]:
        """Return the tensors to sum over ranks, float64: `row_sums` of the advantages, totals of the metrics, and
        `row_sums` of each observation group."""
        advantage = self._packing.unpack(packed).advantage.unsqueeze(1)
        totals = RolloutEnv.totals(rollout.done, rollout.log, rollout.faults)
        return [
            row_sums(advantage),
            totals,
            *(normalizer.sums(rollout.obs[name][:-1]) for name, normalizer in self.normalizers.items()),
        ]

    def _standardize_advantages(self, packed: PackedSamples, sums: Tensor) -> None:
        """Standardize the advantages over all ranks in place."""
        advantage = self._packing.unpack(packed).advantage.unsqueeze(1)
        advantage.copy_(standardize(advantage, sums, correction=0))

    def _minibatches(self, packed: PackedSamples) -> Iterator[Any]:
        """Gather the minibatches of all epochs one after the other."""
        epochs = self._epochs + torch.arange(self.config.epochs, device=self.env.device)
        for order in minibatch_orders(self.seed, self._env_index, epochs, self.config.horizon):
            for index in order.chunk(self.config.minibatches):
                yield packed.gather(index)

    # One minibatch

    def _gradient_by_autograd(self, minibatch: Any, old_log_std: Tensor) -> tuple[Tensor, ...]:
        """Compute the gradient in place; return the values of `_LOSS_NAMES`."""
        with torch.enable_grad():
            loss, *parts = self._losses(minibatch, old_log_std)
            self.flat_parameters.backward(loss)
        return tuple(parts)

    def _minibatch_losses(self, minibatch: Any, old_log_std: Tensor) -> tuple[Tensor, ...]:
        """Return the loss to minimize, and the values of `_LOSS_NAMES`."""
        samples, output, value = self._evaluate(minibatch)
        losses = self.distribution.losses(output, value, samples, self.config)
        return *losses, self.distribution.kl_divergence(samples.output, old_log_std, output.detach())

    def _evaluate(self, minibatch: Any) -> tuple[Samples, Tensor, Tensor]:
        """Return the samples of a minibatch, and the output of the actor and the value of each."""
        samples = self._packing.unpack(minibatch)
        of_actor, of_critic = self._network_inputs(samples.obs)
        return samples, forward_padded(self.actor, of_actor), forward_padded(self.critic, of_critic).squeeze(-1)

    def _network_inputs(self, obs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the inputs of actor and critic from normalized observations."""
        features = self.encoder(obs) if self.encoder and not self._regresses else None
        of_critic = features if self._critic_uses_images else None
        return (
            vector_input(obs, self._actor_groups, features),
            vector_input(obs, self._critic_groups, of_critic),
        )

    def _gradient_by_hand(self, minibatch: PackedSamples, old_log_std: Tensor) -> tuple[Tensor, ...]:
        """Do the same as `_gradient_by_autograd` without autograd."""
        samples = self._packing.unpack(minibatch)
        output, value = self._batched.forward(
            (vector_input(samples.obs, self._actor_groups), vector_input(samples.obs, self._critic_groups))
        )
        losses, (by_output, by_parameters, by_value) = self.distribution.gradient(
            output, value.squeeze(1), samples, self.config
        )
        self._batched.backward((by_output, by_value.unsqueeze(1)))
        for gradient, each in zip(self._distribution_gradients, by_parameters, strict=True):
            gradient.copy_(each)
        return *losses, self.distribution.kl_divergence(samples.output, old_log_std, output)

    def _begin_average(self, losses: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        """Begin to average gradient and losses over the samples of all ranks. The returned function waits for the
        result and returns the losses."""
        if not self._update_group.is_distributed:
            return lambda: losses
        finish = self.flat_parameters.begin_average(self._update_group.begin_sum_, self._rollout_env.share, losses)
        return lambda: finish().unbind(0)

    def _optimizer_step(self, losses: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Update the networks; return the values of `_LOSS_NAMES` and `_NORM_NAMES`."""
        norms = self._clip_and_adapt(losses[-1])
        self.adam.step()
        return *losses, *norms

    def _clip_and_adapt_lr(self, kl: Tensor) -> tuple[Tensor, ...]:
        """Clip the gradient and adapt the learning rate; return the gradient norms before clipping."""
        if self._adaptive_rate:
            self._adaptive_rate.update_(self.adam.learning_rate, kl)
        return self.flat_parameters.clip(self.config.max_gradient_norm)

    # Between iterations

    def first_non_finite(self) -> str | None:
        first_obs = {name: obs[0] for name, obs in self.rollout.obs.items()}
        return first_non_finite(self.env, first_obs, self.rollout.steps())

    def policy(self) -> Policy:
        if self._averaging is None:
            return self._make_policy(self.normalizers)
        with self._averaging.latest_sync():
            return deepcopy(self._make_policy(self._averaging.normalizers))

    def _make_policy(self, normalizers: dict[str, RunningStatistics]) -> Policy:
        actor = self.actor
        if self.config.normalize_observations and self._actor_groups:
            used = [normalizers[name] for name in self._actor_groups]
            mean, std = torch.cat([each.mean for each in used]), torch.cat([each.std() for each in used])
            actor = fold_normalizer(actor, mean, std)
        return Policy(with_choices(actor, self.distribution.choices), self._actor_groups, self.encoder)

    def state(self) -> dict[str, Any]:
        if self._averaging is None:
            return super().state()
        # The state is the same on all ranks only after a sync.
        self._averaging.finish_period()
        return super().state() | {"averaging": self._averaging.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        if self._averaging:
            self._averaging.load_state(state.get("averaging"))

    def set_learning_rate(self, learning_rate: float) -> None:
        self.adam.learning_rate.fill_(learning_rate)
