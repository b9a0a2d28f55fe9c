"""Check an exported policy: its actions and its metadata against the policy of the run, step by step in the env."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.env.policy_description import METADATA_FILE, METADATA_KEY, input_name
from paceline.env.vec_env import as_robot_env
from paceline.errors import UserError, counted
from paceline.learners.networks import as_tuple, reset_state_
from paceline.training.build import playable

if TYPE_CHECKING:
    from paceline.env.robot_env import RobotEnv

STEPS, TOLERANCE = 1000, 1e-5
"""Number of env steps of a check, and the largest difference relative to max(1, absolute value)."""


@dataclass(frozen=True)
class ExportCheck:
    """Largest differences between an exported policy and the run."""

    steps: int
    actions: float
    """Difference of the actions, and of the states of a recurrent policy, divided by max(1, absolute value)."""
    controls: float | None
    """Difference between the controls that the metadata gives and those of the env, scaled in the same way; None if the
    metadata has no action mapping."""

    @property
    def passed(self) -> bool:
        return self.actions <= TOLERANCE and (self.controls is None or self.controls <= TOLERANCE)

    def __str__(self) -> str:
        controls = "controls not checked, because the task has no action_mapping"
        if self.controls is not None:
            controls = f"controls from the metadata {self.controls:.1e}"
        return (
            f"largest differences in {counted(self.steps, 'step')}, relative to max(1, absolute value): actions "
            f"{self.actions:.1e}, {controls}; allowed {TOLERANCE:g}"
        )


@torch.no_grad()
def check_export(
    file: Path, run: str, task: str | None = None, activation: str | None = None, steps: int = STEPS
) -> ExportCheck:
    """Run the policy of a run, as for `playable`, for `steps` env steps in one env of the C engine. Compare its actions
    with those of the exported file for the same observations and states, and the controls of the env with those that
    the actions and the metadata of the file give."""
    run_file, about = (_open_onnx if file.suffix == ".onnx" else _open_torchscript)(file)
    found = playable(run, task, activation)
    env, policy = found.env, found.policy.eval()
    state = policy.initial_state(env.num_envs)
    robot_env = as_robot_env(env)
    rebuild = _Controls(about, robot_env) if robot_env and about["action"] else None
    obs, worst_action, worst_control = env.reset(), 0.0, 0.0
    for _ in range(steps):
        inputs = {input_name(name): obs[name].contiguous() for name in policy.groups}
        # Both start from the same state in every step: a recurrent network may amplify differences of rounding.
        states = zip(about["state"], state.unbind(1), strict=True)
        inputs |= {name: part.transpose(0, 1).contiguous() for name, part in states}
        actions, state = policy.step(obs, state)
        exported, *parts = run_file(inputs)
        expected_parts = [part.transpose(0, 1) for part in state.unbind(1)]
        pairs = zip((exported, *parts), (actions, *expected_parts), strict=True)
        worst_action = max(worst_action, *(_difference(*pair) for pair in pairs))
        expected = rebuild.controls(exported) if rebuild else None
        step = env.step(actions)
        obs, done = step.obs, step.terminated | step.truncated
        ended = bool(done)
        reset_state_(state, done)
        if rebuild and expected is not None:
            # The controls of a step that ends an episode are reset.
            worst_control = worst_control if ended else max(worst_control, _difference(expected, rebuild.applied()))
            rebuild.previous = None if ended else rebuild.applied()
    return ExportCheck(steps, worst_action, worst_control if rebuild else None)


_RunFile = Callable[[dict[str, Tensor]], Sequence[Tensor]]
"""Returns the outputs of an exported policy from its inputs by name."""


class _Controls:
    """Computes the controls of one env from actions, with the metadata of an exported policy only."""

    def __init__(self, about: dict[str, Any], env: "RobotEnv"):
        self._env, self._action = env, about["action"]
        self._joints = about["robot"]["joint_names"]
        self.previous: Tensor | None = None
        """Controls of the previous step, [1, control]; None at the start of an episode."""

    def applied(self) -> Tensor:
        """Return the controls of the env, [1, control]."""
        return self._env.sim.ctrl.clone()

    def controls(self, actions: Tensor) -> Tensor:
        action, previous = self._action, self._initial() if self.previous is None else self.previous
        if action["clip"]:
            actions = actions.clamp(*action["clip"])
        base = previous if action["relative"] else torch.tensor([action["offset"]])
        target = base + torch.tensor([action["scale"]]) * actions
        control = previous + action["smoothing"] * (target - previous)
        return control.clamp(*torch.tensor(action["range"])) if action["range"] else control

    def _initial(self) -> Tensor:
        if self._action["initial_control"] == "zero":
            return torch.zeros_like(self._env.sim.ctrl)
        model = self._env.sim.model
        return self._env.sim.qpos[:, [int(model.joint(name).qposadr[0]) for name in self._joints]].clone()


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to max(1, absolute value); infinity for other shapes or NaN."""
    if found.shape != expected.shape:
        return float("inf")
    worst = float(((found - expected).abs() / expected.abs().clamp(min=1.0)).max())
    return worst if worst == worst else float("inf")


def _open_onnx(file: Path) -> tuple[_RunFile, dict[str, Any]]:
    try:
        import onnxruntime
    except ModuleNotFoundError:
        raise UserError(
            "--check of an ONNX file needs the package onnxruntime: pip install onnxruntime, or use "
            "--format torchscript"
        ) from None
    options = onnxruntime.SessionOptions()
    # More threads would wait for work on the cores of the physics.
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    about = json.loads(session.get_modelmeta().custom_metadata_map[METADATA_KEY])
    outputs = ["actions", *(part["output"] for part in about["state"].values())]

    def run_file(inputs: dict[str, Tensor]) -> list[Tensor]:
        arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
        return [torch.from_numpy(output) for output in session.run(outputs, arrays)]

    return run_file, about


def _open_torchscript(file: Path) -> tuple[_RunFile, dict[str, Any]]:
    extra = {METADATA_FILE: ""}
    module = torch.jit.load(file, _extra_files=extra)
    about = json.loads(extra[METADATA_FILE])
    return lambda inputs: as_tuple(module(*(inputs[name] for name in about["inputs"]))), about
