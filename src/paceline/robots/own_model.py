"""A user's own model of a robot, from an MJCF file, in place of ours in a scene."""

import os

import mujoco
import numpy as np

from paceline.errors import UserError

_HINGE, _SPHERE, _MESH = mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtGeom.mjGEOM_SPHERE, mujoco.mjtGeom.mjGEOM_MESH


def with_robot(scene: mujoco.MjSpec, path: str) -> mujoco.MjSpec:
    """A scene of `robots.go1` or `robots.g1`, with the links of a robot of the same family; without a path, as it is.

    The file gives the links' frames, masses, inertias, axes, ranges, shapes and colours; a link is found by the name of
    its joint. All else stays as it is in the scene: names, the order of the joints, motors, sensors, grip, options,
    ground and camera. The pose "home" keeps its angles, at the height at which these legs reach the ground.
    """
    if path:
        theirs = _compiled(path, _hinges(scene)[0].name)
        _check(scene, theirs, path)
        _Graft(scene, theirs, path).all_links()
        _put_on_the_ground(scene)
    return scene


def _hinges(scene: mujoco.MjSpec) -> list[mujoco.MjsJoint]:
    return [joint for joint in scene.joints if joint.type == _HINGE]


def _carrier(body: mujoco.MjsBody) -> str:
    """The hinge that carries a link; the trunk has none."""
    return next((joint.name for joint in body.joints if joint.type == _HINGE), "")


def _compiled(path: str, one_of_its_joints: str) -> mujoco.MjModel:
    """The file's robot; what is fixed to a link is made a part of it."""
    if not os.path.isfile(path):
        raise UserError(f"--env.robot {path}: no such file; give the path of an MJCF model")
    try:
        spec = mujoco.MjSpec.from_file(path)
        # None of this is used, and a link that one of them names would not be made a part of another.
        for element in (*spec.keys, *spec.sensors, *spec.actuators, *spec.excludes, *spec.pairs, *spec.tendons):
            spec.delete(element)
        joint = spec.joint(one_of_its_joints)
        if joint:
            _free(joint.parent)
        spec.compiler.fusestatic = True
        return spec.compile()
    except ValueError as error:
        raise UserError(f"--env.robot {path}: MuJoCo says: {' '.join(str(error).split())}") from None


def _free(link: mujoco.MjsBody) -> None:
    """The robot of a link: some files bolt it to the world, and leave it to others to set it free."""
    while link.parent.id != 0:
        link = link.parent
    if not link.joints:
        link.add_freejoint()


def _check(scene: mujoco.MjSpec, theirs: mujoco.MjModel, path: str) -> None:
    """Refuses a robot of another family: it must have the same joints in the same tree, turning the same way."""
    ours = {joint.name: joint for joint in _hinges(scene)}
    joints = [theirs.joint(i) for i in range(theirs.njnt) if theirs.jnt_type[i] != mujoco.mjtJoint.mjJNT_FREE.value]
    found = {joint.name: joint for joint in joints}
    missing, more = [name for name in ours if name not in found], [name for name in found if name not in ours]
    if missing:
        raise UserError(f"--env.robot {path} has no joint {', '.join(missing)}; it has {', '.join(found) or 'none'}")
    if more:
        raise UserError(f"--env.robot {path} has joints that the task does not know: {', '.join(more)}; remove them")
    if theirs.neq:
        raise UserError(f"--env.robot {path} has equality constraints, and the task's robot has none: remove them")
    for name, joint in ours.items():
        first = theirs.body_jntadr[theirs.body_parentid[found[name].bodyid[0]]]
        # The trunk's is not among those found, for it is free.
        its, wanted = next((n for n, j in found.items() if j.id == first), ""), _carrier(joint.parent.parent)
        if its != wanted:
            raise UserError(
                f"--env.robot {path}: the link of joint {name} must hang on {_link(wanted)}; it hangs on {_link(its)}"
            )
        if found[name].axis @ joint.axis < 0.9:
            wanted, its = (" ".join(f"{number:.3g}" for number in axis) for axis in (joint.axis, found[name].axis))
            raise UserError(f"--env.robot {path}: joint {name} must turn about {wanted} of its link, not {its}")


def _link(joint: str) -> str:
    return f"the link of joint {joint}" if joint else "the trunk"


