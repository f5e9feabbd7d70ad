"""The CUDA library: found, loaded and registered with XLA at its first use.

The library is plain C++ behind XLA's FFI, loaded with ctypes, so one wheel serves every Python. It is
registered no earlier than needed: importing the package must neither load CUDA code nor start JAX's backend.
"""

import ctypes
import functools
import os
import sysconfig
from pathlib import Path

import jax

_LIBRARY = "libpallas_attn_cuda.so"
_REASON = "no_cuda_library.txt"  # written by the build when it has no library to install
_TARGETS = ("pallas_attn_mla_decode_sm90", "pallas_attn_mla_schedule_sm90")


def is_available() -> tuple[bool, str | None]:
    """(True, None), or (False, the reason the CUDA library cannot be used)."""
    _, reason = _load()
    return reason is None, reason


@functools.cache
def register() -> None:
    """Makes the custom calls of the CUDA library known to XLA, by the names "pallas_attn_mla_decode_sm90" and
    "pallas_attn_mla_schedule_sm90".

    Ops do it themselves when they are traced. A process that only runs a function that `jax.export` serialised
    elsewhere traces none, and calls this first. To export one, name the calls as ones you vouch for:
    `jax.export.export(f, disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("pallas_attn_mla_decode_sm90")])`.

    Raises:
        RuntimeError: there is no library, with the reason.
    """
    library, reason = _load()
    if library is None:
        raise RuntimeError(f"pallas_attn's CUDA library cannot be used: {reason}")
    for target in _TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="CUDA")


def _directories() -> list[Path]:
    """Where the build installs: in the package's folder, or in site-packages for an editable install."""
    return [Path(__file__).parents[1], Path(sysconfig.get_path("platlib")) / "pallas_attn"]


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    if override := os.environ.get("PALLAS_ATTN_CUDA_LIBRARY"):
        candidates = [Path(override)]
    else:
        candidates = [directory / _LIBRARY for directory in _directories()]
    path = next((candidate for candidate in candidates if candidate.exists()), None)
    if path is None:
        if override:
            return None, f"PALLAS_ATTN_CUDA_LIBRARY names {override}, which does not exist"
        return None, f"this build of pallas_attn has no CUDA library ({_build_reason()})"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"{path.name} does not load: {error}"
    missing = [target for target in _TARGETS if not hasattr(library, target)]
    if missing:
        return None, f"{path.name} lacks {', '.join(missing)}: it is from another version"
    return library, None


def _build_reason() -> str:
    for directory in _directories():
        if (path := directory / _REASON).exists():
            return path.read_text().strip()
    return "it was not built"
