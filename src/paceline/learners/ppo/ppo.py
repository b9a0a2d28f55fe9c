"""Proximal policy optimization (Schulman et al. 2017) without host syncs.

On CUDA the whole rollout is one graph and the whole update another; on a CPU the same code runs eagerly. All random
numbers are functions of (seed, env, step), so k ranks with N/k envs sample what one rank with N envs samples.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paceline.device.cpu import torch_threads
from paceline.distributed.group import Group
from paceline.distributed.rank import Rank
from paceline.env.vec_env import VecEnv, action_spec
from paceline.learners.encoders import TARGETS
from paceline.learners.learner import Learner
from paceline.learners.networks import Policy, eager_forward, forward_padded, mlp, vector_input
from paceline.learners.optimizers import KlAdaptiveLearningRate
from paceline.learners.ppo.cpu_update import BatchedActorCritic
from paceline.learners.ppo.distributions import make_distribution
from paceline.learners.ppo.image_regression import REGRESSION_NAMES, ImageRegression
from paceline.learners.ppo.observations import Observations
from paceline.learners.ppo.parameter_averaging import Averaging, ParameterAveraging
from paceline.learners.ppo.returns import make_samples
from paceline.learners.ppo.samples import PackedSamples, Rollout, SamplePacking, Samples, minibatch_orders
from paceline.learners.ppo.settings import PpoSettings
from paceline.learners.rollout import Clock, RolloutEnv, first_non_finite
from paceline.tensors.flat import FlatAdam, FlatParameters, pack, unpack
from paceline.tensors.graph import capture, fuse
from paceline.tensors.statistics import row_sums, standardize

# Number of outputs of a layer from which several threads are faster than one (measured: 1.05 times; 1.2 at 2**15).
_PARALLEL_LAYER_SIZE = 2**14
_LOSS_NAMES = ("loss/surrogate", "loss/value", "loss/entropy", "policy/kl")
_NORM_NAMES = ("policy/gradient_norm", "critic/gradient_norm")


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

        # On a GPU matrix products are faster if rows are multiples of 16 bytes (measured on an H200 with 101 and 113
        # observations: an update takes 0.92 of the time).
        alignment = 8 if gpu_update else 1
        generator = torch.Generator().manual_seed(seed)
        self._inputs = inputs = Observations(env, config, generator, alignment)
        self.encoder, self.normalizers = inputs.encoder, inputs.normalizers
        self.distribution = make_distribution(action_spec(env), config.initial_std, device)
        self.actor = self._make_network(inputs.actor_width, self.distribution.num_outputs, 0.01, generator).to(device)
        self.critic = self._make_network(inputs.critic_width, 1, 1.0, generator).to(device)
        networks = nn.ModuleDict({"actor": self.actor, "critic": self.critic})
        if self.encoder:
            networks["encoder"] = self.encoder
        for name, parameter in self.distribution.parameters.items():
            networks.register_parameter(name, parameter)
        self._packing = SamplePacking(inputs.sample_widths, self.distribution.num_outputs, alignment)

        # Actor and critic are clipped separately: a large error of the critic does not shorten the actor's step.
        self.flat_parameters = FlatParameters(
            [*self.distribution.parameters.values(), *self.actor.parameters(), *inputs.encoder_of_policy_parameters()],
            list(self.critic.parameters()),
            extra=len(_LOSS_NAMES),
        )
        self.adam = FlatAdam(self.flat_parameters, config.learning_rate)
        self._adaptive_rate = KlAdaptiveLearningRate(config.desired_kl, device) if config.desired_kl else None
        self._env_index = torch.arange(env.first_env, env.first_env + env.num_envs, device=device)
        # Counters of the random numbers, so that none is used twice even if the settings change on resume.
        self._steps = torch.zeros((), dtype=torch.int64, device=device)
        self._epochs = torch.zeros_like(self._steps)
        self.parts = {"networks": networks, "adam": self.adam, "steps": self._steps, "epochs": self._epochs}
        # A checkpoint has no empty parts.
        if self.normalizers:
            self.parts["normalizers"] = self.normalizers
        self._regression = None
        if self.encoder and inputs.regresses:
            ranks = self._update_group, self._rollout_env.share
            statistics, learning_rate = self.normalizers[TARGETS], config.image_learning_rate
            self._regression = ImageRegression(self.encoder, statistics, learning_rate, *ranks)
            self.parts["image_regression"] = self._regression
        self._averaging = self._make_averaging(averaging) if averaging else None
        self._prepare(gpu_update)

    def _prepare(self, gpu_update: bool) -> None:
        """Compile and capture the functions of an iteration, on CUDA, and select the update."""
        env, device, inputs = self.env, self.env.device, self._inputs
        # Inference mode makes operations on a CPU cheaper than no_grad does, but cannot be compiled.
        by_autograd = gpu_update or self.is_recurrent or bool(inputs.encoder_of_policy_parameters())
        without_autograd = torch.no_grad() if by_autograd or inputs.regresses else torch.inference_mode()
        collect, update = without_autograd(self._collect), without_autograd(self._update)
        self.collect = capture(collect, device, warp=True) if env.capturable else collect
        """Collects a rollout."""
        self.update = capture(update, device) if self._update_group.capturable else update
        """Updates the policy on `rollout` and returns the values of the metrics."""
        self._compute_gradient = self._gradient_by_autograd if by_autograd else self._gradient_by_hand
        of_distribution = self.distribution.parameters.values()
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

    def _make_averaging(self, settings: Averaging) -> ParameterAveraging:
        optimizers = [self.adam, *([self._regression.adam] if self._regression else [])]
        adapted = [self.adam.learning_rate] if self._adaptive_rate else []
        num_totals = 1 + len(self.env.log_names) + len(self.env.faults())
        share = self._rollout_env.share
        return ParameterAveraging(settings, self._group, share, optimizers, adapted, self.normalizers, num_totals)

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
        regression = REGRESSION_NAMES if self._regression else ()
        loss_names = (*_LOSS_NAMES, *_NORM_NAMES, "policy/learning_rate", *self.distribution.metric_names, *regression)
        metrics = self._rollout_env.metrics(values.tolist(), loss_names, clock)
        self.iteration += 1
        return metrics

    def _collect(self) -> Rollout:
        env = self.env
        env.prefetch_random(self.config.horizon)
        noise = self._sample_noise()
        scaled_noise = self.distribution.scale_noise(noise)
        observations, outputs, actions, steps = [self._inputs.store_images(0, self._rollout_env.obs)], [], [], []
        values: list[Tensor] = []
        features: list[Tensor] = []
        for index, step_noise in enumerate(scaled_noise.unbind(0), start=1):
            step, output, action, *more = self._step(observations[-1], step_noise)
            outputs.append(output)
            actions.append(action)
            (features if self._regression else values).extend(more)
            steps.append(step)
            observations.append(self._inputs.store_images(index, step.obs))
        self._rollout_env.set_obs(observations[-1])
        if values:
            values.append(self._estimate(observations[-1]))
        final_groups = () if self._inputs.critic_uses_images else self._inputs.critic_groups
        return Rollout(
            obs={name: torch.stack([obs[name] for obs in observations]) for name in self.normalizers}
            | self._inputs.images,
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
        used once. Return the values of `REGRESSION_NAMES`, or an empty tensor."""
        if self._regression is None:
            return self.adam.learning_rate.new_zeros(0)
        images = {name: rollout.obs[name][:-1].flatten(0, 1) for name in self._inputs.images}
        targets = rollout.obs[TARGETS][:-1].flatten(0, 1)
        (order,) = minibatch_orders(self.seed, self._env_index, self._epochs.view(1), self.config.horizon)
        return self._regression.train(images, targets, order.chunk(self.config.horizon))

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

    def _step(self, obs: dict[str, Tensor], noise: Tensor) -> tuple[Any, ...]:
        """Step the env. Return the step and the results of `_choose_actions`."""
        output, action, *more = self._act(obs, noise)
        return self.env.step(action), output, action, *more

    def _choose_actions(self, obs: dict[str, Tensor], noise: Tensor) -> tuple[Tensor, ...]:
        """Return the output of the actor, and the action for the scaled `noise`. If the encoder is trained by
        regression, also return its predictions; otherwise, if the critic uses images, the value, because both networks
        share the features."""
        groups, features = self._inputs.actor_groups, self.encoder(obs) if self.encoder else None
        x = vector_input(self._inputs.normalized(obs, groups), groups, features)
        output = self._actor_forward(x)
        action = self.distribution.act(output, noise)
        if self._inputs.regresses and features is not None:
            return output, action, features
        # The critic has the inputs of the actor if it uses images.
        value = (self.critic(x).squeeze(-1),) if self._inputs.critic_uses_images else ()
        return output, action, *value

    def _estimate_value(self, obs: dict[str, Tensor]) -> Tensor:
        groups, features = self._inputs.critic_groups, self.encoder(obs) if self.encoder else None
        return self.critic(vector_input(self._inputs.normalized(obs, groups), groups, features)).squeeze(-1)

    # From the rollout to minibatches

    def make_samples(self, rollout: Rollout) -> Samples:
        """Compute values and advantages, which are not standardized yet. The tensors are [step, env, ...]."""
        return make_samples(rollout, self._inputs, self.critic, self.distribution, self.config)

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
        of_actor, of_critic = self._inputs.network_inputs(samples.obs)
        return samples, forward_padded(self.actor, of_actor), forward_padded(self.critic, of_critic).squeeze(-1)

    def _gradient_by_hand(self, minibatch: PackedSamples, old_log_std: Tensor) -> tuple[Tensor, ...]:
        """Do the same as `_gradient_by_autograd` without autograd."""
        samples = self._packing.unpack(minibatch)
        output, value = self._batched.forward(self._inputs.network_inputs(samples.obs))
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
            return self._inputs.make_policy(self.actor, self.distribution.choices, self.normalizers)
        with self._averaging.latest_sync():
            normalizers = self._averaging.normalizers
            return deepcopy(self._inputs.make_policy(self.actor, self.distribution.choices, normalizers))

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
