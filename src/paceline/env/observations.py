"""History and delay of the observations of the policy."""

from typing import Any

import torch
from torch import Tensor

from paceline.errors import UserError, counted

MAX_HISTORY_STEPS = 1000
"""Limit of history and of delay, in control steps."""


def is_valid_delay(delay: Any) -> bool:
    """Return whether a value is a minimum and a maximum delay in control steps."""
    whole = isinstance(delay, tuple) and len(delay) == 2 and all(isinstance(steps, int) for steps in delay)
    return whole and 0 <= delay[0] <= delay[1] <= MAX_HISTORY_STEPS


class ObservationHistory:
    """The latest observations of a group, and the delay of each env. Without history and delay it returns the
    observations that it is given, and has no state.

    `column` is the column of the samples from which the delay is taken; groups with the same column have the same
    delay. `name` distinguishes the states of several groups.
    """

    def __init__(self, history: int, delay: tuple[int, int], obs: Tensor, column: int = 0, name: str = ""):
        self.column, self._prefix = column, f"observation_history/{name}/" if name else "observation_history/"
        self._min_delay, self._max_delay = delay
        self.samples_delay = self._min_delay < self._max_delay
        steps = history + self._max_delay
        self._active = steps > 1
        self._offsets = torch.arange(history, device=obs.device)
        self._delay = torch.full((len(obs),), self._min_delay, device=obs.device)
        # [env, step, n] for vectors, [env, height, width, step, channel] for images, newest last.
        self._buffer = torch.stack([_channels_last(obs)] * steps, dim=-2) if self._active else obs[:0]

    def state(self) -> dict[str, Tensor]:
        state = {f"{self._prefix}delay": self._delay, f"{self._prefix}buffer": self._buffer}
        return state if self._active else {}

    def check(self, state: dict[str, Tensor]) -> None:
        """Raise UserError if `state` has another history or delay."""
        buffer, delay = state.get(f"{self._prefix}buffer"), state.get(f"{self._prefix}delay")
        same_shape = buffer is not None and buffer.shape[1:] == self._buffer.shape[1:]
        same_delay = delay is not None and bool(((delay >= self._min_delay) & (delay <= self._max_delay)).all())
        if self._active and not (same_shape and same_delay):
            raise UserError(
                f"the envs of the run do not stack {counted(len(self._offsets), 'observation')} with a delay of "
                f"{self._min_delay} to {counted(self._max_delay, 'control step')}: resume with the history and the "
                "delay that the run has"
            )

    def reset(self, mask: Tensor, uniform: Tensor) -> None:
        """Sample the delay of the envs in `mask`, bool [env], from `uniform` [env, columns]."""
        if self.samples_delay:
            delay = self._min_delay + (uniform[:, self.column] * (self._max_delay - self._min_delay + 1)).long()
            self._delay.copy_(torch.where(mask, delay, self._delay))

    def append(self, obs: Tensor, episode_step: Tensor) -> Tensor:
        """Store `obs` and return the observation of the policy, for images a view of the history. In envs in which an
        episode starts, `obs` replaces the whole history."""
        if not self._active:
            return obs
        first = (episode_step == 0).view(-1, *[1] * obs.dim())
        new = torch.where(first, _channels_last(obs).unsqueeze(-2), self._with_newest(obs))
        self._buffer.copy_(new)
        # Only images may be overwritten by the next step.
        return self._stacked(self._buffer if obs.dim() == 4 else new)

    def preview(self, obs: Tensor) -> Tensor:
        """Return the observation of the policy that `obs` would lead to, without storing it."""
        return self._stacked(self._with_newest(obs)) if self._active else obs

    def latest(self, obs: Tensor) -> Tensor:
        """Return the observation of the policy that `append` returned last, for the current `obs`."""
        return self._stacked(self._buffer) if self._active else obs

    def _with_newest(self, obs: Tensor) -> Tensor:
        return torch.cat((self._buffer[..., 1:, :], _channels_last(obs).unsqueeze(-2)), dim=-2)

    def _stacked(self, buffer: Tensor) -> Tensor:
        """Return the delayed observations side by side, [env, history * n]; for images, [env, history * channels,
        height, width] in channels-last memory. Without a random delay it is a view of `buffer`."""
        if self.samples_delay:
            index = (self._max_delay - self._delay)[:, None] + self._offsets
            index = index.view(len(index), *[1] * (buffer.dim() - 3), -1, 1)
            buffer = buffer.gather(-2, index.expand(*buffer.shape[:-2], -1, buffer.shape[-1]))
        stacked = buffer[..., : len(self._offsets), :].flatten(-2)
        return stacked.permute(0, 3, 1, 2) if stacked.dim() == 4 else stacked


def _channels_last(obs: Tensor) -> Tensor:
    """Return a view [env, height, width, channel] of images; vectors are returned unchanged."""
    return obs.permute(0, 2, 3, 1) if obs.dim() == 4 else obs
