"""Interface between learners and envs."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from paceline.errors import UserError

if TYPE_CHECKING:
    from paceline.env.robot_env import RobotEnv


class TensorSpec(NamedTuple):
    """Shape and dtype of an observation group, for one env."""

    shape: tuple[int, ...]
    """Shape of the observation of one env: [n] for a vector, [channel, height, width] for an image."""
    dtype: torch.dtype = torch.float32
    scale: float = 1.0
    """Largest value of an image, by which a network divides it."""
    classes: int = 0
    """Number of classes of an image whose values are semantic classes; 0 for other images."""
    frames: int = 1
    """Number of successive images that are stacked along the channels, newest last."""


class ActionSpec(NamedTuple):
    """Actions of one env."""

    width: int
    """Number of columns of an action."""
    choices: tuple[int, ...] = ()
    """Number of choices of each column of a discrete action; empty for continuous actions."""

    @property
    def num_outputs(self) -> int:
        """Number of outputs of an actor: one mean for each column, or one logit for each choice of each column."""
        return sum(self.choices) if self.choices else self.width

    def zeros(self, num_envs: int, device: torch.device) -> Tensor:
        """Return actions of zeros, [env, width]."""
        return torch.zeros(num_envs, self.width, dtype=torch.int64 if self.choices else torch.float32, device=device)


@dataclass(frozen=True)
class Step:
    """Result of one step, for all envs. Except for images, the env never writes to these tensors again."""

    obs: dict[str, Tensor]
    """Observations for the next action; in an env that was reset, the first of the new episode. The next step writes to
    the images."""
    reward: Tensor
    """Reward of the step, float32 [env]."""
    terminated: Tensor
    """True if the episode ended in a terminal state, bool [env]."""
    truncated: Tensor
    """True if the time limit ended the episode, bool [env]; never together with `terminated`."""
    final_obs: dict[str, Tensor]
    """Observations before any reset, with the sensors of the last physics step. It has no images."""
    log: Tensor
    """Sums over the episode so far, one column for each name in `log_names`, float32 [env, names]. In an env whose
    episode ended they are those of the whole episode."""


class VecEnv(Protocol):
    """Many envs, one row of each tensor per env. An env resets itself when its episode ends.

    An env with discrete actions has one more member, `action_choices: tuple[int, ...]`, the number of choices of each
    column of an action. Without it, actions are continuous.
    """

    num_envs: int
    """Number of envs on this rank."""
    first_env: int
    """Global index of the first env on this rank."""
    num_actions: int
    """Width of an action."""
    max_episode_steps: int
    """Time limit of an episode, in steps."""
    step_seconds: float
    """Simulated time of a step, s."""
    device: torch.device
    capturable: bool
    """True if `step` may be part of a CUDA graph, Warp's launches included."""
    log_names: tuple[str, ...]
    """Names of the columns of `Step.log`. The first two are "length", in steps, and "return"."""

    observation_spec: dict[str, TensorSpec]
    """Observation groups by name, known before the first reset: "policy" for the policy, "critic" if the critic has its
    own observations, one for each image, and "image_targets" if an image encoder can be trained to predict numbers
    that networks do not observe. At least one of "policy" and the images exists."""

    def reset(self) -> dict[str, Tensor]:
        """Start a new episode in every env and return its first observations."""
        ...

    def observe(self) -> dict[str, Tensor]:
        """Return the observations of the current state, as the latest `reset` or `step` returned them."""
        ...

    def step(self, actions: Tensor) -> Step:
        """Apply actions, [env, num_actions]: float32, or int64 from 0 to the number of choices - 1 if the env has
        `action_choices`."""
        ...

    def prefetch_random(self, steps: int) -> None:
        """Sample the random numbers of the next `steps` steps at once. This only saves time: the numbers are the same
        without it."""
        ...

    def faults(self) -> Tensor:
        """Return the number of envs that failed and the number of steps in which an env ran out of contacts, since the
        start, float32 [2]."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return the state: tensors [env, ...], and scalars that all envs share. "episode_step" is the number of steps
        of the running episode of each env."""
        ...

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore a state. An env that cannot restore it starts new episodes."""
        ...


class RenderableEnv(VecEnv, Protocol):
    """An env that renders images."""

    def render(self) -> np.ndarray:
        """Return an RGB image of env 0, uint8 [height, width, 3], of any size."""
        ...


def as_robot_env(env: VecEnv) -> "RobotEnv | None":
    """Return the env if it is a `RobotEnv`, otherwise None. This does not import MuJoCo, which envs of other simulators
    do not need."""
    module = sys.modules.get("paceline.env.robot_env")
    return cast("RobotEnv", env) if module is not None and isinstance(env, module.RobotEnv) else None


def action_spec(env: VecEnv) -> ActionSpec:
    """Return the description of the actions of an env. Raise UserError if its members contradict each other."""
    choices = getattr(env, "action_choices", ())
    if not isinstance(choices, tuple) or not all(isinstance(count, int) and count > 0 for count in choices):
        raise UserError(f"'action_choices' is {choices!r}, but must be a tuple of numbers of choices, each above 0")
    if choices and len(choices) != env.num_actions:
        raise UserError(
            f"'action_choices' is {choices}, but must have one entry per action: 'num_actions' is {env.num_actions}"
        )
    return ActionSpec(env.num_actions, choices)
