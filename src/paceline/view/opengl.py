"""Choose the OpenGL library and the GPU with which MuJoCo renders without a display."""

import ctypes
import importlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import mujoco
import torch

from paceline.device.gpus import gpu_uuid
from paceline.errors import UserError

# scripts/system_packages installs the same.
RENDERING_PACKAGES = "libegl1 libegl-mesa0 libgl1-mesa-dri libopengl0"
_EGL_DEVICE_UUID_EXT = 0x335C


def gl_context_class() -> Any:
    """Return the class of OpenGL contexts of the library in MUJOCO_GL, or of the first library that works."""
    if os.environ.get("MUJOCO_GL") or sys.platform != "linux":
        if not hasattr(mujoco, "GLContext"):
            raise UserError(f"MUJOCO_GL={os.environ['MUJOCO_GL']} turns rendering off: unset it to record videos")
        return mujoco.GLContext
    library = _working_library()
    if library == "egl" and torch.cuda.is_available():
        # EGL has its own order of GPUs and ignores CUDA_VISIBLE_DEVICES.
        index = egl_index(gpu_uuid(torch.device("cuda", 0)))
        if index is not None:
            os.environ.setdefault("MUJOCO_EGL_DEVICE_ID", str(index))
    return importlib.import_module(f"mujoco.{library}").GLContext


@contextmanager
def mujoco_gl_variable() -> Iterator[None]:
    """Set MUJOCO_GL inside the context, for envs of other packages, which choose their OpenGL library by it."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    if sys.platform != "linux" or os.environ.get("MUJOCO_GL"):
        yield
        return
    # The env may render without OpenGL.
    with suppress(UserError):
        os.environ["MUJOCO_GL"] = _working_library()
    try:
        yield
    finally:
        os.environ.pop("MUJOCO_GL", None)


@cache
def _working_library() -> str:
    # Each library is tried in its own process: after one has failed, no other can be loaded in the same process.
    trial = "import mujoco; mujoco.Renderer(mujoco.MjModel.from_xml_string('<mujoco/>'), 16, 16).close()"
    candidates = ["egl", "osmesa"] + ["glfw"] * ("DISPLAY" in os.environ)
    for library in candidates:
        environment = os.environ | {"MUJOCO_GL": library}
        if subprocess.run([sys.executable, "-P", "-c", trial], env=environment, capture_output=True).returncode == 0:
            return library
    raise cannot_render(f"none of {', '.join(candidates)} works here")


def cannot_render(reason: str) -> UserError:
    reason = " ".join(reason.split()).rstrip(".")
    return UserError(
        f"cannot render without a display: {reason}; on Debian and Ubuntu: apt-get install {RENDERING_PACKAGES} "
        "(or libosmesa6), on other systems the packages of libEGL, libOpenGL and Mesa's software driver"
    )


def egl_index(gpu: str) -> int | None:
    """Return the index of the GPU with this UUID among EGL's devices, or None if EGL does not know it."""
    return next((index for index, found in enumerate(_egl_uuids()) if found == gpu), None)


def _egl_uuids() -> list[str]:
    """Return the UUIDs of EGL's devices in EGL's order; "" for a device without UUID, such as a software driver."""
    try:
        egl = ctypes.CDLL("libEGL.so.1")
    except OSError:
        return []
    egl.eglGetProcAddress.restype, egl.eglGetProcAddress.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    addresses = [egl.eglGetProcAddress(name) for name in (b"eglQueryDevicesEXT", b"eglQueryDeviceBinaryEXT")]
    if not all(addresses):
        return []
    integer, pointer = ctypes.c_int, ctypes.c_void_p
    query_devices = ctypes.CFUNCTYPE(ctypes.c_uint, integer, pointer, pointer)(addresses[0])
    query_binary = ctypes.CFUNCTYPE(ctypes.c_uint, pointer, integer, integer, pointer, pointer)(addresses[1])
    devices, count, found = (pointer * 64)(), integer(), []
    if not query_devices(len(devices), devices, ctypes.byref(count)):
        return []
    for device in devices[: count.value]:
        content, size = (ctypes.c_ubyte * 16)(), integer()
        known = query_binary(device, _EGL_DEVICE_UUID_EXT, len(content), content, ctypes.byref(size))
        found.append(f"GPU-{uuid.UUID(bytes=bytes(content))}" if known and size.value == len(content) else "")
    return found
