"""Choose the OpenGL library and the GPU with which MuJoCo renders without a display."""

import ctypes
import importlib
import os
import subprocess
import sys
import uuid

import torch
from mujoco.rendering.classic import gl_context

from paceline.device.gpus import gpu_uuid
from paceline.errors import UserError

# scripts/system_packages installs the same.
RENDERING_PACKAGES = "libegl1 libegl-mesa0 libgl1-mesa-dri libopengl0"
_EGL_DEVICE_UUID_EXT = 0x335C


def choose_opengl_library() -> None:
    """Set MUJOCO_GL to the first library that works, unless it is set, for this process and for those it starts."""
    if sys.platform == "linux" and not os.environ.get("MUJOCO_GL"):
        library = _working_library()
        os.environ["MUJOCO_GL"] = library
        if library == "egl" and torch.cuda.is_available():
            # EGL has its own order of GPUs and ignores CUDA_VISIBLE_DEVICES.
            index = _egl_index(gpu_uuid(torch.device("cuda", 0)))
            if index is not None:
                os.environ.setdefault("MUJOCO_EGL_DEVICE_ID", str(index))
        # MuJoCo read the variable when it was imported.
        gl_context.GLContext = importlib.import_module(f"mujoco.{library}").GLContext
    if not hasattr(gl_context, "GLContext"):
        raise UserError(f"MUJOCO_GL={os.environ['MUJOCO_GL']} turns rendering off: unset it to record videos")


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


def _egl_index(gpu: str) -> int | None:
    """Return the index of the GPU with this UUID among EGL's devices, or None if EGL does not know it."""
    egl = ctypes.CDLL("libEGL.so.1")
    egl.eglGetProcAddress.restype, egl.eglGetProcAddress.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    addresses = [egl.eglGetProcAddress(name) for name in (b"eglQueryDevicesEXT", b"eglQueryDeviceBinaryEXT")]
    if not all(addresses):
        return None
    integer, pointer = ctypes.c_int, ctypes.c_void_p
    query_devices = ctypes.CFUNCTYPE(ctypes.c_uint, integer, pointer, pointer)(addresses[0])
    query_binary = ctypes.CFUNCTYPE(ctypes.c_uint, pointer, integer, integer, pointer, pointer)(addresses[1])
    devices, count = (pointer * 64)(), integer()
    query_devices(len(devices), devices, ctypes.byref(count))
    for index, device in enumerate(devices[: count.value]):
        # A device without UUID, such as a software driver, leaves the content zero.
        content, size = (ctypes.c_ubyte * 16)(), integer()
        query_binary(device, _EGL_DEVICE_UUID_EXT, len(content), content, ctypes.byref(size))
        if gpu == f"GPU-{uuid.UUID(bytes=bytes(content))}":
            return index
    return None