class _Graft:
    """Puts the links of one robot in the places of another's."""

    def __init__(self, scene: mujoco.MjSpec, theirs: mujoco.MjModel, path: str):
        self._scene, self._theirs, self._path = scene, theirs, path
        self._trunk = _hinges(scene)[0].parent.parent
        # Geoms are made with our classes, which say how parts of a robot touch the ground.
        self._class = next(geom.classname for geom in self._trunk.geoms if geom.conaffinity)
        self._foot_class = next(geom.classname for geom in scene.geoms if geom.priority)
        self._meshes: dict[int, str] = {}

    def all_links(self) -> None:
        model, hinges = self._theirs, _hinges(self._scene)
        self._link(self._trunk, model.body_parentid[model.joint(hinges[0].name).bodyid[0]])
        for joint in hinges:
            its, link = model.joint(joint.name), joint.parent
            joint.pos, joint.axis = its.pos, its.axis
            if model.jnt_limited[its.id]:
                joint.range = its.range
            link.pos, link.quat = model.body_pos[its.bodyid[0]], model.body_quat[its.bodyid[0]]
            link.alt.type = mujoco.mjtOrientation.mjORIENTATION_QUAT
            self._link(link, its.bodyid[0])

    def _link(self, link: mujoco.MjsBody, theirs: int) -> None:
        model = self._theirs
        link.fullinertia = [np.nan] * 6
        link.mass, link.inertia = model.body_mass[theirs], model.body_inertia[theirs]
        link.ipos, link.iquat = model.body_ipos[theirs], model.body_iquat[theirs]

        geoms = np.flatnonzero(model.geom_bodyid == theirs).tolist()
        colliding = [geom for geom in geoms if model.geom_contype[geom] or model.geom_conaffinity[geom]]
        feet = self._feet(link, colliding)
        shell = self._shell(link)
        for geom in link.geoms:
            self._scene.delete(geom)
        for name, geom in feet.items():
            self._shape(link.add_geom(self._foot_class, name=name), geom)
        for geom in geoms:
            if geom not in feet.values():
                self._shape(shell.add_geom(self._class, conaffinity=geom in colliding), geom)

    def _feet(self, link: mujoco.MjsBody, colliding: list[int]) -> dict[str, int]:
        """By our names, which of the geoms are feet, if it is a link that has them: where ours is one ball, the lowest
        ball; else all that collide."""
        ours, model = [geom for geom in link.geoms if geom.priority], self._theirs
        if not ours:
            return {}
        name, one = ours[0].name, ours[0].type == _SPHERE
        found = [geom for geom in colliding if not one or model.geom_type[geom] == _SPHERE.value]
        if not found:
            kinds = [mujoco.mjtGeom(model.geom_type[geom]).name.removeprefix("mjGEOM_").lower() for geom in colliding]
            wanted, there = "sphere" if one else "geom", ", ".join(kinds) or "none"
            raise UserError(
                f"--env.robot {self._path}: {_link(_carrier(link))} has no foot: give it a {wanted} that collides; "
                f"what collides there is: {there}"
            )
        (site,) = link.sites
        lowest = min(found, key=self._lowest_point)
        if one:
            site.pos = model.geom_pos[lowest]
            return {name: lowest}
        site.pos = (*site.pos[:2], self._lowest_point(lowest))
        return {f"{name.rsplit('_', 1)[0]}_{number}": geom for number, geom in enumerate(found)}

    def _lowest_point(self, geom: int) -> float:
        """Of a geom of theirs, in its link's frame; metres."""
        model, turn = self._theirs, np.empty(9)
        mujoco.mju_quat2Mat(turn, model.geom_quat[geom])
        upwards, centre, half = turn[6:], model.geom_aabb[geom, :3], model.geom_aabb[geom, 3:]
        return float(model.geom_pos[geom, 2] + upwards @ centre - np.abs(upwards) @ half)

    def _shell(self, link: mujoco.MjsBody) -> mujoco.MjsBody:
        """What gets a link's shapes. If a sensor asks which contacts one geom of ours has, where there may be several
        now, they get a body of their own, without the foot, and the sensor asks for that."""
        shapes = [geom.name for geom in link.geoms if geom.name and not geom.priority]
        asked, a_geom = mujoco.mjtSensor.mjSENS_CONTACT, mujoco.mjtObj.mjOBJ_GEOM
        sensors = [s for s in self._scene.sensors if s.type == asked and s.objtype == a_geom and s.objname in shapes]
        if not sensors:
            return link
        shell = link.add_body(name=f"{link.name}_shell", explicitinertial=True)
        for sensor in sensors:
            sensor.objtype, sensor.objname = mujoco.mjtObj.mjOBJ_BODY, shell.name
        return shell

    def _shape(self, geom: mujoco.MjsGeom, theirs: int) -> None:
        model = self._theirs
        geom.type, geom.size = mujoco.mjtGeom(model.geom_type[theirs]), model.geom_size[theirs]
        geom.pos, geom.quat = model.geom_pos[theirs], model.geom_quat[theirs]
        material = model.geom_matid[theirs]
        geom.rgba = model.geom_rgba[theirs] if material < 0 else model.mat_rgba[material]
        # Group 0 is the ground's.
        geom.group = max(1, model.geom_group[theirs])
        geom.mass = 0.0
        if geom.type == _MESH:
            geom.meshname = self._mesh(model.geom_dataid[theirs])

    def _mesh(self, number: int) -> str:
        if number not in self._meshes:
            mesh, name = self._theirs.mesh(number), f"own_{number}"
            vertices = slice(mesh.vertadr[0], mesh.vertadr[0] + mesh.vertnum[0])
            faces = slice(mesh.faceadr[0], mesh.faceadr[0] + mesh.facenum[0])
            # As a shell's, its mass is well defined even if it has holes; it is not used.
            self._scene.add_mesh(
                name=name,
                uservert=self._theirs.mesh_vert[vertices].ravel(),
                userface=self._theirs.mesh_face[faces].ravel(),
                inertia=mujoco.mjtMeshInertia.mjMESH_INERTIA_SHELL,
            )
            self._meshes[number] = name
        return self._meshes[number]


def _put_on_the_ground(scene: mujoco.MjSpec) -> None:
    """Sets the height of the pose "home" so that the lowest foot touches the plane z = 0."""
    home = scene.key("home")
    plane = scene.worldbody.add_geom(type=mujoco.mjtGeom.mjGEOM_PLANE, size=(0.0, 0.0, 1.0), name="level")
    model = scene.compile()
    world, level = mujoco.MjData(model), model.geom("level").id
    mujoco.mj_resetDataKeyframe(model, world, model.key("home").id)
    mujoco.mj_kinematics(model, world)
    feet = np.flatnonzero(model.geom_priority > 0)
    gap = min(mujoco.mj_geomDistance(model, world, level, foot, 10.0, None) for foot in feet)
    scene.delete(plane)
    qpos = world.qpos.copy()
    qpos[2] -= gap
    home.qpos = qpos
