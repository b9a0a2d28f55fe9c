"""Replace the links of a legged robot with those of a user's MJCF file."""

import os

import mujoco
import numpy as np

from paceline.errors import UserError

_HINGE, _SPHERE, _MESH = mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtGeom.mjGEOM_SPHERE, mujoco.mjtGeom.mjGEOM_MESH


def with_robot(scene: mujoco.MjSpec, path: str) -> mujoco.MjSpec:
    """Replace the links of `scene` with those of the MJCF file at `path`; an empty path changes nothing.

    `scene` is a robot of `robots.legged`, and the file a robot with the same joint names. The file gives the links'
    frames, masses, inertias, joint axes, joint ranges, shapes and colors. Everything else stays as in the scene: names,
    joint order, actuators, sensors, foot friction, options, ground and camera. The keyframe "home" keeps its joint
    positions; its height is set so that the feet touch the ground.
    """
    if path:
        own = _compile_file(path, _hinges(scene)[0].name)
        _check_family(scene, own, path)
        _LinkReplacement(scene, own, path).replace_all()
        _set_home_height(scene)
    return scene


def _hinges(scene: mujoco.MjSpec) -> list[mujoco.MjsJoint]:
    return [joint for joint in scene.joints if joint.type == _HINGE]


def _hinge_name(body: mujoco.MjsBody) -> str:
    """Return the name of the hinge between a link and its parent; empty for the base."""
    return next((joint.name for joint in body.joints if joint.type == _HINGE), "")


def _compile_file(path: str, joint_name: str) -> mujoco.MjModel:
    """Compile the robot of a file. Bodies without a joint are merged into their parents."""
    if not os.path.isfile(path):
        raise UserError(f"--env.robot {path}: no such file; give the path of an MJCF model")
    try:
        spec = mujoco.MjSpec.from_file(path)
        # These elements are not used, and MuJoCo does not merge a body that one of them refers to.
        for element in (*spec.keys, *spec.sensors, *spec.actuators, *spec.excludes, *spec.pairs, *spec.tendons):
            spec.delete(element)
        joint = spec.joint(joint_name)
        if joint:
            _add_free_joint(joint.parent)
        spec.compiler.fusestatic = True
        return spec.compile()
    except ValueError as error:
        raise UserError(f"--env.robot {path}: MuJoCo says: {' '.join(str(error).split())}") from None


def _add_free_joint(link: mujoco.MjsBody) -> None:
    """Add a free joint to the base of a link's robot if it has no joint; some files fix the base to the world."""
    while link.parent.id != 0:
        link = link.parent
    if not link.joints:
        link.add_freejoint()


def _check_family(scene: mujoco.MjSpec, own: mujoco.MjModel, path: str) -> None:
    """Raise UserError unless both robots have the same joints, in the same tree and with similar axes."""
    ours = {joint.name: joint for joint in _hinges(scene)}
    joints = [own.joint(i) for i in range(own.njnt) if own.jnt_type[i] != mujoco.mjtJoint.mjJNT_FREE.value]
    found = {joint.name: joint for joint in joints}
    missing, extra = [name for name in ours if name not in found], [name for name in found if name not in ours]
    if missing:
        raise UserError(f"--env.robot {path} has no joint {', '.join(missing)}; it has {', '.join(found) or 'none'}")
    if extra:
        raise UserError(f"--env.robot {path} has unsupported joints: {', '.join(extra)}; remove them")
    if own.neq:
        raise UserError(f"--env.robot {path} has equality constraints, which are not supported; remove them")
    for name, joint in ours.items():
        first = own.body_jntadr[own.body_parentid[found[name].bodyid[0]]]
        # The base is not found here, because its joint is free.
        parent, expected = next((n for n, j in found.items() if j.id == first), ""), _hinge_name(joint.parent.parent)
        if parent != expected:
            raise UserError(
                f"--env.robot {path}: the parent of the link of joint {name} must be {_describe(expected)}, not "
                f"{_describe(parent)}"
            )
        if found[name].axis @ joint.axis < 0.9:
            expected, axis = (" ".join(f"{number:.3g}" for number in axis) for axis in (joint.axis, found[name].axis))
            raise UserError(f"--env.robot {path}: joint {name} must have the axis {expected}, not {axis}")


def _describe(joint: str) -> str:
    return f"the link of joint {joint}" if joint else "the base"


