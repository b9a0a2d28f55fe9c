"""Replace the links of a legged robot with those of a user's MJCF file."""

import os

import mujoco
import numpy as np

from paceline.errors import UserError

_FREE, _HINGE = mujoco.mjtJoint.mjJNT_FREE, mujoco.mjtJoint.mjJNT_HINGE
_SPHERE, _MESH = mujoco.mjtGeom.mjGEOM_SPHERE, mujoco.mjtGeom.mjGEOM_MESH


def with_robot(scene: mujoco.MjSpec, path: str) -> mujoco.MjSpec:
    """Replace the links of `scene` with those of the MJCF file at `path`; an empty path changes nothing.

    `scene` is a robot of `robots.legged`, and the file a robot with the same joint names. The file gives the links'
    frames, masses, inertias, joint axes, joint ranges, shapes and colors. Everything else stays as in the scene: names,
    joint order, actuators, sensors, foot friction, options, ground and camera. The keyframe "home" keeps its joint
    positions; its height is set so that the feet touch the ground.
    """
    if not path:
        return scene
    hinges = [joint for joint in scene.joints if joint.type == _HINGE]
    own = _compile_file(path, hinges[0].name)
    _check_family(scene.copy().compile(), own, path)
    for number in range(own.nmesh):
        _add_mesh(scene, own, number)
    base = own.body_parentid[own.joint(hinges[0].name).bodyid[0]]
    _replace_link(scene, hinges[0].parent.parent, own, base, path)
    for joint in hinges:
        found, link = own.joint(joint.name), joint.parent
        joint.pos, joint.axis = found.pos, found.axis
        if own.jnt_limited[found.id]:
            joint.range = found.range
        link.pos, link.quat = own.body_pos[found.bodyid[0]], own.body_quat[found.bodyid[0]]
        link.alt.type = mujoco.mjtOrientation.mjORIENTATION_QUAT
        _replace_link(scene, link, own, found.bodyid[0], path)
    _set_home_height(scene)
    return scene


def _compile_file(path: str, joint_name: str) -> mujoco.MjModel:
    """Compile the robot of a file. Bodies without a joint are merged into their parents."""
    if not os.path.isfile(path):
        raise UserError(f"--env.robot {path}: no such file; give the path of an MJCF model")
    try:
        spec = mujoco.MjSpec.from_file(path)
        # These elements are not used, and MuJoCo does not merge a body that one of them refers to.
        for element in (*spec.keys, *spec.sensors, *spec.actuators, *spec.excludes, *spec.pairs, *spec.tendons):
            spec.delete(element)
        if joint := spec.joint(joint_name):
            base = joint.parent
            while base.parent.id != 0:
                base = base.parent
            # Some files fix the base to the world.
            if not base.joints:
                base.add_freejoint()
        spec.compiler.fusestatic = True
        return spec.compile()
    except ValueError as error:
        raise UserError(f"--env.robot {path}: MuJoCo says: {' '.join(str(error).split())}") from None


def _check_family(scene: mujoco.MjModel, own: mujoco.MjModel, path: str) -> None:
    """Raise UserError unless both robots have the same joints, in the same tree and with similar axes."""
    expected, found = _parent_links(scene), _parent_links(own)
    missing, extra = [name for name in expected if name not in found], [name for name in found if name not in expected]
    if missing:
        raise UserError(f"--env.robot {path} has no joint {', '.join(missing)}; it has {', '.join(found) or 'none'}")
    if extra:
        raise UserError(f"--env.robot {path} has unsupported joints: {', '.join(extra)}; remove them")
    if own.neq:
        raise UserError(f"--env.robot {path} has equality constraints, which are not supported; remove them")
    for name, parent in expected.items():
        place, axes = f"--env.robot {path}: ", (scene.joint(name).axis, own.joint(name).axis)
        if found[name] != parent:
            raise UserError(f"{place}the parent of the link of joint {name} must be {parent}, not {found[name]}")
        if axes[0] @ axes[1] < 0.9:
            wanted, given = (" ".join(f"{number:.3g}" for number in axis) for axis in axes)
            raise UserError(f"{place}joint {name} must have the axis {wanted}, not {given}")


def _parent_links(model: mujoco.MjModel) -> dict[str, str]:
    """Return a description of the parent of the link of each joint, by the name of the joint."""
    joints = {i: model.joint(i).name for i in range(model.njnt) if model.jnt_type[i] != _FREE.value}
    links = {i: f"the link of joint {name}" for i, name in joints.items()}
    parents = {i: model.body_jntadr[model.body_parentid[model.jnt_bodyid[i]]] for i in joints}
    return {name: links.get(parents[i], "the base") for i, name in joints.items()}


def _replace_link(scene: mujoco.MjSpec, link: mujoco.MjsBody, own: mujoco.MjModel, body: int, path: str) -> None:
    """Replace the inertia and the geoms of a link with those of a body of `own`."""
    link.fullinertia = [np.nan] * 6
    link.mass, link.inertia = own.body_mass[body], own.body_inertia[body]
    link.ipos, link.iquat = own.body_ipos[body], own.body_iquat[body]
    geoms = np.flatnonzero(own.geom_bodyid == body).tolist()
    colliding = [geom for geom in geoms if own.geom_contype[geom] or own.geom_conaffinity[geom]]
    feet, shell = _feet(link, own, colliding, path), _shell(scene, link)
    for geom in link.geoms:
        scene.delete(geom)
    # New geoms get the scene's classes, which define the contacts between robot and ground.
    for name, geom in feet.items():
        _set_shape(link.add_geom(scene.find_default("foot"), name=name), own, geom)
    for geom in geoms:
        if geom not in feet.values():
            _set_shape(shell.add_geom(scene.find_default("collision"), conaffinity=geom in colliding), own, geom)


