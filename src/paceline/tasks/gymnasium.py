"""Gymnasium environments as the task `gymnasium:ID`."""

import difflib
import multiprocessing
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker, util
from typing import Any, Literal, cast

from paceline.env.gymnasium_env import EPISODE_STEPS, GymnasiumEnv, time_limit
from paceline.env.mujoco_warnings import MujocoWarning, as_python_warnings
from paceline.env.training_settings import TrainingSettings
from paceline.errors import UserError
from paceline.process.interrupts import SIGNALS
from paceline.tasks.other_library import import_library, import_registering, making, parse_options, reason
from paceline.tasks.registry import EnvEntry


@dataclass(frozen=True)
class Gymnasium:
    """Options of the Gymnasium environment."""

    options: tuple[str, ...] = ()
    """KEY=VALUE arguments of gymnasium.make, with values in YAML. max_episode_steps=N sets the time limit."""
    vectorization: Literal["sync", "async", "vector_entry_point"] = "sync"
    """Step envs in turn (sync), in one process each (async), or in a registered vector env (vector_entry_point)."""
    autoreset: Literal["next_step", "same_step"] = "next_step"
    """Autoreset mode of Gymnasium. Learners get the same data in both. A registered vector env has its own mode."""

    def __post_init__(self) -> None:
        self.keywords()

    def keywords(self) -> dict[str, Any]:
        """Return `options` as keyword arguments."""
        found = parse_options(self.options, "max_episode_steps=500")
        if "vector_kwargs" in found:
            raise UserError("--env.options vector_kwargs: use --env.vectorization and --env.autoreset")
        return found


def entry(name: str) -> EnvEntry:
    """Return the entry of the Gymnasium environment `name`, which is ID or module:ID."""
    _spec(name)
    return EnvEntry(
        Gymnasium,
        summary=f"the Gymnasium environment {name}",
        engine="gymnasium",
        make=partial(_make, name),
        make_renderable=partial(_make, name, render_mode="rgb_array"),
        # Actions from -1 to 1 span the whole range, so a smaller action noise explores it. With few envs an adaptive
        # learning rate grows too large, and the policy collapses.
        training=TrainingSettings(
            horizon=128,
            minibatches=8,
            hidden_layers=(64, 64),
            activation="tanh",
            learning_rate=5e-4,
            desired_kl=0.0,
            entropy_weight=0.0,
            initial_std=0.5,
        ),
        cpu_envs=32,
        gpu_envs=32,
    )


def _make(name: str, options: Gymnasium, num_envs: int, render_mode: str | None = None, **placed: Any) -> GymnasiumEnv:
    import gymnasium
    from gymnasium.vector import AutoresetMode

    spec, mode = _spec(name), options.vectorization
    if render_mode and spec.entry_point:
        # An env in another process or in a batch cannot be rendered alone.
        mode = "sync"
    keywords: dict[str, Any] = options.keywords() | ({"render_mode": render_mode} if render_mode else {})
    if mode != "vector_entry_point":
        # The checker is for authors of environments and doubles the time of a step.
        keywords = {"disable_env_checker": True, "max_episode_steps": time_limit(spec) or EPISODE_STEPS} | keywords
        keywords["vector_kwargs"] = {"autoreset_mode": AutoresetMode[options.autoreset.upper()]}
        if mode == "async":
            keywords["vector_kwargs"] |= _process_arguments(spec)
    elif spec.vector_entry_point is None:
        raise UserError(f"--env.vectorization {mode}: {name} registers no vector environment; use sync or async")
    with making("Gymnasium", name, options.options):
        with _starting_processes(), _warning_once():
            envs = gymnasium.make_vec(spec, num_envs, vectorization_mode=mode, **keywords)
        if mode == "async":
            # At exit Python sends SIGTERM to these processes, which ignore it, and waits for them. They end when their
            # pipes are closed.
            for pipe in cast("Any", envs).parent_pipes:
                util.Finalize(None, pipe.close, exitpriority=0)
        return GymnasiumEnv(envs, **placed)


def _spec(name: str) -> Any:
    gymnasium = import_library(f"gymnasium:{name}", "gymnasium", "pip install 'paceline[gymnasium]'")
    module, _, known = name.rpartition(":")
    if module:
        import_registering(f"gymnasium:{name}", module)
    try:
        return gymnasium.spec(known)
    except gymnasium.error.Error as error:
        near = difflib.get_close_matches(known, gymnasium.registry, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(
            f"Gymnasium has no environment {known!r}: {hint}gymnasium.pprint_registry() lists them; "
            "for another package use gymnasium:MODULE:ID, where importing MODULE registers the environment "
            f"({reason(error)})"
        ) from None


def _process_arguments(spec: Any) -> dict[str, Any]:
    """Return the arguments of Gymnasium's async vector env. Its processes are forked from a process without threads:
    this process has threads, and an env that is forked while one of them holds a lock would wait forever."""
    from paceline.env.gymnasium_worker import run_worker

    # Imported once in the fork server, not in every env.
    place = spec.entry_point if isinstance(spec.entry_point, str) else getattr(spec.entry_point, "__module__", "")
    modules = ["gymnasium", run_worker.__module__, place.split(":")[0]]
    multiprocessing.set_forkserver_preload([module for module in modules if module])
    return {"context": "forkserver", "worker": run_worker}


@contextmanager
def _warning_once() -> Iterator[None]:
    """Show each warning of a line of code once, not for every env: its text may differ between envs, and Python forgets
    what it has shown when code of an env changes the filters."""
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught, as_python_warnings():
            yield
    finally:
        places: dict[Any, warnings.WarningMessage] = {}
        for each in caught:
            # MuJoCo does not say which line of code a warning is about.
            text = str(each.message) if each.category is MujocoWarning else ""
            places.setdefault((each.category, each.filename, each.lineno, text), each)
        for each in places.values():
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


@contextmanager
def _starting_processes() -> Iterator[None]:
    """Start processes, which are the fork server and Python's resource tracker, with `interrupts.SIGNALS` blocked,
    because only the trainer handles signals, and without the current directory in `sys.path`."""
    mask, safe_path = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS), os.environ.get("PYTHONSAFEPATH", "")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        # Starting the resource tracker unblocks SIGINT and SIGTERM.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        yield
    finally:
        # Python ignores an empty value.
        os.environ["PYTHONSAFEPATH"] = safe_path
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
