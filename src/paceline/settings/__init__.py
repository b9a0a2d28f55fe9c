"""What can learn, what it needs, and its own settings. The packages are imported by the adapters alone."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Protocol

from paceline.checks import flag
from paceline.errors import UserError
from paceline.settings.ppo import PpoConfig
from paceline.settings.rl_games import RlGamesConfig
from paceline.settings.rsl_rl import RslRlConfig
from paceline.settings.skrl import SkrlConfig


class Settings(Protocol):
    """A learner's own, as a frozen dataclass whose fields have the library's names."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    flags: ClassVar[str]
    """On the command line they are --FLAGS.NAME."""
    horizon_field: ClassVar[str]
    """Name of the field that sets `horizon`."""
    minibatches_field: ClassVar[str]
    """Name of the field that sets `minibatches`."""
    fixed: ClassVar[tuple[str, ...]]
    """Names of the settings that cannot change when a run is resumed, because the checkpoint's networks, normalizers or
    action noise depend on them. All others take effect at once."""

    @property
    def learning_rate(self) -> float:
        """At the start. If it is changed when a run is resumed, it replaces the checkpoint's."""
        ...

    @property
    def horizon(self) -> int:
        """Steps per world and iteration."""
        ...

    @property
    def minibatches(self) -> int:
        """Parts of a pass over an iteration's samples."""
        ...

    def check(self) -> None:
        """Refuse what cannot work."""
        ...


def check_samples(settings: Settings, num_envs: int) -> None:
    """Refuse more minibatches than a rank with `num_envs` has samples: empty ones have a loss that is not a number."""
    samples, minibatches = num_envs * settings.horizon, settings.minibatches
    if minibatches > samples:
        more, steps = (flag(settings, name) for name in (settings.minibatches_field, settings.horizon_field))
        raise UserError(
            f"{more} {minibatches} is more than {samples} samples, which the smallest rank collects in an iteration "
            f"(envs x steps: {num_envs} x {settings.horizon}): use at most {samples}, or more envs (--num-envs, "
            f"--total-envs) or steps ({steps})"
        )


@dataclass(frozen=True)
class LearnerKind:
    """A learner that a run can name."""

    settings: type[Settings]
    packages: tuple[str, ...] = ()
    """What it imports beyond the default install."""
    extra: str = ""
    """The extra that brings them."""

    def check_installed(self) -> None:
        for package in self.packages:
            if find_spec(package) is None:
                raise UserError(
                    f"this learner needs the package {package}, which is not installed: "
                    f"pip install 'paceline[{self.extra}]'"
                )


LEARNERS = {
    "ppo": LearnerKind(PpoConfig),
    "rsl_rl": LearnerKind(RslRlConfig, ("rsl_rl",), "rsl-rl"),
    "rl_games": LearnerKind(RlGamesConfig, ("rl_games",), "rl-games"),
    "skrl": LearnerKind(SkrlConfig, ("skrl",), "skrl"),
    "skrl_jax": LearnerKind(SkrlConfig, ("skrl", "jax", "flax", "optax"), "jax"),
}
