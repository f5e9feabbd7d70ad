"""Machine code ahead of time.

The driver makes machine code of PTX when XLA loads a program, one kernel after the other, and keeps it on disk by the
PTX it was made of. A thread that loads a kernel as soon as there is PTX leaves it there by the time XLA asks, while
Triton is busy with other kernels and XLA with the rest of the program.
"""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIBRARY = "libcuda.so.1"
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: what another thread captures is not disturbed


class _Refused(RuntimeError):
    pass


class _Driver:
    """The functions of CUDA's driver; each raises where it gives anything but success."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str):
        if (function := getattr(self._library, name, None)) is None:  # an older driver, or a stand-in for one
            raise _Refused(name)

        def call(*arguments) -> None:
            if function(*arguments):
                raise _Refused(name)

        return call


@functools.cache
def _driver() -> _Driver | None:
    """None where there is none, or where it would keep nothing of what it makes."""
    if not _keeps_code():
        return None
    try:
        return _Driver(ctypes.CDLL(LIBRARY))
    except OSError:
        return None


def _keeps_code() -> bool:
    """By CUDA's own variables and default folder ("Environment variables" in its programming guide)."""
    if os.environ.get("CUDA_CACHE_DISABLE", "0") not in ("", "0"):
        return False
    try:
        folder = Path(os.environ.get("CUDA_CACHE_PATH") or Path.home() / ".nv/ComputeCache")
    except RuntimeError:  # nobody's home
        return False
    # Unlike a Path's own, these tell nothing of what may not be looked at, and raise nothing.
    there = next((path for path in (folder, *folder.parents) if os.path.exists(path)), folder)
    return os.path.isdir(there) and os.access(there, os.W_OK)


@functools.lru_cache(maxsize=1024)
def make_code(ptx: str) -> None:
    """Leaves machine code of `ptx` in the driver's cache, for the first GPU that this process uses; nothing where it
    uses none. Nothing depends on it: what the driver refuses here, it refuses when XLA asks, who says so."""
    if (driver := _driver()) is None:
        return
    with contextlib.suppress(_Refused), _context(driver):
        module = ctypes.c_void_p()
        driver.cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(ptx.encode()))
        driver.cuModuleUnload(module)


@contextlib.contextmanager
def _context(driver: _Driver) -> Iterator[None]:
    """The primary context of the first GPU that has one. It is XLA's: a context is not made here."""
    device = _first_active(driver)
    context, mode = ctypes.c_void_p(), ctypes.c_int(RELAXED)
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    try:
        driver.cuCtxPushCurrent_v2(context)
        try:
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            yield
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)


def _first_active(driver: _Driver) -> int:
    count, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    for device in range(count.value):
        driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        if active.value:
            return device
    raise _Refused("no GPU is in use")
