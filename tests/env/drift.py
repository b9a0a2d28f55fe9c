"""A task all of whose numbers can be computed by hand."""

import math
from dataclasses import dataclass

import mujoco
import torch
from torch import Tensor

from paceline.env.task import EnvState, ResetState, Task


@dataclass(frozen=True)
class Drift(Task):
    """A block drifts along a rail without friction, from somewhere in [-1, 0) at 1 to 2 m/s, until it meets the wall.
    Some observations are tensors of the simulation itself, as a task may return them."""

    wall: float = math.inf
    episode_seconds: float = 0.4
    decimation: int = 4

    num_actions = 1
    num_reset_samples = 2

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

    def control(self, state: EnvState) -> Tensor:
        return state.action

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        steps = state.episode_step[:, None].float()
        policy = torch.cat((state.qpos, state.qvel, state.action, state.last_action, steps), dim=1)
        return {"policy": policy, "critic": state.qpos, "sensed": state.sensor("place")}

    def reward(self, state: EnvState, terminated: Tensor) -> dict[str, Tensor]:
        return {"place": state.qpos[:, 0], "crash": -5.0 * terminated.float()}

    def terminated(self, state: EnvState) -> Tensor:
        return state.qpos[:, 0] > self.wall

    def reset(self, state: EnvState, uniform: Tensor) -> ResetState:
        return ResetState(-uniform[:, :1], 1.0 + uniform[:, 1:])
