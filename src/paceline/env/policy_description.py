"""Description of a policy's inputs and outputs that a robot's runtime needs, as data for JSON."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paceline.cameras.camera import Camera, Stream, group_name, stream_spec
from paceline.env.policy_interface import CommandRange, default_qpos
from paceline.env.vec_env import TensorSpec, VecEnv, action_spec, as_robot_env

if TYPE_CHECKING:
    import mujoco

    from paceline.env.robot_env import RobotEnv

FORMAT = 1
"""Version of the description; it increases when a key changes its meaning."""
METADATA_KEY, METADATA_FILE = "paceline", "paceline.json"
"""Name of the description in the metadata of an ONNX model, and as an extra file of TorchScript."""
_UNITS = {"depth": "m", "distance": "m"}
"""Units of the streams of a camera; the others have none."""


def input_name(group: str) -> str:
    """Return the name of an observation group as an input of an exported policy."""
    return "obs" if group == "policy" else group


def describe(env: VecEnv, groups: tuple[str, ...]) -> dict[str, Any]:
    """Return the inputs and outputs of a policy over these observation groups, see docs/export.md. Envs of other
    simulators have no description of columns, robot, action and commands."""
    inputs = {input_name(group): _tensor(group, env.observation_spec[group]) for group in groups}
    found: dict[str, Any] = {
        "step_seconds": env.step_seconds,
        "control_hz": 1.0 / env.step_seconds,
        "inputs": list(inputs),
        "observations": inputs,
        "action_choices": list(action_spec(env).choices),
        "action": None,
        "commands": {},
        "robot": None,
    }
    robot_env = as_robot_env(env)
    if robot_env is None:
        return found
    task, model = robot_env.task, robot_env.sim.model
    if "obs" in inputs:
        inputs["obs"] |= _vector(robot_env)
    for name, camera in task.cameras().items():
        for stream in camera.streams:
            if (group := group_name(name, stream)) in inputs:
                inputs[group] |= _image(robot_env, name, camera, stream)
    mapping = task.action_mapping(model)
    return found | {
        "action": mapping and mapping._asdict(),
        "commands": {name: _without_entry(limits) for name, limits in task.command_ranges().items()},
        "robot": _robot(model),
    }


def _without_entry(limits: CommandRange) -> dict[str, Any]:
    return {name: value for name, value in limits._asdict().items() if name != "entry"}


def _tensor(group: str, spec: TensorSpec) -> dict[str, Any]:
    return {"group": group, "shape": list(spec.shape), "dtype": str(spec.dtype).removeprefix("torch.")}


def _vector(env: "RobotEnv") -> dict[str, Any]:
    task, parts, start = env.task, [], 0
    for part in task.observation_parts(env.sim.model).get("policy", ()):
        rows = {"unit": part.unit, "scale": part.scale, "offset": part.offset}
        parts.append(
            {"name": part.name, "start": start, "stop": start + part.width}
            | {key: row if isinstance(row, tuple) else (row,) * part.width for key, row in rows.items()}
            | {"clip": part.clip, "labels": part.labels, "description": part.description}
        )
        start += part.width
    return {
        "history": task.observation_history,
        "frame_width": env.observation_spec["policy"].shape[0] // task.observation_history,
        "delay_steps": list(task.observation_delay),
        "parts": parts,
    }


def _image(env: "RobotEnv", name: str, camera: Camera, stream: Stream) -> dict[str, Any]:
    model, group = env.sim.model, env.observation_spec[group_name(name, stream)]
    index, spec = model.camera(name).id, stream_spec(camera, stream)
    ranges = {"rgb": (0, 255), "classes": (0, group.classes - 1), "segmentation": (-1, model.ngeom - 1)}
    low, high = ranges.get(stream, (-1.0, 1.0) if stream == "normals" else (camera.near, camera.far))
    return {
        "stream": stream,
        "unit": _UNITS.get(stream, ""),
        "range": [low, high],
        "miss": spec.miss,
        "frames": camera.frames,
        "latency_steps": list(camera.effects.latency),
        "steps_per_image": camera.steps_per_image(name, env.step_seconds),
        "camera": {
            "name": name,
            "body": model.body(model.cam_bodyid[index]).name,
            "pos": model.cam_pos[index].tolist(),
            "quat": model.cam_quat[index].tolist(),
            "fovy_degrees": float(model.cam_fovy[index]),
        },
    }


class _Motor(NamedTuple):
    """An actuator and its joint, with gains at the joint. All entries are None for an actuator that does not move one
    hinge or slide by a linear law. The unit of efforts is N m for a hinge and N for a slide.

    effort = clamp(effort_per_control * control - stiffness * position - damping * velocity, *effort_limit)
    """

    joint_names: str | None = None
    joint_types: str | None = None
    joint_range: list[float] | None = None
    default_joint_pos: float | None = None
    control: str | None = None
    control_range: list[float] | None = None
    effort_per_control: float | None = None
    stiffness: float | None = None
    damping: float | None = None
    effort_limit: list[float] | None = None


def _robot(model: "mujoco.MjModel") -> dict[str, Any]:
    """Return the fields of `_Motor`, each with one entry per control."""
    motors = [_motor(model, index) for index in range(model.nu)]
    return {name: [getattr(motor, name) for motor in motors] for name in _Motor._fields}


def _motor(model: "mujoco.MjModel", index: int) -> _Motor:
    import mujoco

    # Joints with one position.
    joint_types = {int(mujoco.mjtJoint.mjJNT_HINGE): "hinge", int(mujoco.mjtJoint.mjJNT_SLIDE): "slide"}
    joint, affine = int(model.actuator_trnid[index, 0]), int(mujoco.mjtBias.mjBIAS_AFFINE)
    bias = int(model.actuator_biastype[index])
    if (
        model.actuator_trntype[index] != int(mujoco.mjtTrn.mjTRN_JOINT)
        or int(model.jnt_type[joint]) not in joint_types
        or model.actuator_gaintype[index] != int(mujoco.mjtGain.mjGAIN_FIXED)
        or model.actuator_dyntype[index] != int(mujoco.mjtDyn.mjDYN_NONE)
        or bias not in (int(mujoco.mjtBias.mjBIAS_NONE), affine)
        or (bias == affine and model.actuator_biasprm[index, 0])
    ):
        return _Motor()
    gear, gain = float(model.actuator_gear[index, 0]), float(model.actuator_gainprm[index, 0])
    stiffness, damping = (0.0 - model.actuator_biasprm[index, 1:3]).tolist() if bias == affine else (0.0, 0.0)
    control = "other"
    if not stiffness:
        control = "velocity" if damping else "effort"
    elif stiffness == gain:
        control = "position"
    control_range = model.actuator_ctrlrange[index] if model.actuator_ctrllimited[index] else None
    limits = []
    if model.actuator_forcelimited[index]:
        limits.append(np.sort(gear * model.actuator_forcerange[index]))
    if model.jnt_actfrclimited[joint]:
        limits.append(model.jnt_actfrcrange[joint])
    if control == "effort" and control_range is not None:
        limits.append(np.sort(gear * gain * control_range))
    lows, highs = zip(*limits, strict=True) if limits else ((), ())
    return _Motor(
        joint_names=model.joint(joint).name,
        joint_types=joint_types[int(model.jnt_type[joint])],
        joint_range=model.jnt_range[joint].tolist() if model.jnt_limited[joint] else None,
        default_joint_pos=default_qpos(model)[model.jnt_qposadr[joint]],
        control=control,
        control_range=None if control_range is None else control_range.tolist(),
        effort_per_control=gear * gain,
        stiffness=gear**2 * stiffness,
        damping=gear**2 * damping,
        effort_limit=[float(max(lows)), float(min(highs))] if limits else None,
    )
