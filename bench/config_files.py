"""Train one iteration with each configuration file of RSL-RL, RL-Games and skrl in a checkout of Isaac Lab or mjlab.
Print which files train and which are refused, and why.

Isaac Lab and mjlab need not be installed. Their RSL-RL configurations are Python classes, which they write to
agent.yaml: the modules that define them are executed with stand-ins for the rest of the package. Run this only on a
checkout that you trust. The env is cartpole, with the actions, observation groups and images that a file needs.

    python bench/config_files.py CHECKOUT [--num-envs 16] [--rsl-rl-version 3.0.1]
"""

import argparse
import copy
import dataclasses
import importlib.util
import inspect
import io
import re
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml
from torch import Tensor

from paceline.distributed.group import Group
from paceline.distributed.rank import this_rank
from paceline.env.robot_env import RobotEnv
from paceline.env.vec_env import Step, TensorSpec
from paceline.errors import UserError
from paceline.learners.learner import LEARNERS
from paceline.learners.native_config import read
from paceline.tasks.cartpole import ENTRY, Cartpole

IMAGE = TensorSpec((3, 48, 48), torch.uint8)
_CATEGORIES = {
    "another algorithm": r"^(agent\.class|class_name|algorithm\.class_name|params\.algo\.name) is ",
    "recurrent": r"rnn|recurrent",
    "discrete": r"CategoricalMixin|discrete",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="Directory that is searched for configuration files.")
    parser.add_argument("--num-envs", type=int, default=16, help="Number of envs.")
    parser.add_argument(
        "--rsl-rl-version",
        default=version("rsl-rl-lib"),
        help="Version for which Isaac Lab writes agent.yaml; by default the installed one.",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    counts = {learner: Counter[str]() for learner in ("rsl_rl", "rl_games", "skrl")}
    with tempfile.TemporaryDirectory() as folder:
        for learner, name, file in _files(arguments.checkout.resolve(), Path(folder), arguments.rsl_rl_version):
            error = _train(learner, file, arguments.num_envs)
            kinds = (kind for kind, pattern in _CATEGORIES.items() if re.search(pattern, error))
            outcome = next(kinds, "other") if error else "trained"
            counts[learner][outcome] += 1
            print(f"{learner:8} {outcome:17} {name}", flush=True)
            if error:
                print(f"         {error}")
    columns = ("trained", "recurrent", "discrete", "other", "another algorithm")
    print(f"\n| | {' | '.join(columns)} | PPO files that train |\n|{'---|' * (len(columns) + 2)}")
    for name, count in (counts | {"all": sum(counts.values(), Counter[str]())}).items():
        of_ppo = count.total() - count["another algorithm"]
        share = f"{count['trained']} of {of_ppo}, {count['trained'] / of_ppo:.1%}" if of_ppo else ""
        print(f"| {name} | {' | '.join(str(count[column]) for column in columns)} | {share} |")


def _files(checkout: Path, folder: Path, rsl_rl_version: str) -> Iterator[tuple[str, str, Path]]:
    """Yield the learner, the name and the file of each configuration."""
    for learner in ("rl_games", "skrl"):
        for file in sorted(checkout.rglob(f"*{learner}*.yaml")):
            yield learner, str(file.relative_to(checkout)), file
    for number, (name, config) in enumerate(_rsl_rl_configs(checkout, rsl_rl_version)):
        file = folder / f"{number}.yaml"
        file.write_text(yaml.dump(config, sort_keys=False))
        yield "rsl_rl", name, file


def _train(learner: str, file: Path, num_envs: int) -> str:
    """Train for one iteration. Return the error, or an empty string."""
    try:
        native = read(learner, file, LEARNERS[learner].settings.from_training(ENTRY.training), {}, num_envs)
        env: Any = _Env(num_envs, file.read_text())
        metrics = LEARNERS[learner].make(env, native.settings, 0, Group(this_rank(()))).learn()
        losses = {name: value for name, value in metrics.items() if name.startswith(("loss/", "policy/"))}
        return (
            "" if all(map(torch.isfinite, map(torch.tensor, losses.values()))) else f"losses are not finite: {losses}"
        )
    except UserError as error:
        return str(error).removeprefix(f"{file}").removeprefix(": ").strip(" ,")
    except Exception:
        traceback.print_exc()
        return "a bug: see the traceback"


class _Env:
    """Cartpole with the actions that a configuration file asks for, and observations in the groups that it names."""

    def __init__(self, num_envs: int, text: str):
        self._env = RobotEnv(Cartpole(), num_envs, engine="mujoco")
        self.num_envs, self.device = num_envs, self._env.device
        several = re.search(r"MultiCategoricalMixin|multi_discrete", text)
        discrete = re.search(r"CategoricalMixin|a2c_discrete", text)
        self.action_choices = (3, 2) if several else (3,) if discrete else ()
        self.num_actions = len(self.action_choices) or self._env.num_actions
        groups: dict[str, Callable[[Tensor], Tensor]] = {"policy": lambda obs: obs}
        if "central_value_config" in text:
            groups["critic"] = lambda obs: obs
        if re.search(r"OBSERVATIONS\[", text):
            names = ("joint-positions", "joint-velocities") if "joint-pos" in text else ("0", "joint-velocities")
            groups = {names[0]: lambda obs: obs[:, :2], names[1]: lambda obs: obs[:, 2:]}
        self._groups = groups
        self._image = "conv" in text
        if self._image:
            self._groups = {name: group for name, group in groups.items() if name == "joint-velocities"}
        spec = {name: TensorSpec((group(torch.zeros(1, 4)).shape[1],)) for name, group in self._groups.items()}
        self.observation_spec = ({"camera": IMAGE} if self._image else {}) | spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self) -> dict[str, Tensor]:
        return self._regrouped(self._env.reset())

    def observe(self) -> dict[str, Tensor]:
        return self._regrouped(self._env.observe())

    def step(self, actions: Tensor) -> Step:
        step = self._env.step(actions[:, :1] - 1.0 if self.action_choices else actions)
        return dataclasses.replace(step, obs=self._regrouped(step.obs), final_obs=self._vectors(step.final_obs))

    def _vectors(self, obs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: group(obs["policy"]).clone() for name, group in self._groups.items()}

    def _regrouped(self, obs: dict[str, Tensor]) -> dict[str, Tensor]:
        image = obs["policy"].new_zeros(self.num_envs, *IMAGE.shape, dtype=IMAGE.dtype)
        return self._vectors(obs) | ({"camera": image} if self._image else {})


