"""A task whose every number can be worked out by hand."""

import math
from dataclasses import dataclass

import mujoco
import torch
from torch import Tensor

from paceline.env.task import Worlds


@dataclass(frozen=True)
class Drift:
    """A block drifts along a rail without friction, from somewhere in [-1, 0) at 1 to 2 m/s, until it meets the wall.
    Some of what it observes is the simulation's own memory, as a task author may well write it."""

    wall: float = math.inf
    episode_seconds: float = 0.4
    decimation: int = 4

    num_actions = 1
    reset_numbers = 2

    def model(self) -> mujoco.MjModel:
        return mujoco.MjModel.from_xml_string("""
        <mujoco>
          <option timestep="0.01" gravity="0 0 0" integrator="implicitfast"/>
          <worldbody>
            <body name="block"><joint name="rail" type="slide" axis="1 0 0"/><geom size=".1" mass="1"/></body>
          </worldbody>
          <actuator><motor joint="rail"/></actuator>
          <sensor><jointpos name="place" joint="rail"/></sensor>
        </mujoco>""")

    def control(self, worlds: Worlds) -> Tensor:
        return worlds.action

    def observe(self, worlds: Worlds) -> dict[str, Tensor]:
        steps = worlds.episode_step[:, None].float()
        policy = torch.cat((worlds.qpos, worlds.qvel, worlds.action, worlds.last_action, steps), dim=1)
        return {"policy": policy, "critic": worlds.qpos, "sensed": worlds.sensor("place")}

    def reward(self, worlds: Worlds, terminated: Tensor) -> dict[str, Tensor]:
        return {"place": worlds.qpos[:, 0], "crash": -5.0 * terminated.float()}

    def terminated(self, worlds: Worlds) -> Tensor:
        return worlds.qpos[:, 0] > self.wall

    def reset(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        return -uniform[:, :1], 1.0 + uniform[:, 1:]
