"""The interface of a learner, and the table of learners."""

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from paceline.errors import UserError, unknown
from paceline.learners.settings import Settings
from paceline.validation import from_dict

if TYPE_CHECKING:
    from paceline.distributed.group import Group
    from paceline.env.vec_env import VecEnv
    from paceline.learners.networks import Policy


class Learner(Protocol):
    """Trains a policy in a `VecEnv`, one iteration at a time."""

    iteration: int
    """Number of iterations done."""

    def learn(self) -> dict[str, float]:
        """Run one iteration, which collects a rollout and updates the policy, and return its metrics.

        These are, over all ranks, "episodes", the number of episodes that ended; the sum over them of each of the env's
        `log_names`; "failures" and "overflows" of `VecEnv.faults`; and losses. "seconds/collect" and "seconds/update"
        are those of this rank.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return the full state as nested dicts of tensors and numbers. "iteration" is the number of iterations done,
        and "envs" the state of this rank's envs, tensors [env, ...]. All other values are the same on all ranks."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a state of `state`."""
        ...

    def set_learning_rate(self, learning_rate: float) -> None:
        """Replace the current learning rate, which may have been adapted since the start."""
        ...

    def load_policy(self, state: dict[str, Any]) -> None:
        """Load only the policy from a state of `state`, which may have another number of envs."""
        ...

    def first_non_finite(self) -> str | None:
        """Return a phrase that names the first reward or observation of this rank's envs in the latest iteration that
        is not finite, or None if all are. Not for the hot path."""
        ...

    def policy(self) -> "Policy":
        """Return the current policy, without exploration noise, as a module over a dict of observation groups."""
        ...


@dataclass(frozen=True)
class LearnerKind:
    """An entry of the table of learners. Modules are imported when they are needed."""

    learner: str
    """Class of the learner, as module:name relative to this package."""
    settings_class: str
    """Class of its settings, as module:name relative to this package."""
    native_keys: str = ""
    """Module with the keys of the library's configuration files, relative to this package."""
    packages: tuple[str, ...] = ()
    """Packages that it imports beyond the default install."""
    extra: str = ""
    """Extra of Paceline that installs them."""

    @cached_property
    def settings(self) -> type[Settings]:
        return _attribute(self.settings_class)

    def make(self, env: "VecEnv", settings: Settings, seed: int, group: "Group") -> Learner:
        """Create the learner with new weights."""
        return _attribute(self.learner)(env, settings, seed, group)

    def check_installed(self) -> None:
        for package in self.packages:
            if find_spec(package) is None:
                raise UserError(
                    f"this learner needs the package {package}, which is not installed: "
                    f"pip install 'paceline[{self.extra}]'"
                )


LEARNERS = {
    "ppo": LearnerKind("ppo.ppo:Ppo", "ppo.settings:PpoSettings"),
    "rsl_rl": LearnerKind(
        "rsl_rl.learner:RslRl", "rsl_rl.settings:RslRlSettings", "rsl_rl.native_keys", ("rsl_rl",), "rsl-rl"
    ),
    "rl_games": LearnerKind(
        "rl_games.learner:RlGames",
        "rl_games.settings:RlGamesSettings",
        "rl_games.native_keys",
        ("rl_games",),
        "rl-games",
    ),
    "skrl": LearnerKind(
        "skrl.torch_learner:SkrlTorch", "skrl.settings:SkrlSettings", "skrl.native_keys", ("skrl",), "skrl"
    ),
    "skrl_jax": LearnerKind(
        "skrl.jax_learner:SkrlJax",
        "skrl.settings:SkrlSettings",
        "skrl.native_keys",
        ("skrl", "jax", "flax", "optax"),
        "jax",
    ),
}


def settings_of(learner: str, values: dict[str, Any]) -> Settings:
    """Return the settings of a learner from plain values, as run.yaml holds them. Raise UserError for an unknown
    learner, an unknown setting or a value of the wrong type."""
    if learner not in LEARNERS:
        raise unknown("learner", learner, LEARNERS)
    return from_dict(LEARNERS[learner].settings, values, f"settings of learner {learner}")


def _attribute(place: str) -> Any:
    module, name = place.split(":")
    return getattr(import_module(f"paceline.learners.{module}"), name)
