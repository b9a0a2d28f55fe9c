"""Balance a pole on a cart that is pushed left and right."""

import math
from dataclasses import dataclass

import mujoco
import torch
from torch import Tensor

from paceline.env.task import Worlds
from paceline.env.training_settings import TrainingSettings
from paceline.tasks.registry import TaskEntry
from paceline.validation import above_zero, finite_options, options, physics_rate


@dataclass(frozen=True)
class Cartpole:
    """Rewards and limits as in the widely used direct-workflow cartpole; angles in radians, upright is zero."""

    episode_seconds: float = 5.0
    decimation: int = 2
    physics_hz: float = 120.0
    force_newtons: float = 100.0
    """The cart's push at an action of 1; actions are clamped to [-1, 1]."""
    rail_metres: float = 3.0
    """Further out on either side the episode ends."""
    start_angle: float = 0.25 * math.pi
    """Largest tilt at the start; at `max_angle` the episode ends."""
    max_angle: float = 0.5 * math.pi

    num_actions = 1
    reset_numbers = 1

    def __post_init__(self) -> None:
        options(above_zero, self, "force_newtons", "rail_metres", "start_angle", "max_angle")
        options(physics_rate, self, "physics_hz")
        finite_options(self)

    def model(self) -> mujoco.MjModel:
        return mujoco.MjModel.from_xml_string(f"""
        <mujoco model="cartpole">
          <option timestep="{1.0 / self.physics_hz!r}" integrator="Euler"><flag constraint="disable"/></option>
          <visual>
            <headlight ambient=".4 .4 .4" diffuse=".3 .3 .3" specular=".1 .1 .1"/>
            <global offwidth="1280" offheight="720"/>
          </visual>
          <asset>
            <texture name="sky" type="skybox" builtin="gradient" rgb1=".5 .7 .9" rgb2="1 1 1" width="64" height="384"/>
            <texture name="tiles" type="2d" builtin="checker" rgb1=".9 .9 .9" rgb2=".8 .83 .86" width="64" height="64"/>
            <material name="tiles" texture="tiles" texuniform="true"/>
          </asset>
          <worldbody>
            <light directional="true" pos="0 0 5" dir="-.25 .45 -1" diffuse=".65 .65 .65" specular=".1 .1 .1"/>
            <camera name="track" pos="0 -5.6 3.1" xyaxes="1 0 0 0 .17 1" fovy="47"/>
            <geom name="floor" type="plane" pos="0 0 1.2" size="12 12 1" material="tiles" contype="0" conaffinity="0"/>
            <geom name="rail" type="capsule" fromto="-4 0 2 4 0 2" size=".03" rgba=".5 .55 .6 1"/>
            <body name="cart" pos="0 0 2">
              <joint name="slider" type="slide" axis="1 0 0"/>
              <geom name="cart" type="box" size=".2 .15 .1" mass="1" rgba=".15 .35 .6 1"/>
              <body name="pole">
                <joint name="hinge" type="hinge" axis="0 1 0"/>
                <geom name="pole" type="capsule" fromto="0 0 0 0 0 1" size=".045" mass=".5" rgba=".9 .45 .1 1"/>
              </body>
            </body>
          </worldbody>
          <actuator><motor joint="slider" gear="{self.force_newtons!r}" ctrlrange="-1 1"/></actuator>
        </mujoco>""")

    def control(self, worlds: Worlds) -> Tensor:
        return worlds.action.clamp(-1.0, 1.0)

    def observe(self, worlds: Worlds) -> dict[str, Tensor]:
        return {"policy": torch.cat((worlds.qpos, worlds.qvel), dim=1)}

    def terminated(self, worlds: Worlds) -> Tensor:
        position, angle = worlds.qpos.abs().unbind(1)
        return (position > self.rail_metres) | (angle > self.max_angle)

    def reward(self, worlds: Worlds, terminated: Tensor) -> dict[str, Tensor]:
        angle = worlds.qpos[:, 1]
        cart_speed, pole_speed = worlds.qvel.abs().unbind(1)
        return {
            "alive": (~terminated).float(),
            "terminated": -2.0 * terminated.float(),
            "pole_angle": -angle.square(),
            "cart_speed": -0.01 * cart_speed,
            "pole_speed": -0.005 * pole_speed,
        }

    def reset(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        angle, zero = (uniform - 0.5) * (2.0 * self.start_angle), torch.zeros_like(uniform)
        return torch.cat((zero, angle), dim=1), zero.expand(-1, 2)


ENTRY = TaskEntry(
    Cartpole,
    summary="balance a pole on a cart that is pushed left and right",
    training=TrainingSettings(
        horizon=32,
        epochs=4,
        hidden_layers=(32, 32),
        entropy_weight=0.0,
        overrides={
            "rsl_rl": {"entropy_coef": 0.005, "num_learning_epochs": 5, "num_steps_per_env": 16},
            "rl_games": {
                "bounds_loss_coef": 1e-4,
                "critic_coef": 4.0,
                "horizon_length": 16,
                "kl_threshold": 0.008,
                "learning_rate": 5e-4,
                "mini_epochs": 8,
                "reward_scale": 0.1,
                "separate": True,
            },
            "skrl": {
                "kl_threshold": 0.008,
                "learning_epochs": 8,
                "learning_rate": 5e-4,
                "mini_batches": 8,
                "rewards_shaper_scale": 0.1,
            },
        },
    ),
    max_iterations=120,
    cpu_envs=256,
)
