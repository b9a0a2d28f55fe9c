"""Balance a pole on a cart from images."""

from dataclasses import dataclass

import mujoco
from torch import Tensor

from paceline.cameras.camera import Camera, add_cameras, look_at
from paceline.env.policy_interface import ObservationPart
from paceline.env.task import EnvState
from paceline.env.training_settings import TrainingSettings
from paceline.tasks.cartpole import Cartpole
from paceline.tasks.registry import TaskEntry

_POS, _TARGET = (0.0, -5.0, 2.6), (0.0, 0.0, 2.3)
_CAMERA = Camera(width=100, height=100, frames=2, pos=_POS, quat=look_at(_POS, _TARGET), fovy=65.0, far=12.0)


@dataclass(frozen=True)
class CartpoleCamera(Cartpole):
    """`Cartpole` whose policy and critic observe only the images of a camera in front of the cart.

    One image does not show velocities, so the last two images are stacked.
    """

    camera: Camera = _CAMERA

    def model(self) -> mujoco.MjModel:
        spec = self.scene()
        add_cameras(spec, self.cameras())
        return spec.compile()

    def cameras(self) -> dict[str, Camera]:
        return {"front": self.camera}

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        return {}

    def observation_parts(self, model: mujoco.MjModel) -> dict[str, tuple[ObservationPart, ...]]:
        return {}


ENTRY = TaskEntry(
    CartpoleCamera,
    summary="balance a pole on a cart, seen by a camera",
    # A small weight, because the value loss would dominate the gradient of the encoder, which actor and critic share.
    training=TrainingSettings(
        horizon=32,
        epochs=4,
        minibatches=8,
        hidden_layers=(64,),
        learning_rate=5e-4,
        desired_kl=0.0,
        value_loss_weight=0.1,
        entropy_weight=0.0,
        normalize_observations=False,
    ),
    max_iterations=200,
    cpu_envs=64,
    gpu_envs=1024,
)
