"""Find the EGL device of a GPU. EGL, which renders, has its own order of devices; the UUID is the same everywhere."""

import ctypes
import uuid

_UUID = 0x335C  # EGL_DEVICE_UUID_EXT


def egl_index(gpu: str) -> int | None:
    """Which of EGL's devices is the GPU of this UUID; None where EGL does not say."""
    for index, found in enumerate(_egl_uuids()):
        if found == gpu:
            return index
    return None


def _egl_uuids() -> list[str]:
    """Of EGL's devices in its order; empty for one that has none, as a software driver."""
    try:
        egl = ctypes.CDLL("libEGL.so.1")
    except OSError:
        return []
    egl.eglGetProcAddress.restype, egl.eglGetProcAddress.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    places = [egl.eglGetProcAddress(name) for name in (b"eglQueryDevicesEXT", b"eglQueryDeviceBinaryEXT")]
    if not all(places):
        return []
    integer, pointer = ctypes.c_int, ctypes.c_void_p
    query_devices = ctypes.CFUNCTYPE(ctypes.c_uint, integer, pointer, pointer)(places[0])
    query_binary = ctypes.CFUNCTYPE(ctypes.c_uint, pointer, integer, integer, pointer, pointer)(places[1])
    devices, count, found = (pointer * 64)(), integer(), []
    if not query_devices(len(devices), devices, ctypes.byref(count)):
        return []
    for device in devices[: count.value]:
        content, size = (ctypes.c_ubyte * 16)(), integer()
        known = query_binary(device, _UUID, len(content), content, ctypes.byref(size)) and size.value == len(content)
        found.append(f"GPU-{uuid.UUID(bytes=bytes(content))}" if known else "")
    return found
