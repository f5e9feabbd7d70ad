"""Machine code that the driver is asked for ahead of time: what is asked of it, in which order, and when nothing is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton_kernels

from pallas_attn._lowering import compiler, driver

CONTEXT = 7


class Library:
    """Stands for CUDA's driver: writes down what is called, and refuses `refused`."""

    def __init__(self, active=(False, True), refused: str | None = None) -> None:
        self.active, self.refused = active, refused
        self.calls: list[tuple] = []

    def __getattr__(self, name):
        def call(*arguments):
            known = {
                "cuDeviceGetCount": lambda count: self._write(count, len(self.active)),
                "cuDevicePrimaryCtxGetState": lambda i, _, active: self._write(active, self.active[i]),
                "cuDevicePrimaryCtxRetain": lambda context, _: self._write(context, CONTEXT),
                "cuModuleLoadData": lambda module, text: self.calls.append(("text", text.value)),
            }
            self.calls.append((name, *(a for a in arguments if isinstance(a, int))))
            known.get(name, lambda *_: None)(*arguments)
            return 218 if name == self.refused else 0

        return call

    @staticmethod
    def _write(place, value) -> None:
        place._obj.value = value

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]


@pytest.fixture
def library(monkeypatch, tmp_path):
    """One that is loaded in place of the driver's."""
    monkeypatch.setenv("CUDA_CACHE_PATH", str(tmp_path / "not made yet"))
    monkeypatch.delenv("CUDA_CACHE_DISABLE", raising=False)
    library = Library()
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: library)
    driver._driver.cache_clear()
    driver.make_code.cache_clear()
    yield library
    driver._driver.cache_clear()
    driver.make_code.cache_clear()


def test_a_kernel_is_loaded_once_in_the_context_of_the_gpu_that_is_used(library):
    driver.make_code("// ptx")
    driver.make_code("// ptx")
    assert library.calls == [
        ("cuDeviceGetCount",),
        ("cuDevicePrimaryCtxGetState", 0),
        ("cuDevicePrimaryCtxGetState", 1),
        ("cuDevicePrimaryCtxRetain", 1),
        ("cuCtxPushCurrent_v2",),
        ("cuThreadExchangeStreamCaptureMode",),
        ("cuModuleLoadData",),
        ("text", b"// ptx"),
        ("cuModuleUnload",),
        ("cuCtxPopCurrent_v2",),
        ("cuDevicePrimaryCtxRelease_v2", 1),
    ]


def test_no_context_is_made_where_no_gpu_is_used(library):
    library.active = (False, False)
    driver.make_code("// ptx")
    assert set(library.names) == {"cuDeviceGetCount", "cuDevicePrimaryCtxGetState"}


@pytest.mark.parametrize("refused", ["cuModuleLoadData", "cuThreadExchangeStreamCaptureMode"])
def test_what_is_refused_leaves_the_context_as_it_was(library, refused):
    library.refused = refused
    driver.make_code("// ptx")
    assert "cuModuleUnload" not in library.names
    assert library.names[-2:] == ["cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]


def test_a_driver_that_was_not_begun_is_left_alone(library):
    library.refused = "cuDeviceGetCount"
    driver.make_code("// ptx")
    assert library.names == ["cuDeviceGetCount"]


def test_a_machine_without_a_driver_goes_without(library, monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver.ctypes, "CDLL", missing)
    driver.make_code("// ptx")
    assert library.calls == []


def test_a_driver_without_one_of_the_functions_is_refused_alike(library, monkeypatch):
    monkeypatch.setattr(library, "cuThreadExchangeStreamCaptureMode", None, raising=False)
    driver.make_code("// ptx")
    assert library.names[-2:] == ["cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]


def test_a_folder_that_cannot_be_one_is_no_error(library, monkeypatch, tmp_path):
    """It was one of the thread, which then is printed."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(driver.os, "access", lambda path, mode: Path(path) != tmp_path)
    for folder in ("/dev/null", tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300)):
        monkeypatch.setenv("CUDA_CACHE_PATH", str(folder))
        driver._driver.cache_clear()
        driver.make_code(f"// {folder}")
    assert library.calls == []


def test_nothing_is_made_that_the_driver_would_not_keep(library, monkeypatch):
    monkeypatch.setenv("CUDA_CACHE_DISABLE", "1")
    driver.make_code("// ptx")
    monkeypatch.delenv("CUDA_CACHE_DISABLE")
    monkeypatch.setenv("CUDA_CACHE_PATH", "/proc/nothing/can/be/made")
    monkeypatch.setattr(driver.os, "access", lambda path, mode: path != Path("/proc"))
    driver._driver.cache_clear()
    driver.make_code("// other ptx")
    monkeypatch.delenv("CUDA_CACHE_PATH")
    monkeypatch.setattr(driver.Path, "home", _homeless)
    driver._driver.cache_clear()
    driver.make_code("// a third")
    assert library.calls == []


def _homeless():
    raise RuntimeError("Could not determine home directory.")


def test_the_thread_that_compiled_asks_for_machine_code(monkeypatch):
    asked = []
    monkeypatch.setattr(driver, "make_code", asked.append)
    future = compiler.begin(triton_kernels.NOTHING, 90, 4, 3)
    ptx = future.result().ptx
    compiler._workers.submit(lambda: None).result()
    while not asked:
        pass
    assert asked == [ptx]


def test_what_cannot_be_compiled_asks_for_nothing(monkeypatch):
    asked = []
    monkeypatch.setattr(driver, "make_code", asked.append)
    done = compiler.Future()
    done.set_exception(RuntimeError("no Triton"))
    compiler._make_code(done)
    assert asked == []


AHEAD = """
import os, sys, jax.numpy as jnp
from pathlib import Path
from pallas_attn._lowering import driver
kept = lambda: sum(path.stat().st_size for path in Path(os.environ["CUDA_CACHE_PATH"]).rglob("*") if path.is_file())
jnp.zeros(8).block_until_ready()
before = kept()
driver.make_code("not ptx")
assert kept() == before, "of what is no PTX"
driver.make_code(sys.stdin.read())
assert kept() > before, "nothing was kept"
assert int(jnp.arange(8).sum()) == 28
"""


@pytest.mark.gpu
def test_the_driver_keeps_what_was_made_ahead_of_time(tmp_path):
    """In a folder of its own, before XLA has seen the kernel."""
    ptx = compiler.compile_kernel(triton_kernels.NOTHING, 90, 4, 3).ptx
    env = os.environ | {"CUDA_CACHE_PATH": str(tmp_path), "CUDA_CACHE_DISABLE": "0"}
    subprocess.run([sys.executable, "-c", AHEAD], input=ptx, text=True, env=env, check=True)