def _feet(link: mujoco.MjsBody, own: mujoco.MjModel, colliding: list[int], path: str) -> dict[str, int]:
    """Return the foot geoms of a link by name, and move its site; empty if the link has no foot in the scene.

    If the foot of the scene is a sphere, the foot is the lowest sphere that collides, otherwise all colliding geoms.
    """
    replaced = [geom for geom in link.geoms if geom.priority]
    if not replaced:
        return {}
    name, is_sphere = replaced[0].name, replaced[0].type == _SPHERE
    found = [geom for geom in colliding if not is_sphere or own.geom_type[geom] == _SPHERE.value]
    if not found:
        kinds = [mujoco.mjtGeom(own.geom_type[geom]).name.removeprefix("mjGEOM_").lower() for geom in colliding]
        raise UserError(
            f"--env.robot {path}: the link of joint {link.joints[0].name} has no foot; add a "
            f"{'sphere' if is_sphere else 'geom'} that collides (colliding geoms of the link: "
            f"{', '.join(kinds) or 'none'})"
        )
    (site,), lowest = link.sites, min(found, key=lambda geom: _lowest_point(own, geom))
    if is_sphere:
        site.pos = own.geom_pos[lowest]
        return {name: lowest}
    site.pos = (*site.pos[:2], _lowest_point(own, lowest))
    return {f"{name.rsplit('_', 1)[0]}_{number}": geom for number, geom in enumerate(found)}


def _lowest_point(model: mujoco.MjModel, geom: int) -> float:
    """Return the lowest z of a geom in the frame of its link, meters."""
    rotation = np.empty(9)
    mujoco.mju_quat2Mat(rotation, model.geom_quat[geom])
    up, center, half = rotation[6:], model.geom_aabb[geom, :3], model.geom_aabb[geom, 3:]
    return float(model.geom_pos[geom, 2] + up @ center - np.abs(up) @ half)


def _shell(scene: mujoco.MjSpec, link: mujoco.MjsBody) -> mujoco.MjsBody:
    """Return the body that gets the geoms of a link, except its foot.

    Where a contact sensor of the scene refers to one geom of the link, the file may have several geoms. They are put
    into a child body, and the sensor then refers to that body.
    """
    shapes = [geom.name for geom in link.geoms if geom.name and not geom.priority]
    contact, geom = mujoco.mjtSensor.mjSENS_CONTACT, mujoco.mjtObj.mjOBJ_GEOM
    sensors = [s for s in scene.sensors if s.type == contact and s.objtype == geom and s.objname in shapes]
    if not sensors:
        return link
    shell = link.add_body(name=f"{link.name}_shell", explicitinertial=True)
    for sensor in sensors:
        sensor.objtype, sensor.objname = mujoco.mjtObj.mjOBJ_BODY, shell.name
    return shell


def _set_shape(geom: mujoco.MjsGeom, own: mujoco.MjModel, number: int) -> None:
    """Give a geom the shape, the pose and the color of geom `number` of `own`."""
    geom.type, geom.size = mujoco.mjtGeom(own.geom_type[number]), own.geom_size[number]
    geom.pos, geom.quat, geom.mass = own.geom_pos[number], own.geom_quat[number], 0.0
    material = own.geom_matid[number]
    geom.rgba = own.geom_rgba[number] if material < 0 else own.mat_rgba[material]
    # Group 0 is for the ground.
    geom.group = max(1, own.geom_group[number])
    if geom.type == _MESH:
        geom.meshname = f"own_{own.geom_dataid[number]}"


def _add_mesh(scene: mujoco.MjSpec, own: mujoco.MjModel, number: int) -> None:
    mesh = own.mesh(number)
    vertices = own.mesh_vert[mesh.vertadr[0] : mesh.vertadr[0] + mesh.vertnum[0]].ravel()
    faces = own.mesh_face[mesh.faceadr[0] : mesh.faceadr[0] + mesh.facenum[0]].ravel()
    # The mass is not used; as a shell it is defined even for a mesh with holes.
    shell = mujoco.mjtMeshInertia.mjMESH_INERTIA_SHELL
    scene.add_mesh(name=f"own_{number}", uservert=vertices, userface=faces, inertia=shell)


def _set_home_height(scene: mujoco.MjSpec) -> None:
    """Set the height of the keyframe "home" so that the lowest foot touches the plane z = 0."""
    home, leveled = scene.key("home"), scene.copy()
    leveled.worldbody.add_geom(type=mujoco.mjtGeom.mjGEOM_PLANE, size=(0.0, 0.0, 1.0), name="level")
    model = leveled.compile()
    data, level = mujoco.MjData(model), model.geom("level").id
    mujoco.mj_resetDataKeyframe(model, data, model.key("home").id)
    mujoco.mj_kinematics(model, data)
    feet = np.flatnonzero(model.geom_priority > 0)
    gap = min(mujoco.mj_geomDistance(model, data, level, foot, 10.0, None) for foot in feet)
    home.qpos = [*data.qpos[:2], data.qpos[2] - gap, *data.qpos[3:]]
