"""What a robot stands on, and what is around it."""

FLOOR = '<geom name="floor" type="plane" size="0 0 1" material="tiles" contype="1" conaffinity="0"/>'
"""Ground has contype 1 and conaffinity 0, robots the reverse: only pairs of the two collide. Rays that shall see the
ground alone look at geom group 0; robots are in group 1."""


def surroundings(ground: str, centre: float) -> str:
    """MJCF: the ground, itself MJCF, under a sky; `centre` is the robot's height, metres."""
    return f"""
    <visual>
      <headlight ambient=".4 .4 .4" diffuse=".3 .3 .3" specular=".1 .1 .1"/>
      <global offwidth="1280" offheight="720"/>
    </visual>
    <statistic extent="2" center="0 0 {centre!r}"/>
    <asset>
      <texture name="sky" type="skybox" builtin="gradient" rgb1=".5 .7 .9" rgb2="1 1 1" width="64" height="384"/>
      <texture name="tiles" type="2d" builtin="checker" rgb1=".9 .9 .9" rgb2=".8 .83 .86" width="64" height="64"/>
      <material name="tiles" texture="tiles" texuniform="true"/>
    </asset>
    <worldbody>{ground}</worldbody>"""
