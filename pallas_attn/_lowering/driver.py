"""Machine code ahead of time.

When XLA loads a program, the driver compiles its PTX to machine code, one kernel after the other, and caches it on disk
by the PTX. A thread that loads each kernel as soon as its PTX exists fills that cache before XLA asks, while Triton
compiles other kernels and XLA the rest of the program.
"""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIBRARY = "libcuda.so.1"
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: does not disturb captures by other threads


class _Refused(RuntimeError):
    pass


class _Driver:
    """Functions of CUDA's driver, which raise on any error."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str):
        if (function := getattr(self._library, name, None)) is None:  # an older driver, or a stub
            raise _Refused(name)

        def call(*arguments) -> None:
            if function(*arguments):
                raise _Refused(name)

        return call


@functools.cache
def _driver() -> _Driver | None:
    """None without a driver, or if it caches nothing."""
    if not _keeps_code():
        return None
    try:
        return _Driver(ctypes.CDLL(LIBRARY))
    except OSError:
        return None


def _keeps_code() -> bool:
    """Follows CUDA's own variables and default folder ("Environment variables" in its programming guide)."""
    if os.environ.get("CUDA_CACHE_DISABLE", "0") not in ("", "0"):
        return False
    try:
        folder = Path(os.environ.get("CUDA_CACHE_PATH") or Path.home() / ".nv/ComputeCache")
    except RuntimeError:  # no home
        return False
    # Unlike Path's methods, these do not raise on unreadable paths.
    there = next((path for path in (folder, *folder.parents) if os.path.exists(path)), folder)
    return os.path.isdir(there) and os.access(there, os.W_OK)


@functools.lru_cache(maxsize=1024)
def make_code(ptx: str) -> None:
    """Compiles `ptx` into the driver's cache for the first GPU that this process uses, if any. Nothing depends on it:
    an error here will come again when XLA loads the kernel, and XLA reports it."""
    if (driver := _driver()) is None:
        return
    with contextlib.suppress(_Refused), _context(driver):
        module = ctypes.c_void_p()
        driver.cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(ptx.encode()))
        driver.cuModuleUnload(module)


@contextlib.contextmanager
def _context(driver: _Driver) -> Iterator[None]:
    """The primary context of the first GPU that has one: XLA's; none is created here."""
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
