"""Names of tasks in Isaac Lab and mjlab, and the tasks of Paceline that correspond to them."""

from typing import NamedTuple


class Alias(NamedTuple):
    """The task of Paceline for a name of another library."""

    task: str
    difference: str
    """Sentences for the user that state how the task differs from that of the library."""
    flags: tuple[str, ...] = ()
    """Options of `paceline train` that belong to the name."""


_CARTPOLE = "The cart and the pole are Paceline's model, and actions are clamped to -1 to 1."
_CARTPOLE_START = "the camera is placed differently, and the pole starts at up to 45 degrees"
_CARTPOLE_CAMERA = f"Two images are stacked, {_CARTPOLE_START}."
_GO1 = "The robot is Paceline's model of the Go1, and rewards, commands and randomization differ."
_GO1_ROUGH = "The robot is Paceline's model of the Go1, and terrain, rewards, commands and randomization differ."
_G1 = "The robot is Paceline's model of the G1 with 29 joints, a phase sets its gait, and the rewards differ."
_REACH = (
    "The arm is of the UR5e's class, the goal has no orientation, an action changes the joint targets, and an episode "
    "has 3 s."
)
_MJLAB = "The task of mjlab itself has the prefix mjlab: (docs/mjlab_users.md)."
_HAND = "The hand is the model of gymnasium-robotics"

ALIASES = {
    "Isaac-Ant-Direct-v0": Alias("ant", "The ant is the model of Gymnasium with Isaac Lab's joint ranges and torques."),
    "Isaac-Ant-v0": Alias("ant", "Rewards and observations are those of Isaac-Ant-Direct-v0."),
    "Isaac-Cartpole-Direct-v0": Alias("cartpole", _CARTPOLE),
    "Isaac-Cartpole-Showcase-Box-Box-Direct-v0": Alias("cartpole", _CARTPOLE),
    "Isaac-Cartpole-v0": Alias(
        "cartpole", "Rewards, limits and the start of an episode are those of Isaac-Cartpole-Direct-v0."
    ),
    "Isaac-Cartpole-Camera-Showcase-Box-Box-Direct-v0": Alias("cartpole-camera", _CARTPOLE_CAMERA),
    "Isaac-Cartpole-RGB-Camera-Direct-v0": Alias("cartpole-camera", _CARTPOLE_CAMERA),
    "Isaac-Cartpole-RGB-v0": Alias(
        "cartpole-camera", f"Rewards are those of Isaac-Cartpole-Direct-v0, two images are stacked, {_CARTPOLE_START}."
    ),
    "Isaac-Cartpole-Depth-Camera-Direct-v0": Alias(
        "cartpole-camera",
        f"Two images are stacked, a miss has the depth 12 m in place of 0, {_CARTPOLE_START}.",
        ("--env.camera.streams", "depth"),
    ),
    "Isaac-Cartpole-Depth-v0": Alias(
        "cartpole-camera",
        f"Rewards are those of Isaac-Cartpole-Direct-v0, two images are stacked, {_CARTPOLE_START}.",
        ("--env.camera.streams", "distance"),
    ),
    "Isaac-Deploy-Reach-UR10e-v0": Alias("reach", _REACH),
    "Isaac-Humanoid-Direct-v0": Alias(
        "humanoid", "The humanoid is the model of Gymnasium: it has no ankles, and 17 actions in place of 21."
    ),
    "Isaac-Humanoid-v0": Alias(
        "humanoid",
        "Rewards are those of Isaac-Humanoid-Direct-v0, and the humanoid has no ankles: 17 actions in place of 21.",
    ),
    "Isaac-Reach-UR10-v0": Alias("reach", _REACH),
    "Isaac-Repose-Cube-Shadow-Direct-v0": Alias(
        "shadow-hand-repose", f"{_HAND}, rewards are multiplied by 0.01, and the critic observes fingertip forces."
    ),
    "Isaac-Repose-Cube-Shadow-Vision-Direct-v0": Alias(
        "shadow-hand-repose-camera",
        f"{_HAND}, and all ranks train one image encoder: by regression with the learner ppo, otherwise by the loss of "
        "the policy.",
    ),
    "Isaac-Velocity-Flat-G1-v0": Alias("g1-velocity", _G1),
    "Isaac-Velocity-Flat-Unitree-Go1-v0": Alias("go1-velocity", _GO1),
    "Isaac-Velocity-Rough-Unitree-Go1-v0": Alias("go1-velocity-rough", _GO1_ROUGH),
    "Mjlab-Cartpole-Balance": Alias(
        "cartpole",
        f"Rewards, limits, observations and physics steps are those of Isaac-Cartpole-Direct-v0. {_MJLAB}",
    ),
    "Mjlab-Velocity-Flat-Unitree-G1": Alias("g1-velocity", f"{_G1} {_MJLAB}"),
    "Mjlab-Velocity-Flat-Unitree-Go1": Alias("go1-velocity", f"{_GO1} {_MJLAB}"),
    "Mjlab-Velocity-Rough-Unitree-Go1": Alias("go1-velocity-rough", f"{_GO1_ROUGH} {_MJLAB}"),
}
