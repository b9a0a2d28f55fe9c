"""Options of a camera, and the observation groups that it produces."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, get_args

import numpy as np
import torch
from annotated_types import Ge, Interval, Le

from paceline.errors import UserError, unknown
from paceline.run.config import option
from paceline.validation import NonNegative, Positive, UnitInterval

if TYPE_CHECKING:
    import mujoco

# Envs of other simulators need no MuJoCo, so it is imported inside the functions.

Stream = Literal["rgb", "depth", "distance", "segmentation", "classes", "normals"]
STREAMS: tuple[Stream, ...] = get_args(Stream)
Vector = tuple[float, float, float]
Pixels = Annotated[int, Ge(8), Le(1024)]
MAX_LATENCY = 100
# Largest relative deviation from a whole number of control steps per image.
_RATE_TOLERANCE = 0.01


@dataclass(frozen=True)
class SensorEffects:
    """Imperfections of a camera. All are off by default."""

    depth_noise: NonNegative = 0.0
    """Standard deviation of the noise of depth and distance at 1 m, m; at least 0. It grows with the square of the
    distance."""
    depth_dropout: UnitInterval = 0.0
    """Probability that a pixel has no depth, 0 to 1. Its depth is then that of a miss."""
    rgb_noise: NonNegative = 0.0
    """Standard deviation of the noise of each color channel, whose values are 0 to 255; at least 0."""
    latency: tuple[int, int] = (0, 0)
    """Minimum and maximum delay of the images in control steps, each 0 to 100, sampled in every episode."""


@dataclass(frozen=True)
class Camera:
    """A camera of every env. It looks along its -z axis; +x is to the right and +y is up, as in MuJoCo."""

    width: Pixels = 64
    """Width of an image in pixels, 8 to 1024."""
    height: Pixels = 64
    """Height of an image in pixels, 8 to 1024."""
    streams: tuple[Stream, ...] = ("rgb",)
    """Images to render: colors (rgb), depth along the axis of the camera, distance to the camera,
    geom indices (segmentation), semantic classes of the task, and normals in the world frame."""
    body: str = ""
    """Body on which a new camera is mounted; empty for the world. A camera that the model has keeps its body."""
    pos: Annotated[Vector | None, option("X Y Z")] = None
    """Position relative to the body, m. The default is that of the model's camera."""
    quat: Annotated[tuple[float, float, float, float] | None, option("W X Y Z")] = None
    """Orientation relative to the body as a unit quaternion, w first. The default is that of the model's camera."""
    fovy: Annotated[Annotated[float, Interval(ge=1.0, le=170.0)] | None, option("DEGREES")] = None
    """Vertical field of view in degrees, 1 to 170. The default is that of the model's camera."""
    near: Positive = 0.01
    """Distance of the near plane, m; above 0. Nothing nearer is drawn."""
    far: Positive = 10.0
    """Largest depth and distance, m; above 0. Larger values, and misses, are set to it. Colors have no limit."""
    geom_groups: tuple[Annotated[int, Interval(ge=0, le=5)], ...] = (0, 1, 2)
    """Geom groups to draw, each 0 to 5."""
    depth_dtype: Literal["float16", "float32"] = "float16"
    """Type of depth, distance and normals."""
    every: Annotated[int, Ge(1), Le(1000)] = 1
    """Number of control steps per image, 1 to 1000. An env that was reset always gets a new image."""
    rate: Annotated[Positive | None, option("HZ")] = None
    """Images per second of simulated time in place of `every`, Hz; above 0.
    The number of control steps per image must be whole. The default is an image in every control step."""
    frames: Annotated[int, Ge(1), Le(16)] = 1
    """Number of successive images that are stacked along the channels, newest last, 1 to 16."""
    shadows: bool = False
    """Let primitive geoms cast the shadows of the model's lights."""
    textures: bool = True
    """Draw the textures of planes, heightfields and boxes. Without them, geoms have the color of their material.
    The skybox is always drawn."""
    smooth_normals: bool = False
    """Interpolate the normals of meshes between the vertices, as MuJoCo's OpenGL renderer does, in rgb and normals.
    The default is one normal per triangle."""
    antialias: bool = False
    """Average four rays per pixel in rgb.
    The other streams then show the first of the four, which is a quarter of a pixel to the upper left."""
    mesh_detail: NonNegative = 0.5
    """Size of the smallest detail of meshes, in pixels at their distance in the initial pose; at least 0.
    Smaller details are simplified; 0 draws all triangles. The CPU renderer always draws all triangles."""
    renderer: Literal["auto", "paceline", "mujoco_warp"] = "auto"
    """Renderer on the engine warp.
    With auto, MuJoCo Warp's renderer, which is much slower, draws scenes with too many geoms, flexes or SDF geoms.
    With paceline, flexes and SDF geoms are not drawn, and too many geoms are refused."""
    effects: SensorEffects = SensorEffects()

    def check(self, name: str) -> None:
        """Raise UserError if options contradict each other."""
        if not self.streams or len(set(self.streams)) != len(self.streams):
            raise UserError(f"camera {name!r}: streams {' '.join(self.streams)!r} must be at least one, each once")
        if self.near >= self.far:
            raise UserError(f"camera {name!r}: near {self.near:g} must be below far {self.far:g}")
        if self.rate is not None and self.every > 1:
            raise UserError(f"camera {name!r}: every {self.every} and rate {self.rate:g} exclude each other: give one")
        low, high = self.effects.latency
        if not 0 <= low <= high <= MAX_LATENCY:
            allowed = f"a minimum and a maximum from 0 to {MAX_LATENCY} control steps"
            raise UserError(f"camera {name!r}: latency {low} {high} must be {allowed}")

    def steps_per_image(self, name: str, step_seconds: float) -> int:
        """Return the number of control steps per image. Raise UserError if it is not whole at this `rate`."""
        if self.rate is None:
            return self.every
        control_rate = 1.0 / step_seconds
        steps = control_rate / self.rate
        nearest = max(1, round(steps))
        if abs(steps - nearest) > _RATE_TOLERANCE * nearest:
            choices = sorted({control_rate / max(1, each) for each in (math.floor(steps), math.ceil(steps))})
            allowed = " or ".join(f"{each:.6g}" for each in choices)
            raise UserError(
                f"camera {name!r}: rate {self.rate:g} Hz does not divide the control rate of {control_rate:.6g} Hz: "
                f"choose {allowed}"
            )
        return nearest

    @property
    def samples(self) -> int:
        """Number of rays per pixel in each direction."""
        return 2 if self.antialias and "rgb" in self.streams else 1

    @property
    def depth_type(self) -> torch.dtype:
        return getattr(torch, self.depth_dtype)


