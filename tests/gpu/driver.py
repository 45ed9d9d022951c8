"""Memory of a GPU, from CUDA's driver itself: no toolkit, no torch."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class NoGpuError(Exception):
    """Why there is none."""


class Driver:
    """The driver, where it has a device."""

    def __init__(self) -> None:
        """Raises NoGpuError."""
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NoGpuError(str(error)) from None
        self._call("cuInit", 0)
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        if count.value == 0:
            raise NoGpuError("the CUDA driver has no device")

    def enter(self) -> None:
        """Makes the first device's primary context that of the calling thread."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def allocate(self, size: int) -> int:
        """The address of so many bytes, which stay as long as the process."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def write(self, address: int, data: Bytes) -> None:
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), _at(data), ctypes.c_size_t(data.nbytes))
        self._call("cuCtxSynchronize")  # the call before may return while the last bytes are on their way

    def read(self, address: int, size: int) -> Bytes:
        data = np.empty(size, np.uint8)
        self._call("cuMemcpyDtoH_v2", _at(data), ctypes.c_uint64(address), ctypes.c_size_t(size))
        return data

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise NoGpuError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")


def _at(data: Bytes) -> ctypes.c_void_p:
    return data.ctypes.data_as(ctypes.c_void_p)


def missing() -> str:
    """Why there is no GPU here; nothing when there is."""
    try:
        Driver()
    except NoGpuError as error:
        return str(error)
    return ""
