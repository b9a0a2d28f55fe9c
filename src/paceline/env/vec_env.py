"""All that a learner sees of an environment."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


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
    first_world: int
    """The global number of this rank's first world."""
    actions: int
    """Width of an action."""
    episode_steps: int
    """The time limit, in steps."""
    control_seconds: float
    """Of the robot's time, from one step to the next."""
    device: torch.device
    capturable: bool
    """Whether `step` may be part of a CUDA graph, Warp's launches included."""
    log_names: tuple[str, ...]
    """What `Step.log` sums; "length" (steps) and "return" always."""

    def reset(self) -> dict[str, Tensor]:
        """Start a new episode in every world."""
        ...

    def step(self, actions: Tensor) -> Step: ...

    def prefetch(self, steps: int) -> None:
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

    def load_state(self, state: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Go on from `state`, where the policy acts on what it saw last; or, in an env that cannot, start new episodes
        and return their first observations."""
        ...


class DrawnEnv(VecEnv, Protocol):
    """An env that a video can be made of."""

    def picture(self) -> np.ndarray:
        """World 0 as it is now: RGB, uint8 [height, width, 3], of any size."""
        ...
