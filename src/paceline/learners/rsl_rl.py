"""RSL-RL's PPO on our envs and ranks. Its runner, which logs and saves by itself, is not used."""

from typing import Any, cast

import torch
from rsl_rl.algorithms import PPO
from rsl_rl.models import MLPModel
from rsl_rl.storage import RolloutStorage
from tensordict import TensorDict
from torch import Tensor, nn

from paceline.distributed.group import Group
from paceline.env.vec_env import VecEnv
from paceline.learners.clock import Clock
from paceline.learners.stepper import Stepper, load_optimizer_state, optimizer_state, same_on_all_ranks
from paceline.settings.rsl_rl import RslRlConfig


class RslRl:
    """A `Learner`; the critic sees the group "critic" where the env has one."""

    def __init__(self, env: VecEnv, config: RslRlConfig, seed: int, group: Group):
        self.env, self.config, self.iteration = env, config, 0
        self._stepper = Stepper(env, seed, group)
        obs = self._observations()
        groups = {"actor": ["policy"], "critic": ["critic" if "critic" in obs.keys() else "policy"]}  # noqa: SIM118
        torch.manual_seed(seed)
        network = (config.hidden_dims, config.activation, config.obs_normalization)
        noise = {"class_name": "GaussianDistribution", "init_std": config.init_std, "std_type": config.std_type}
        self._actor = _Actor(obs, groups, "actor", env.actions, *network, noise)
        self._critic = MLPModel(obs, groups, "critic", 1, *network)
        storage = RolloutStorage(
            "rl", env.num_envs, config.num_steps_per_env, obs, [env.actions], cast("str", env.device)
        )
        self._algorithm = _Algorithm(group, self._actor, self._critic, storage, config)
        same_on_all_ranks(group, [*self._actor.parameters(), *self._critic.parameters()])

    def learn(self) -> dict[str, float]:
        algorithm, stepper = self._algorithm, self._stepper
        stepper.begin(self.iteration, self.config.num_steps_per_env)
        clock = Clock(self.env.device)
        with torch.no_grad():
            obs = self._observations()
            for _ in range(self.config.num_steps_per_env):
                step = stepper.step(algorithm.act(obs))
                obs = self._rows(step.obs)
                done = (step.terminated | step.truncated).long()
                algorithm.process_env_step(obs, step.reward, done, {"time_outs": step.truncated})
            algorithm.compute_returns(obs)
        clock.lap()
        self._actor.divergences.clear()
        losses: dict[str, Any] = {f"loss/{name}": value for name, value in algorithm.update().items()}
        clock.lap()
        if self._actor.divergences:
            losses["policy/kl"] = torch.stack(self._actor.divergences).mean()
        losses["policy/learning_rate"] = algorithm.learning_rate
        losses["policy/std"] = self._actor.output_std
        self.iteration += 1
        return stepper.report(losses, clock)

    def sound(self) -> bool:
        return self._stepper.sound()

    def policy(self) -> nn.Module:
        return self._actor.as_onnx(verbose=False).cpu().requires_grad_(False)

    def state(self) -> dict[str, Any]:
        networks = {"actor": self._actor, "critic": self._critic}
        return {
            "networks": {
                name: {key: tensor.clone() for key, tensor in network.state_dict().items()}
                for name, network in networks.items()
            },
            "optimizer": optimizer_state(self._algorithm.optimizer),
            "iteration": self.iteration,
            "worlds": self._stepper.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.load_policy(state)
        self._critic.load_state_dict(state["networks"]["critic"])
        load_optimizer_state(self._algorithm.optimizer, state["optimizer"])
        self._algorithm.learning_rate = state["optimizer"]["learning_rate"][0]
        self._stepper.load_state(state["worlds"])

    def load_policy(self, state: dict[str, Any]) -> None:
        self.iteration = state["iteration"]
        self._actor.load_state_dict(state["networks"]["actor"])

    def _observations(self) -> TensorDict:
        return self._rows(self._stepper.obs)

    def _rows(self, obs: dict[str, Tensor]) -> TensorDict:
        return TensorDict(cast("Any", obs), batch_size=[self.env.num_envs], device=self.env.device)


class _Actor(MLPModel):
    """Remembers how far each minibatch found the policy moved."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.divergences: list[Tensor] = []

    def get_kl_divergence(self, old_params: tuple[Tensor, ...], new_params: tuple[Tensor, ...]) -> Tensor:
        divergence = super().get_kl_divergence(old_params, new_params)
        self.divergences.append(divergence.mean())
        return divergence


class _Algorithm(PPO):
    """Advantages are normalised over the samples of all ranks, not by each rank over its own."""

    def __init__(self, group: Group, actor: MLPModel, critic: MLPModel, storage: RolloutStorage, config: RslRlConfig):
        self._group = group
        ranks = {"global_rank": group.rank.index, "local_rank": group.rank.local_index, "world_size": group.size}
        names = (
            "num_learning_epochs",
            "num_mini_batches",
            "clip_param",
            "gamma",
            "lam",
            "value_loss_coef",
            "entropy_coef",
            "learning_rate",
            "max_grad_norm",
            "use_clipped_value_loss",
            "schedule",
            "desired_kl",
        )
        super().__init__(
            actor,
            critic,
            storage,
            **{name: getattr(config, name) for name in names},
            normalize_advantage_per_mini_batch=config.normalize_advantage_per_mini_batch,
            device=storage.device,
            multi_gpu_cfg=None if group.alone else ranks,
        )

    def compute_returns(self, obs: TensorDict) -> None:
        # Stock would normalise over this rank's samples, unless told that it comes later.
        per_minibatch, self.normalize_advantage_per_mini_batch = self.normalize_advantage_per_mini_batch, True
        super().compute_returns(obs)
        self.normalize_advantage_per_mini_batch = per_minibatch
        if per_minibatch:
            return
        advantages = self.storage.advantages
        count = torch.full((), advantages.numel(), dtype=torch.float64, device=advantages.device)
        own = torch.stack((count, advantages.sum(dtype=torch.float64), advantages.double().square().sum()))
        count, total, squares = self._group.sum_(own).unbind(0)
        mean = total / count
        spread = ((squares - total * mean).clamp(min=0.0) / (count - 1.0).clamp(min=1.0)).sqrt()
        self.storage.advantages = ((advantages - mean.float()) / (spread.float() + 1e-8)).detach()
