"""The CUDA library: found, loaded and registered with XLA on first use.

The library is plain C++ behind XLA's FFI, loaded with ctypes, so one wheel serves every Python. It is registered
lazily: importing the package must neither load CUDA code nor start JAX's backend.
"""

import ctypes
import functools
import itertools
import os
import sysconfig
from pathlib import Path

import jax

_LIBRARY = "libpallas_attn_cuda.so"
COOPERATIVE_VARIABLE = "PALLAS_ATTN_COOPERATIVE"
_REASON = "no_cuda_library.txt"  # written by the build when it has no library to install
# The first driver of each major version of CUDA: a library built with one runs on that driver and later ones.
_FIRST_DRIVER = {12: "R525", 13: "R580"}


def is_available() -> tuple[bool, str | None]:
    """(True, None), or (False, the reason the CUDA library cannot be used on this machine)."""
    library, reason = _load()
    if library is not None:
        reason = _driver_refusal(*_versions(library))
    return reason is None, reason


@functools.cache
def register() -> None:
    """Registers the custom calls of the CUDA library, all of xla_ffi/targets.def, with XLA.

    Ops do this themselves when they are traced. A process that only runs a function serialised by `jax.export`
    elsewhere traces none, so it calls this first. To export one, disable the safety check of each call:
    `jax.export.export(f, disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("pallas_attn_mla_decode_sm90")])`,
    "pallas_attn_mla_schedule_sm90", "pallas_attn_sparse_mla_sm90", "pallas_attn_blocksparse_prefill_sm90",
    "pallas_attn_attention_forward_sm90", "pallas_attn_attention_lists_sm90", "pallas_attn_attention_documents_sm90",
    "pallas_attn_attention_widen_sm90" and "pallas_attn_attention_backward_sm90" likewise.
    It takes neither a GPU nor a driver.

    Raises:
        RuntimeError: there is no library, with the reason.
    """
    library, reason = _load()
    if library is None:
        raise RuntimeError(f"pallas_attn's CUDA library cannot be used: {reason}")
    _register(library, "CUDA")


def cooperates(function: str) -> bool:
    """Whether kernels may launch cooperatively, by PALLAS_ATTN_COOPERATIVE in the environment: it depends on the
    deployment, not on the model, and an argument would have to pass through every layer."""
    chosen = os.environ.get(COOPERATIVE_VARIABLE, "1")
    if chosen not in ("0", "1"):
        raise ValueError(
            f"{function}: environment variable '{COOPERATIVE_VARIABLE}': expected '0' or '1', got {chosen!r}"
        )
    return chosen == "1"


class _Target(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("handler", ctypes.c_void_p))


def _register(library: ctypes.CDLL, platform: str) -> None:
    targets = library.pallas_attn_ffi_targets()  # ends with an entry without a name
    for target in itertools.takewhile(
        lambda target: target.name, map(targets.__getitem__, itertools.count())
    ):
        handler = jax.ffi.pycapsule(ctypes.c_void_p(target.handler))
        jax.ffi.register_ffi_target(target.name.decode(), handler, platform=platform)


def _versions(library: ctypes.CDLL) -> tuple[int, int]:
    """CUDA versions of the library's build and of the driver: 13000 is 13.0, 0 no driver."""
    built_with, driver = ctypes.c_int(), ctypes.c_int()
    library.pallas_attn_cuda_versions(ctypes.byref(built_with), ctypes.byref(driver))
    return built_with.value, driver.value


def _driver_refusal(built_with: int, driver: int) -> str | None:
    if driver == 0:
        return "no NVIDIA driver was found"
    major = built_with // 1000
    if driver // 1000 >= major:
        return None

    def dotted(version: int) -> str:
        return f"{version // 1000}.{version % 1000 // 10}"

    first = f" ({_FIRST_DRIVER[major]} or newer)" if major in _FIRST_DRIVER else ""
    return (
        f"the CUDA library was built with CUDA {dotted(built_with)} and needs a driver for CUDA {major}{first}; "
        f"this machine's is for CUDA {dotted(driver)}"
    )


def _directories() -> list[Path]:
    """Where the build puts the library: the package's folder, or site-packages for an editable install."""
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
    wanted = ("pallas_attn_ffi_targets", "pallas_attn_cuda_versions")
    if missing := [name for name in wanted if not hasattr(library, name)]:
        return None, f"{path.name} lacks {' and '.join(missing)}: it is from another version"
    library.pallas_attn_ffi_targets.restype = ctypes.POINTER(_Target)
    return library, None


def _build_reason() -> str:
    for directory in _directories():
        if (path := directory / _REASON).exists():
            return path.read_text().strip()
    return "it was not built"
