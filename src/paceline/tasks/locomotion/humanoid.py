"""A humanoid runs towards a target."""

from dataclasses import dataclass, field

from paceline.env.training_settings import TrainingSettings
from paceline.robots.runners import Joint, Runner
from paceline.tasks.locomotion.locomotion_task import LocomotionRewards, LocomotionTask
from paceline.tasks.registry import TaskEntry


def _leg(side: str) -> dict[str, Joint]:
    return {
        f"{side}_hip_x": Joint(torque=45.0, range=(-45.0, 15.0), armature=0.01, damping=5.0, stiffness=10.0),
        f"{side}_hip_z": Joint(45.0, (-60.0, 35.0), 0.01, 5.0, 10.0),
        f"{side}_hip_y": Joint(135.0, (-120.0, 45.0), 0.01, 5.0, 20.0),
        f"{side}_knee": Joint(90.0, (-160.0, 2.0), 0.007, 0.1, 5.0),
    }


def _arm(side: str, shoulder: tuple[float, float]) -> dict[str, Joint]:
    """Return the joints of an arm. The axes of the shoulders are mirrored, and so are their ranges."""
    return {
        f"{side}_shoulder1": Joint(67.5, shoulder, 0.01, 5.0, 10.0),
        f"{side}_shoulder2": Joint(67.5, shoulder, 0.01, 5.0, 10.0),
        f"{side}_elbow": Joint(45.0, (-90.0, 50.0), 0.006, 1.0, 2.0),
    }


_TRUNK = {
    "abdomen_z": Joint(67.5, (-45.0, 45.0), 0.02, 5.0, 20.0),
    "abdomen_y": Joint(67.5, (-75.0, 30.0), 0.01, 5.0, 20.0),
    "abdomen_x": Joint(67.5, (-35.0, 35.0), 0.01, 5.0, 10.0),
}

HUMANOID = Runner(
    "humanoid",
    start_height=1.34,
    joints=_TRUNK | _leg("right") | _leg("left") | _arm("right", (-90.0, 70.0)) | _arm("left", (-70.0, 90.0)),
)


def _rewards() -> LocomotionRewards:
    return LocomotionRewards(alive=2.0, action=-0.01, termination=-1.0)


@dataclass(frozen=True)
class Humanoid(LocomotionTask):
    """Gymnasium's humanoid, which has no ankles, with the joint ranges, springs, armatures and torques of
    Isaac-Humanoid-Direct-v0."""

    min_height: float = 0.8
    joint_vel_scale: float = 0.1
    ang_vel_scale: float = 0.25
    rewards: LocomotionRewards = field(default_factory=_rewards)

    robot = HUMANOID
    num_actions = len(HUMANOID.joints)
    num_reset_samples = 2 * num_actions


ENTRY = TaskEntry(
    Humanoid,
    summary="a humanoid runs towards a target",
    # Values reach a thousand: clipped to changes of 0.2, the critic would not learn.
    training=TrainingSettings(
        horizon=32,
        learning_rate=5e-4,
        desired_kl=0.008,
        clip_value=False,
        entropy_weight=0.0,
        overrides={
            "rsl_rl": {"learning_rate": 1e-4},
            "rl_games": {"bounds_loss_coef": 1e-4, "clip_value": True, "critic_coef": 4.0, "reward_scale": 0.01},
            "skrl": {"rewards_shaper_scale": 0.01, "value_clip": 0.2},
        },
    ),
    max_iterations=1000,
    cpu_envs=512,
)
