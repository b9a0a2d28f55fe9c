"""Gymnasium environments whose numbers can be computed by hand; importing this registers them."""

import multiprocessing
import threading
import time
import warnings
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector import AutoresetMode, VectorEnv

TIME_LIMIT = 5


class Counting(gymnasium.Env):
    """Counts its steps from a random start, and terminates after 2 to 7 of them, even before the time limit."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (as Gymnasium declares it)
    observation_space = Box(-np.inf, np.inf, (2,), np.float64)
    action_space = Box(np.array([-2.0, 0.0, -np.inf]), np.array([2.0, 10.0, np.inf]), dtype=np.float64)

    def __init__(self, bonus: float = 0.0, render_mode: str | None = None):
        self.bonus, self.render_mode = bonus, render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count, self.last = 0, int(self.np_random.integers(2, 8))
        self.start = self.np_random.random()
        return self.observation(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        reward = 100.0 * self.count + float(np.sum(action)) + self.bonus
        return self.observation(), reward, self.count >= self.last, False, {}

    def observation(self) -> Any:
        return np.array([self.start, self.count])

    def render(self) -> np.ndarray:
        return np.full((20, 40, 3), min(255, 50 * self.count), np.uint8)


class CountingInParts(Counting):
    observation_space = Dict({"start": Box(0.0, 1.0, ()), "count": Dict({"twice": Box(0.0, 99.0, (2, 1), np.float32)})})

    def observation(self) -> Any:
        return {"start": np.float32(self.start), "count": {"twice": np.full((2, 1), self.count, np.float32)}}


class Slow(Counting):
    """Takes 10 ms for a step."""

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(0.01)
        return super().step(action)


LOCK = threading.Lock()


class Locking(Counting):
    """In another process it needs a lock, as many libraries do."""

    def __init__(self) -> None:
        super().__init__()
        if multiprocessing.parent_process() and not LOCK.acquire(timeout=5.0):
            raise RuntimeError("the lock is held by a thread that is not in this process")


class Switch(Counting):
    action_space = Discrete(3, start=5)


class Switches(Counting):
    action_space = MultiDiscrete([2, 4])


class Bits(Counting):
    action_space = MultiBinary(2)


class Broken(Counting):
    """Cannot be made, and says little about the reason."""

    def __init__(self) -> None:
        assert self.action_space is None


class BrokenInside(Counting):
    def __init__(self) -> None:
        try:
            int("nothing")
        except ValueError as error:
            raise RuntimeError("no license") from error


class Timed(Counting):
    """Its time step differs from the frame rate of its videos."""

    dt = 0.015


class Warns(Counting):
    """Warns when it is made and in every step, with another text in each env."""

    def __init__(self) -> None:
        super().__init__()
        # As libraries do; Python then forgets which warnings it has shown.
        warnings.filterwarnings("default", "nothing")
        warnings.warn(f"made at {id(self)}", stacklevel=1)

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        warnings.warn("stepped", stacklevel=1)
        return super().step(action)


class Named(Counting):
    observation_space = Dict({"which": Discrete(3)})


class CountingTogether(VectorEnv):
    """A vector env that resets itself: env n counts to n + 1."""

    single_observation_space = Box(0.0, 99.0, (1,), np.float32)
    single_action_space = Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, num_envs: int, max_episode_steps: int, mode: str = "NEXT_STEP", masks: bool = True):
        self.metadata = {"autoreset_mode": AutoresetMode[mode]}
        self.num_envs, self.masks = num_envs, masks
        self.action_space = Box(-1.0, 1.0, (num_envs, 1), np.float32)
        self.observation_space = Box(0.0, 99.0, (num_envs, 1), np.float32)
        self.mode, self.last = self.metadata["autoreset_mode"], np.arange(num_envs) + 1
        self.count, self.due = np.zeros(num_envs, np.float32), np.zeros(num_envs, bool)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        mask = options["reset_mask"] if options and self.masks else np.ones(self.num_envs, bool)
        # From 10 on, so that an env that was reset differs from one that was not.
        self.count[mask], self.due[mask] = 10.0, False
        return self.count[:, None], {}

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        self.count = np.where(self.due, 10.0, self.count + 1.0).astype(np.float32)
        reward = np.where(self.due, 0.0, 1.0)
        done, infos = self.count >= 10 + self.last, {}
        if self.mode == AutoresetMode.SAME_STEP:
            infos["final_obs"] = self.count[:, None].copy()
            self.count[done] = 10.0
        else:
            self.due = done
        # The same memory in every step, which a vector env may return.
        return self.count[:, None], reward, done, np.zeros_like(done), infos


gymnasium.register("Counting-v0", f"{__name__}:Counting", max_episode_steps=TIME_LIMIT)
gymnasium.register("CountingInParts-v0", f"{__name__}:CountingInParts", max_episode_steps=TIME_LIMIT)
gymnasium.register("Endless-v0", f"{__name__}:Counting")
gymnasium.register("Slow-v0", f"{__name__}:Slow", max_episode_steps=TIME_LIMIT)
gymnasium.register("Locking-v0", f"{__name__}:Locking", max_episode_steps=TIME_LIMIT)
gymnasium.register("Switch-v0", f"{__name__}:Switch", max_episode_steps=TIME_LIMIT)
gymnasium.register("Switches-v0", f"{__name__}:Switches", max_episode_steps=TIME_LIMIT)
gymnasium.register("Bits-v0", f"{__name__}:Bits")
gymnasium.register("Broken-v0", f"{__name__}:Broken")
gymnasium.register("BrokenInside-v0", f"{__name__}:BrokenInside")
gymnasium.register("Timed-v0", f"{__name__}:Timed")
gymnasium.register("Warns-v0", f"{__name__}:Warns")
gymnasium.register("Named-v0", f"{__name__}:Named")
gymnasium.register(
    "Together-v0",
    f"{__name__}:Counting",
    vector_entry_point=f"{__name__}:CountingTogether",
    max_episode_steps=TIME_LIMIT,
)
