"""PTX for a kernel's text: from the cache, or by the installed Triton (3.6 to 3.9)."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from pallas_attn._lowering import cache, driver, stages
from pallas_attn._lowering.cache import Compiled, Request

(_, _oldest), (_major, _newest) = stages.OLDEST, stages.NEWEST
INSTALL = f"pip install 'triton>={_major}.{_oldest},<{_major}.{_newest + 1}'"
# From each compute capability on, the oldest PTX version with its instructions, which every driver for the GPU accepts.
# Triton's default is the newest that its own assembler knows, which older drivers reject. (8.0 knows sm_89, but not its
# float8 conversions.)
PTX_VERSIONS = ((121, 88), (120, 87), (110, 90), (103, 88), (100, 86), (90, 80), (89, 81), (80, 80))

_begun: dict[Request, Future[Compiled]] = {}


def _start_anew() -> None:
    """Also in the child of a fork, which has none of its parent's threads, locks or results."""
    global _workers, _lock
    # Triton releases the GIL while it compiles.
    _workers = ThreadPoolExecutor(thread_name_prefix="pallas_attn_compiler")
    _lock = threading.Lock()
    _begun.clear()


_start_anew()
os.register_at_fork(after_in_child=_start_anew)


@functools.cache  # asked for every call that has nothing compiled
def installed() -> str | None:
    """The version of Triton, without importing it; None where there is none."""
    try:
        spec = importlib.util.find_spec("triton")
    except ValueError:  # a stub that another package has put in its place
        return None
    # A folder of that name is a namespace package without an origin.
    if spec is None or spec.origin is None:
        return None
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # no metadata: unpacked by hand
        return importlib.import_module("triton").__version__


def unavailable() -> str | None:
    """Why kernels cannot be compiled here, or None. Cached ones need no compiler."""
    version = installed()
    if version is None:
        return f"Triton is not installed: {INSTALL}"
    if not stages.OLDEST <= stages.release(version) <= stages.NEWEST:
        oldest, newest = (".".join(map(str, ends)) for ends in (stages.OLDEST, stages.NEWEST))
        return f"needs Triton {oldest} to {newest}, {version} is installed: {INSTALL}"
    return None


def ptx_version(capability: int) -> int:
    return next(version for least, version in PTX_VERSIONS if capability >= least)


def compile_kernel(
    text: str, capability: int, num_warps: int, num_stages: int, max_registers: int = 0
) -> Compiled:
    """The compiled kernel of a module, from the cache if it is there.

    Raises:
        RuntimeError: it is not cached, and Triton is missing or rejects it.
    """
    return begin(text, capability, num_warps, num_stages, max_registers).result()


def begin(
    text: str, capability: int, num_warps: int, num_stages: int, max_registers: int = 0
) -> Future[Compiled]:
    """`compile_kernel` in another thread, shared by everyone who wants the same kernel meanwhile."""
    request = Request(text, capability, num_warps, num_stages, ptx_version(capability), max_registers)
    with _lock:
        if found := _begun.get(request):
            return found
        _begun[request] = future = _submitted(request)
    future.add_done_callback(lambda _: _begun.pop(request))
    future.add_done_callback(_make_code)
    return future


def _submitted(request: Request) -> Future[Compiled]:
    with contextlib.suppress(RuntimeError):
        return _workers.submit(made, request)
    # No thread can be started: there are too many, or the interpreter is shutting down.
    future: Future[Compiled] = Future()
    try:
        future.set_result(made(request))
    except Exception as error:
        future.set_exception(error)
    return future


def _make_code(done: Future[Compiled]) -> None:
    """In the compiling thread, while those who waited for the PTX go on."""
    if done.exception() is None:
        driver.make_code(done.result().ptx)


@functools.lru_cache(maxsize=1024)
def made(request: Request) -> Compiled:
    """In any thread: from the cache, otherwise by Triton."""
    reason, version = unavailable(), installed()
    if kept := cache.find(request, None if reason else version):
        return kept
    if reason or version is None:
        raise RuntimeError(
            f"not among the kernels in {cache.directory()}, and cannot be compiled here: {reason}; or make this "
            f"call where Triton and an sm_{request.capability} GPU are, with {cache.FOLDER} naming a folder, and "
            "bring what is in it here"
        )
    # The version that is looked up: Triton's own version string, if built from source, lacks the commit.
    compiled = Compiled(**stages.to_ptx(**dataclasses.asdict(request)), triton=version)
    cache.keep(request, compiled)
    return compiled
