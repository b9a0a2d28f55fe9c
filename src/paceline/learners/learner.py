"""The base class of learners, and the table of learners."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.distributed.group import Group
from paceline.env.vec_env import VecEnv
from paceline.errors import UserError, unknown
from paceline.learners.networks import Policy, reset_state_
from paceline.learners.rollout import Clock, RolloutEnv, first_non_finite
from paceline.learners.settings import Settings
from paceline.validation import from_dict

_POLICY_PARTS = {"networks", "normalizers"}
_ENV_PREFIX = "learner/"
"""First characters of the names of `Learner.env_parts` among the states of the envs."""


class Learner(ABC):
    """Trains a policy in a `VecEnv`, one iteration at a time. A subclass calls this constructor first, and sets
    `parts`."""

    parts: dict[str, Any]
    """Parts of a checkpoint other than the iteration and the envs, as in `state_of`: "networks", "normalizers" and
    others."""
    env_parts: dict[str, Tensor]
    """Tensors [env, ...] of a learner, such as recurrent states, that a checkpoint stores with the states of the envs.
    They are zero at the start of an episode."""

    collect: Callable[[], Any]
    """Collects a rollout."""
    update: Callable[[], Any]
    """Updates the policy on the latest rollout and returns the losses by name."""

    def __init__(self, env: VecEnv, seed: int, group: Group):
        self.env = env
        self.iteration = 0
        """Number of iterations done."""
        self._group = group
        self._rollout_env = RolloutEnv(env, seed, group)
        self.env_parts = {}

    def learn(self) -> dict[str, float]:
        """Run one iteration, which collects a rollout and updates the policy, and return its metrics.

        Metrics of all ranks: "episodes", the number of episodes that ended; for each of the env's `log_names`, the sum
        over these episodes; "failures" and "overflows" of `VecEnv.faults`; and the losses. Metrics of this rank:
        "seconds/collect" and "seconds/update".
        """
        self._rollout_env.begin_iteration(self.iteration)
        clock = Clock(self.env.device)
        self.collect()
        clock.lap()
        losses = self.update()
        clock.lap()
        self.iteration += 1
        return self._rollout_env.report(losses, clock)

    @abstractmethod
    def policy(self) -> Policy:
        """Return the current policy, without exploration noise, as a module over a dict of observation groups."""

    @abstractmethod
    def set_learning_rate(self, learning_rate: float) -> None:
        """Replace the current learning rate, which may have been adapted since the start."""

    def state(self) -> dict[str, Any]:
        """Return the full state as nested dicts of tensors and numbers. "iteration" is the number of iterations done,
        and "envs" the state of this rank's envs, tensors [env, ...]. All other values are the same on all ranks."""
        envs = self.env.state() | {_ENV_PREFIX + name: part.clone() for name, part in self.env_parts.items()}
        return {**state_of(self.parts), "iteration": self.iteration, "envs": envs}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned."""
        self._load_parts(state, self.parts)
        envs = state["envs"]
        self._rollout_env.load_state({name: part for name, part in envs.items() if not name.startswith(_ENV_PREFIX)})
        for name, part in self.env_parts.items():
            part.copy_(envs[_ENV_PREFIX + name])
            # An env that cannot restore its state has started a new episode.
            reset_state_(part, self.env.state()["episode_step"] == 0)

    def policy_state(self) -> dict[str, Any]:
        """Return the part of `state` that `load_policy` uses."""
        parts = {name: self.parts[name] for name in self.parts.keys() & _POLICY_PARTS}
        return {**state_of(parts), "iteration": self.iteration}

    def load_policy(self, state: dict[str, Any]) -> None:
        """Load only the policy from a state that `state` returned, for any number of envs."""
        self._load_parts(state, self.parts.keys() & _POLICY_PARTS)

    def _load_parts(self, state: dict[str, Any], names: Iterable[str]) -> None:
        self.iteration = state["iteration"]
        load_state_of({name: self.parts[name] for name in names}, state)

    def first_non_finite(self) -> str | None:
        """Return a phrase that names the first reward or observation of this rank's envs in the latest iteration that
        is not finite, or None if all are finite. It synchronizes with the device."""
        return first_non_finite(self.env, self._rollout_env.first_obs, self._rollout_env.steps)


def state_of(part: Any) -> Any:
    """Return a copy of the state of a part of a learner, as nested dicts of tensors and numbers with string keys. A
    part is a module, an optimizer, a tensor, an object with `state` and `load_state`, or a dict of parts."""
    match part:
        case dict():
            return {name: state_of(each) for name, each in part.items()}
        case Tensor():
            return part.detach().clone()
        case nn.Module():
            return state_of(part.state_dict())
        case Optimizer():
            found = part.state_dict()
            moments = {str(index): state_of(each) for index, each in found["state"].items()}
            return {"learning_rate": [float(group["lr"]) for group in found["param_groups"]], "parameters": moments}
    return part.state()


def load_state_of(part: Any, state: Any) -> None:
    """Load a state that `state_of` returned into a part. Keys that a dict of parts does not have are ignored."""
    match part:
        case dict():
            for name, each in part.items():
                load_state_of(each, state[name])
        case Tensor():
            part.copy_(state)
        case nn.Module():
            part.load_state_dict(state)
        case Optimizer():
            whole = part.state_dict()
            for group, learning_rate in zip(whole["param_groups"], state["learning_rate"], strict=True):
                group["lr"] = learning_rate
            # Copies, because the optimizer keeps the tensors and updates them in place.
            whole["state"] = {int(index): state_of(moments) for index, moments in state.get("parameters", {}).items()}
            part.load_state_dict(whole)
        case _:
            part.load_state(state)


@dataclass(frozen=True)
class LearnerKind:
    """An entry of the table of learners. Modules are imported when they are needed."""

    learner: str
    """Class of the learner, or a function that creates it, as module:name relative to this package."""
    settings_class: str
    """Class of its settings, as module:name relative to this package."""
    packages: tuple[str, ...] = ()
    """Packages that it imports beyond the default install."""
    extra: str = ""
    """Extra of Paceline that installs them."""

    @cached_property
    def settings(self) -> type[Settings]:
        return _attribute(self.settings_class)

    def make(self, env: VecEnv, settings: Settings, seed: int, group: Group, **options: Any) -> Learner:
        """Create the learner with new weights. `options` are arguments that only this learner has."""
        return _attribute(self.learner)(env, settings, seed, group, **options)

    def check_installed(self) -> None:
        for package in self.packages:
            if find_spec(package) is None:
                raise UserError(
                    f"this learner needs the package {package}, which is not installed: "
                    f"pip install 'paceline[{self.extra}]'"
                )


def _attribute(place: str) -> Any:
    module, name = place.split(":")
    return getattr(import_module(f"paceline.learners.{module}"), name)


_SKRL = "skrl.settings:SkrlSettings"
LEARNERS = {
    "ppo": LearnerKind("ppo.recurrent:make_ppo", "ppo.settings:PpoSettings"),
    "rsl_rl": LearnerKind("rsl_rl.learner:RslRl", "rsl_rl.settings:RslRlSettings", ("rsl_rl",), "rsl-rl"),
    "rl_games": LearnerKind("rl_games.learner:RlGames", "rl_games.settings:RlGamesSettings", ("rl_games",), "rl-games"),
    "skrl": LearnerKind("skrl.torch_learner:SkrlTorch", _SKRL, ("skrl",), "skrl"),
    "skrl_jax": LearnerKind("skrl.jax_learner:SkrlJax", _SKRL, ("skrl", "jax", "flax", "optax"), "jax"),
}


def settings_of(learner: str, values: dict[str, Any]) -> Settings:
    """Return the settings of a learner from plain values, as run.yaml holds them. Raise UserError for an unknown
    learner, an unknown setting or a value of the wrong type."""
    if learner not in LEARNERS:
        raise unknown("learner", learner, LEARNERS)
    return from_dict(LEARNERS[learner].settings, values, f"settings of learner {learner}")
