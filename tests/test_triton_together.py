"""`implementation="triton"`: a program's kernels are compiled side by side, each of them once. No GPU, no Triton."""

import functools
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import lowering
import pytest

import pallas_attn
from pallas_attn import _lowering
from pallas_attn._lowering import cache, compiler

QUERY = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
FLASH: Any = functools.partial(pallas_attn.flash_attention, implementation="triton")


@pytest.fixture
def begun(monkeypatch):
    """The names of kernels that are begun; none of them ends before `together` are."""

    def wait_for(together: int) -> list[str]:
        names: list[str] = []
        barrier = threading.Barrier(together)

        @functools.cache
        def made(request: cache.Request) -> cache.Compiled:
            name = request.text.partition("@")[2].partition("(")[0]
            names.append(name)
            barrier.wait(timeout=300)  # threads that wait for ever would keep the process from ending
            return cache.Compiled(name, "// not compiled", 0, request.num_warps, "none")

        monkeypatch.setattr(compiler, "made", made)
        jax.clear_caches()  # else what another test has traced is not traced again, and is begun one after another
        sys.modules[_lowering.__name__ + ".launch"]._traced.take()  # what other tests have only traced
        return names

    return wait_for


@pytest.mark.parametrize("time", ["first", "second"])
def test_a_program_has_its_kernels_compiled_at_once(begun, time):
    def loss(query, keys):
        return FLASH(query, keys, keys).astype(jnp.float32).sum()

    names = begun(together=3)
    lowering.lower_for_gpu(jax.grad(loss, (0, 1)), QUERY, QUERY)
    assert sorted(names) == [f"pallas_attn_flash_attention{which}" for which in ("", "_dkv", "_dq")]


def test_a_mapped_call_compiles_the_mapped_kernel_alone(begun):
    batch = jax.ShapeDtypeStruct((3, *QUERY.shape), QUERY.dtype)
    names = begun(together=1)
    lowering.lower_for_gpu(jax.vmap(FLASH), *[batch] * 3)
    assert names == ["pallas_attn_flash_attention"]


def test_what_two_ask_for_is_compiled_once(begun):
    names = begun(together=2)
    first, second, other = (compiler.begin(text, 90, 4, 3) for text in ("@one(", "@one(", "@other("))
    assert first.result() is second.result()
    assert other.result().name == "other"
    assert sorted(names) == ["one", "other"]


STAND_IN = """
import atexit, os, signal, sys
from pallas_attn._lowering import cache, compiler
compiler.made = lambda request: cache.Compiled("kernel", "", 0, request.num_warps, "none")
compiler._make_code = lambda _: None
compiler.compile_kernel("text", 90, 1, 3)
"""
FORKED = """
child = os.fork()
if child == 0:
    signal.alarm(20)
    assert compiler.compile_kernel("text", 90, 2, 3).num_warps == 2
else:
    assert os.waitpid(child, 0)[1] == 0
"""
AT_EXIT = 'atexit.register(lambda: print("warps:", compiler.compile_kernel("text", 90, 2, 3).num_warps))'
NO_THREAD = """
def refused(*_):
    raise RuntimeError("can't start new thread")
compiler._workers.submit = refused
print("warps:", compiler.compile_kernel("text", 90, 2, 3).num_warps)
"""


@pytest.mark.once
@pytest.mark.parametrize(
    ("then", "said"),
    [(FORKED, ""), (AT_EXIT, "warps: 2\n"), (NO_THREAD, "warps: 2\n")],
    ids=["forked", "at exit", "no thread"],
)
@pytest.mark.slow
def test_where_no_other_thread_compiles(then, said):
    """The child of a fork waited for its parent's threads for ever; behind the interpreter's last one none begins."""
    command = [sys.executable, "-W", "ignore", "-c", STAND_IN + then]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, said, "")


def test_what_cannot_be_written_spoils_no_other_kernel(begun):
    """Of a program that was traced only: whoever lowers it hears of it."""

    def body(ref, out):
        place = (jax.lax.iota(jnp.int32, 64),)
        _lowering.store(out.at[place], jnp.sort(_lowering.load(ref.at[place])))

    x = jax.ShapeDtypeStruct((64,), jnp.float32)
    sizes = dict(num_warps=4, num_stages=1, input_output_aliases={}, capability=90, most_shared=0)
    sort = functools.partial(_lowering.launch, body, name="sorting", grid=(1,), out_shape=[x], **sizes)
    names = begun(together=1)
    jax.jit(sort).trace(x)
    lowering.lower_for_gpu(FLASH, *[QUERY] * 3)
    assert names == ["pallas_attn_flash_attention"]
    with pytest.raises(NotImplementedError, match="sorting: no rule writes the primitive 'sort'"):
        lowering.lower_for_gpu(sort, x)