class _LinkReplacement:
    """Replaces the links of the robot in a scene with those of another compiled robot."""

    def __init__(self, scene: mujoco.MjSpec, own: mujoco.MjModel, path: str):
        self._scene, self._own, self._path = scene, own, path
        self._base = _hinges(scene)[0].parent.parent
        # New geoms get the scene's classes, which define the contacts between robot and ground.
        self._collision_class, self._foot_class = scene.find_default("collision"), scene.find_default("foot")
        self._meshes: dict[int, str] = {}

    def replace_all(self) -> None:
        model, hinges = self._own, _hinges(self._scene)
        self._replace(self._base, model.body_parentid[model.joint(hinges[0].name).bodyid[0]])
        for joint in hinges:
            own, link = model.joint(joint.name), joint.parent
            joint.pos, joint.axis = own.pos, own.axis
            if model.jnt_limited[own.id]:
                joint.range = own.range
            link.pos, link.quat = model.body_pos[own.bodyid[0]], model.body_quat[own.bodyid[0]]
            link.alt.type = mujoco.mjtOrientation.mjORIENTATION_QUAT
            self._replace(link, own.bodyid[0])

    def _replace(self, link: mujoco.MjsBody, own: int) -> None:
        model = self._own
        link.fullinertia = [np.nan] * 6
        link.mass, link.inertia = model.body_mass[own], model.body_inertia[own]
        link.ipos, link.iquat = model.body_ipos[own], model.body_iquat[own]

        geoms = np.flatnonzero(model.geom_bodyid == own).tolist()
        colliding = [geom for geom in geoms if model.geom_contype[geom] or model.geom_conaffinity[geom]]
        feet = self._feet(link, colliding)
        shell = self._shell(link)
        for geom in link.geoms:
            self._scene.delete(geom)
        for name, geom in feet.items():
            self._shape(link.add_geom(self._foot_class, name=name), geom)
        for geom in geoms:
            if geom not in feet.values():
                self._shape(shell.add_geom(self._collision_class, conaffinity=geom in colliding), geom)

    def _feet(self, link: mujoco.MjsBody, colliding: list[int]) -> dict[str, int]:
        """Return the foot geoms of a link by name; empty if the link has no foot in the scene.

        A foot that is one sphere in the scene is the lowest sphere. Otherwise all colliding geoms are the foot.
        """
        ours, model = [geom for geom in link.geoms if geom.priority], self._own
        if not ours:
            return {}
        name, is_sphere = ours[0].name, ours[0].type == _SPHERE
        found = [geom for geom in colliding if not is_sphere or model.geom_type[geom] == _SPHERE.value]
        if not found:
            kinds = [mujoco.mjtGeom(model.geom_type[geom]).name.removeprefix("mjGEOM_").lower() for geom in colliding]
            expected, present = "sphere" if is_sphere else "geom", ", ".join(kinds) or "none"
            raise UserError(
                f"--env.robot {self._path}: {_describe(_hinge_name(link))} has no foot; add a {expected} that collides "
                f"(colliding geoms of the link: {present})"
            )
        (site,) = link.sites
        lowest = min(found, key=self._lowest_point)
        if is_sphere:
            site.pos = model.geom_pos[lowest]
            return {name: lowest}
        site.pos = (*site.pos[:2], self._lowest_point(lowest))
        return {f"{name.rsplit('_', 1)[0]}_{number}": geom for number, geom in enumerate(found)}

    def _lowest_point(self, geom: int) -> float:
        """Return the lowest z of a geom in the frame of its link, meters."""
        model, rotation = self._own, np.empty(9)
        mujoco.mju_quat2Mat(rotation, model.geom_quat[geom])
        up, center, half = rotation[6:], model.geom_aabb[geom, :3], model.geom_aabb[geom, 3:]
        return float(model.geom_pos[geom, 2] + up @ center - np.abs(up) @ half)

    def _shell(self, link: mujoco.MjsBody) -> mujoco.MjsBody:
        """Return the body that gets the geoms of a link, except its foot.

        Where a contact sensor of the scene refers to one geom of the link, the file may have several geoms. They are
        put into a child body, and the sensor then refers to that body.
        """
        shapes = [geom.name for geom in link.geoms if geom.name and not geom.priority]
        contact, geom = mujoco.mjtSensor.mjSENS_CONTACT, mujoco.mjtObj.mjOBJ_GEOM
        sensors = [s for s in self._scene.sensors if s.type == contact and s.objtype == geom and s.objname in shapes]
        if not sensors:
            return link
        shell = link.add_body(name=f"{link.name}_shell", explicitinertial=True)
        for sensor in sensors:
            sensor.objtype, sensor.objname = mujoco.mjtObj.mjOBJ_BODY, shell.name
        return shell

    def _shape(self, geom: mujoco.MjsGeom, own: int) -> None:
        model = self._own
        geom.type, geom.size = mujoco.mjtGeom(model.geom_type[own]), model.geom_size[own]
        geom.pos, geom.quat = model.geom_pos[own], model.geom_quat[own]
        material = model.geom_matid[own]
        geom.rgba = model.geom_rgba[own] if material < 0 else model.mat_rgba[material]
        # Group 0 is for the ground.
        geom.group = max(1, model.geom_group[own])
        geom.mass = 0.0
        if geom.type == _MESH:
            geom.meshname = self._mesh(model.geom_dataid[own])

    def _mesh(self, number: int) -> str:
        if number not in self._meshes:
            mesh, name = self._own.mesh(number), f"own_{number}"
            vertices = slice(mesh.vertadr[0], mesh.vertadr[0] + mesh.vertnum[0])
            faces = slice(mesh.faceadr[0], mesh.faceadr[0] + mesh.facenum[0])
            # The mass is not used; as a shell it is defined even for a mesh with holes.
            self._scene.add_mesh(
                name=name,
                uservert=self._own.mesh_vert[vertices].ravel(),
                userface=self._own.mesh_face[faces].ravel(),
                inertia=mujoco.mjtMeshInertia.mjMESH_INERTIA_SHELL,
            )
            self._meshes[number] = name
        return self._meshes[number]


def _set_home_height(scene: mujoco.MjSpec) -> None:
    """Set the height of the keyframe "home" so that the lowest foot touches the plane z = 0."""
    home = scene.key("home")
    plane = scene.worldbody.add_geom(type=mujoco.mjtGeom.mjGEOM_PLANE, size=(0.0, 0.0, 1.0), name="level")
    model = scene.compile()
    data, level = mujoco.MjData(model), model.geom("level").id
    mujoco.mj_resetDataKeyframe(model, data, model.key("home").id)
    mujoco.mj_kinematics(model, data)
    feet = np.flatnonzero(model.geom_priority > 0)
    gap = min(mujoco.mj_geomDistance(model, data, level, foot, 10.0, None) for foot in feet)
    scene.delete(plane)
    qpos = data.qpos.copy()
    qpos[2] -= gap
    home.qpos = qpos