class StreamSpec(NamedTuple):
    """Channels and type of one stream, and its value where no geom is hit."""

    channels: int
    dtype: torch.dtype
    miss: float


def stream_spec(camera: Camera, stream: Stream) -> StreamSpec:
    """Return the format of a stream. Images are [env, channel, height, width] in channels-last memory."""
    return {
        "rgb": StreamSpec(3, torch.uint8, 0),
        "depth": StreamSpec(1, camera.depth_type, camera.far),
        "distance": StreamSpec(1, camera.depth_type, camera.far),
        "segmentation": StreamSpec(1, torch.int32, -1),
        "classes": StreamSpec(1, torch.uint8, 0),
        "normals": StreamSpec(3, camera.depth_type, 0),
    }[stream]


def group_name(camera: str, stream: str) -> str:
    """Return the name of the observation group of a camera's stream."""
    return f"{camera}_{stream}"


def look_at(pos: Vector, target: Vector) -> tuple[float, float, float, float]:
    """Return the orientation of a camera at `pos` that looks at `target`, with the world's z axis up in the image."""
    import mujoco

    backward = np.subtract(pos, target)
    backward /= np.linalg.norm(backward)
    right = np.cross((0.0, 0.0, 1.0), backward)
    if np.linalg.norm(right) < 1e-6:
        # The camera looks straight up or down.
        right = np.array((1.0, 0.0, 0.0))
    right /= np.linalg.norm(right)
    matrix, quat = np.stack((right, np.cross(backward, right), backward), axis=1), np.zeros(4)
    mujoco.mju_mat2Quat(quat, matrix.flatten())
    w, x, y, z = quat.tolist()
    return w, x, y, z


def add_cameras(spec: "mujoco.MjSpec", cameras: Mapping[str, Camera]) -> None:
    """Add cameras to a model before it is compiled, or change the pose and field of view of those it has."""
    import mujoco

    for name, camera in cameras.items():
        found = spec.camera(name)
        if found is None:
            body = spec.body(camera.body) if camera.body else spec.worldbody
            if body is None:
                raise UserError(f"camera {name!r}: {unknown('body', camera.body, [b.name for b in spec.bodies])}")
            found = body.add_camera(name=name)
        if camera.pos is not None:
            found.pos = camera.pos
        if camera.quat is not None:
            found.quat = np.divide(camera.quat, np.linalg.norm(camera.quat))
            # An orientation that the model gives in another form, such as xyaxes, would take precedence.
            found.alt.type = mujoco.mjtOrientation.mjORIENTATION_QUAT
        if camera.fovy is not None:
            found.fovy = camera.fovy
