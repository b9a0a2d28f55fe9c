"""Models for the tests of both engines."""

import mujoco

BLOCK = """
<mujoco model="block">
  <option timestep="0.005" integrator="implicitfast"/>
  <worldbody>
    <geom name="floor" type="plane" size="5 5 .1"/>
    <body name="target" mocap="true" pos="1 0 .5"><site name="target"/></body>
    <body name="block" pos="0 0 .2">
      <freejoint/>
      <geom name="block" type="box" size=".1 .08 .06" mass="1"/>
      <site name="skin" type="box" size=".11 .09 .07"/>
      <body name="arm" pos="0 0 .06">
        <joint name="arm" type="hinge" axis="0 1 0" damping=".1"/>
        <geom name="arm" type="capsule" fromto="0 0 .05 .1 0 .05" size=".02" mass=".2" contype="0" conaffinity="0"/>
      </body>
    </body>
  </worldbody>
  <actuator><general name="arm" joint="arm" dyntype="filter" dynprm=".02" gainprm=".3"/></actuator>
  <sensor>
    <jointpos name="arm" joint="arm"/>
    <framepos name="place" objtype="site" objname="skin"/>
    <framepos name="target" objtype="site" objname="target" reftype="site" refname="skin"/>
    <gyro name="gyro" site="skin"/>
    <accelerometer name="accelerometer" site="skin"/>
    <touch name="touch" site="skin"/>
  </sensor>
</mujoco>"""


def block() -> mujoco.MjModel:
    """Return a block with an arm that falls on a floor.

    It has a free joint, contacts, an activation, a mocap body, and sensors of positions, velocities and accelerations.
    """
    return mujoco.MjModel.from_xml_string(BLOCK)