# RSL-RL configurations of Isaac Lab and mjlab, which are Python classes


def _rsl_rl_configs(checkout: Path, rsl_rl_version: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the content of agent.yaml of each RSL-RL configuration."""
    for folder in sorted({file.parent for file in checkout.rglob("rl_cfg.py") if file.parent.name == "rsl_rl"}):
        package = _stand_in("isaaclab_rl.rsl_rl", folder)
        _stand_in("isaaclab.utils").__dict__["configclass"] = _configclass
        for file in sorted(folder.glob("*_cfg.py")):
            vars(package).update(vars(importlib.import_module(f"isaaclab_rl.rsl_rl.{file.stem}")))
        update = importlib.import_module("isaaclab_rl.rsl_rl.utils").handle_deprecated_rsl_rl_cfg
        sys.meta_path.append(_Finder())
        for name, config in _instances(checkout, "*rsl_rl*cfg.py", package.__dict__["RslRlBaseRunnerCfg"]):
            try:
                with redirect_stdout(io.StringIO()):
                    updated = update(config, rsl_rl_version)
            except ValueError as error:
                print(f"Isaac Lab itself refuses {name}: {error}")
            else:
                yield name, updated.to_dict()
    for file in sorted(checkout.rglob("mjlab/rl/config.py")):
        package = _stand_in("mjlab.rl", file.parent)
        vars(package).update(vars(importlib.import_module("mjlab.rl.config")))
        sys.meta_path.append(_Finder())
        for name, config in _instances(checkout, "*rl_cfg.py", package.__dict__["RslRlBaseRunnerCfg"]):
            yield name, dataclasses.asdict(config)


def _instances(checkout: Path, pattern: str, base: type) -> Iterator[tuple[str, Any]]:
    """Yield the configurations that modules define as classes or return from functions."""
    for file in sorted(checkout.rglob(pattern)):
        if file.parent.name in ("rsl_rl", "rl"):
            continue
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, member in vars(module).items():
            own = getattr(member, "__module__", "") == module.__name__
            makes = isinstance(member, type) and issubclass(member, base)
            if own and (makes or (inspect.isfunction(member) and name.endswith("runner_cfg"))):
                yield f"{file.relative_to(checkout)}:{name}", member()


def _stand_in(name: str, folder: Path | None = None) -> ModuleType:
    """Return an empty module, and create the packages above it. Its submodules are those in `folder`."""
    for position in [each.end() for each in re.finditer(r"\w+", name)]:
        part = name[:position]
        module = sys.modules.setdefault(part, ModuleType(part))
        module.__path__ = [str(folder)] if folder and part == name else []
    return sys.modules[name]


class _AnyModule(ModuleType):
    """Module whose attributes are such modules too."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return importlib.import_module(f"{self.__name__}.{name}")

    def __deepcopy__(self, _: Any) -> "_AnyModule":
        return self


class _Finder:
    """Finds a stand-in for any module of the tasks."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith(("isaaclab_tasks", "mjlab.")) else None  # pyright: ignore[reportArgumentType]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _AnyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def _configclass(cls: Any) -> Any:
    """Stand-in for Isaac Lab's decorator: instances get copies of the values of the class."""

    def init(self: Any, **values: Any) -> None:
        for kind in reversed(type(self).__mro__):
            for name, value in vars(kind).items():
                if not name.startswith("_") and not isinstance(value, type) and not inspect.isfunction(value):
                    setattr(self, name, copy.deepcopy(value))
        for name, value in values.items():
            setattr(self, name, value)
        self.__post_init__()

    if not hasattr(cls, "__post_init__"):
        cls.__post_init__ = lambda self: None
    cls.__init__, cls.to_dict = init, lambda self: _plain(self)
    return cls


def _plain(value: Any) -> Any:
    """Return the value as Isaac Lab writes it: {} for a missing one, and functions and modules by their names."""
    if isinstance(value, type(dataclasses.MISSING)):
        return {}
    if isinstance(value, ModuleType) or callable(value):
        return getattr(value, "__name__", str(value))
    if hasattr(value, "to_dict"):
        return {name: _plain(each) for name, each in vars(value).items()}
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value


if __name__ == "__main__":
    main()
