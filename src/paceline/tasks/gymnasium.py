"""Any Gymnasium environment with continuous actions, as the task `gymnasium:ID`."""

import difflib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection
from typing import Any, Literal, cast

import torch

from paceline.env.gymnasium_env import EPISODE_STEPS, GymnasiumEnv, time_limit
from paceline.env.training_settings import TrainingSettings
from paceline.errors import UserError, one_line
from paceline.process.interrupts import SIGNALS
from paceline.tasks.registry import EnvEntry
from paceline.validation import parse_yaml

_SAFE_PATH = "PYTHONSAFEPATH"


@dataclass(frozen=True)
class Gymnasium:
    """How an environment is made, and many of it together."""

    options: tuple[str, ...] = ()
    """KEY=VALUE for gymnasium.make, the value as in YAML; max_episode_steps=N sets the time limit."""
    vectorization: Literal["sync", "async", "vector_entry_point"] = "sync"
    """One world after the other, a process for each world, or a vector environment of its own."""
    autoreset: Literal["next_step", "same_step"] = "next_step"
    """When Gymnasium starts the next episode; what is learnt from is the same. A vector environment of its own decides
    for itself."""

    def __post_init__(self) -> None:
        self.keywords()

    def keywords(self) -> dict[str, Any]:
        """`options`, with their values."""
        found = {}
        for option in self.options:
            key, equals, value = option.partition("=")
            if not equals or not key.isidentifier():
                raise UserError(f"--env.options {option}: give KEY=VALUE, for example max_episode_steps=500")
            if key == "vector_kwargs":
                raise UserError(f"--env.options {option}: use --env.vectorization and --env.autoreset")
            try:
                found[key] = parse_yaml(value)
            except ValueError as error:
                raise UserError(f"--env.options {option}: not a value: {error}") from None
        return found


def entry(name: str) -> EnvEntry:
    """Of the environment that Gymnasium calls `name`; as there, module:ID imports the module that registers it."""
    _spec(name)
    return EnvEntry(
        Gymnasium,
        summary=f"{name} of Gymnasium",
        engine="gymnasium",
        make=partial(_make, name),
        drawn=partial(_make, name, render_mode="rgb_array"),
        # Actions of -1 to 1 are the whole range, so less noise than usual is enough to explore it. In few worlds a
        # learning rate that follows the policy's change grows too large: what has been learnt is lost again.
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


def _make(
    name: str,
    options: Gymnasium,
    num_envs: int,
    device: torch.device,
    seed: int,
    first_env: int,
    render_mode: str | None = None,
) -> GymnasiumEnv:
    import gymnasium
    from gymnasium.vector import AutoresetMode

    spec, mode = _spec(name), options.vectorization
    if render_mode and spec.entry_point:
        # A world in another process, or in a batch, does not say how to draw it alone.
        mode = "sync"
    keywords: dict[str, Any] = options.keywords() | ({"render_mode": render_mode} if render_mode else {})
    if mode != "vector_entry_point":
        # The checker is for those who write an env; it doubles the time of a step.
        keywords = {"disable_env_checker": True, "max_episode_steps": time_limit(spec) or EPISODE_STEPS} | keywords
        vector: dict[str, Any] = {"autoreset_mode": AutoresetMode[options.autoreset.upper()]}
        if mode == "async":
            from paceline.env.gymnasium_worker import run_worker

            vector |= {"context": _fork_server(spec), "worker": run_worker}
        keywords["vector_kwargs"] = vector
    elif spec.vector_entry_point is None:
        raise UserError(f"--env.vectorization {mode}: {name} has no vector environment of its own; use sync or async")
    try:
        with _imports_as_here(), _signals_blocked():
            envs = gymnasium.make_vec(spec, num_envs, vectorization_mode=mode, **keywords)
        if mode == "async":
            # At exit Python sends SIGTERM to these processes, which ignore it, and waits for them: close their pipes
            # first.
            util.Finalize(None, _close_pipes, args=(cast("Any", envs).parent_pipes,), exitpriority=0)
        return GymnasiumEnv(envs, device, seed, first_env)
    except UserError:
        raise
    except Exception as error:
        # Each env's author raises what they like about what it was made with.
        given = f" with {' '.join(options.options)}" if options.options else ""
        raise UserError(f"Gymnasium cannot make {name}{given}: {type(error).__name__}: {one_line(error)}") from error


def _close_pipes(pipes: list[Connection]) -> None:
    for pipe in pipes:
        pipe.close()


def _spec(name: str) -> Any:
    try:
        import gymnasium
    except ModuleNotFoundError:
        raise UserError(f"gymnasium:{name} needs Gymnasium: pip install 'paceline[gymnasium]'") from None
    module, _, known = name.rpartition(":")
    if module:
        _import(module, name)
    try:
        return gymnasium.spec(known)
    except gymnasium.error.Error:
        near = difflib.get_close_matches(known, gymnasium.registry, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(
            f"Gymnasium has no environment {known!r}: {hint}gymnasium.pprint_registry() lists them; "
            "one of another package is gymnasium:MODULE:ID, where importing MODULE registers it"
        ) from None


def _import(module: str, name: str) -> None:
    try:
        import_module(module)
    except (Exception, SystemExit) as error:
        # Each module raises its own errors, and some end the process.
        missing = isinstance(error, ModuleNotFoundError) and error.name == module.split(".")[0]
        hint = "; install it, or add its directory to PYTHONPATH: the current directory is not searched"
        raise UserError(
            f"gymnasium:{name}: the module {module} cannot be imported: {type(error).__name__}: {one_line(error)}"
            f"{hint if missing else ''}"
        ) from error


def _fork_server(spec: Any) -> str:
    """How worlds in processes of their own start: forked from a process that has no threads. This one has, and a world
    that is forked while one of them holds a lock waits for ever."""
    # Imported there once, not in every world.
    place = spec.entry_point if isinstance(spec.entry_point, str) else getattr(spec.entry_point, "__module__", "")
    own = "paceline.env.gymnasium_worker"
    multiprocessing.set_forkserver_preload(["gymnasium", own, *filter(None, [place.split(":")[0]])])
    return "forkserver"


@contextmanager
def _imports_as_here() -> Iterator[None]:
    """Processes started inside have no current directory in front of their `sys.path`, where `python -c` puts it."""
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block `interrupts.SIGNALS` for the processes that are started inside: the process that env processes are forked
    from, and Python's resource tracker. The trainer decides what a signal means."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        # Starting the resource tracker unblocks SIGINT and SIGTERM.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
