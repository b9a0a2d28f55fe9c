"""Interface between learners and envs."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor


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
    """Many envs, one row of each tensor per env. An env resets itself when its episode ends."""

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
        """Apply actions, float32 [env, num_actions]."""
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
