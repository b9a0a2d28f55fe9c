"""All that a learner sees of an environment."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor


class TensorSpec(NamedTuple):
    """Shape and dtype of an observation group, for one env."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Step:
    """What one step gave, for all worlds. Every tensor is fresh: the env never writes into it again."""

    obs: dict[str, Tensor]
    """What the policy acts on next; in a world that was reset, the new episode's first."""
    reward: Tensor
    """float32 [world]"""
    terminated: Tensor
    """The episode ended for good, bool [world]."""
    truncated: Tensor
    """The episode was cut by its time limit, bool [world]; never together with `terminated`."""
    final_obs: dict[str, Tensor]
    """The observations before any reset, of the state that `reward` led to, with the sensors of the last substep."""
    log: Tensor
    """Sums over the episode so far, one column for each name in `log_names`, float32 [world, names]; in a world that
    `terminated` or was `truncated`, those of the whole episode."""


class VecEnv(Protocol):
    """Many worlds, one row each, that reset themselves when their episode ends."""

    num_envs: int
    """Worlds on this rank."""
    first_env: int
    """The global number of this rank's first world."""
    num_actions: int
    """Width of an action."""
    max_episode_steps: int
    """The time limit, in steps."""
    step_seconds: float
    """Of the robot's time, from one step to the next."""
    device: torch.device
    capturable: bool
    """Whether `step` may be part of a CUDA graph, Warp's launches included."""
    log_names: tuple[str, ...]
    """What `Step.log` sums; "length" (steps) and "return" always."""

    observation_spec: dict[str, TensorSpec]
    """Observation groups by name, known before the first reset: "policy" for the policy, "critic" if the critic sees
    something else."""

    def reset(self) -> dict[str, Tensor]:
        """Start a new episode in every env and return its first observations."""
        ...

    def observe(self) -> dict[str, Tensor]:
        """Return the observations of the current state, as the latest `reset` or `step` returned them."""
        ...

    def step(self, actions: Tensor) -> Step: ...

    def prefetch_random(self, steps: int) -> None:
        """Draw the random numbers of the next `steps` steps in one go. A matter of speed alone: the numbers are the
        same without it."""
        ...

    def faults(self) -> Tensor:
        """How many worlds blew up, and in how many steps a world ran out of contacts, since the start; float32 [2]."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Tensors [world, ...], and scalars that are common to all worlds; among them "episode_step", the steps of each
        world's running episode."""
        ...

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from `state`. An env that cannot restore its state starts new episodes."""
        ...


class RenderableEnv(VecEnv, Protocol):
    """An env that a video can be made of."""

    def render(self) -> np.ndarray:
        """World 0 as it is now: RGB, uint8 [height, width, 3], of any size."""
        ...
