"""Cache hints arrive in machine code: MLA reads a latent once (evict_first), its results are read soon (evict_last).

Nothing else tells when one is lost on the way: the numbers stay right, and the kernel is slower. jax 0.11, jax 0.12 and
Triton before and from 3.9 spell them differently, and a parser may drop what it does not know.
"""

import re

import jax.numpy as jnp
import lowering
import pytest
from test_mla_lowering import lowered_call
from triton_worker import hints, spell

OLD = "%1 = tt.load %0, %m, %o evictionPolicy = evict_first : tensor<16x!tt.ptr<bf16>>"
NEW = (
    "%1 = tt.load %0, %m, %o {cachePolicy = #tt.cache_policy<cache_modifier = none, eviction_policy = evict_first>} "
    ": tensor<16x!tt.ptr<bf16>>"
)


def mla_kernel() -> str:
    lowered = lowered_call(16, 1, 64, jnp.bfloat16, True)
    return lowering.triton_text(lowering.triton_kernels(lowered)[0][1])


def assert_latents_evicted_first(kernel: lowering.Compiled, copies: str, ptx_copies: str) -> None:
    """Every `copies` of the kernel carries the hint, and so do the same number or more of `ptx_copies`."""
    large = [line for line in kernel.ttgir.splitlines() if copies in line and "tensor<64x" in line]
    assert large
    for line in large:
        assert "evict_first" in line, line
    assert "createpolicy.fractional.L2::evict_first" in kernel.ptx
    hinted = [line for line in kernel.ptx.splitlines() if ptx_copies in line and "L2::cache_hint" in line]
    assert len(hinted) >= len(large)


def assert_results_evicted_last(kernel: lowering.Compiled) -> None:
    stores = [line for line in kernel.ttgir.splitlines() if "tt.store" in line and "bf16" in line]
    assert stores
    for line in stores:
        assert "evict_last" in line, line
    stores = [line for line in kernel.ptx.splitlines() if re.search(r"\bst\.global", line)]
    assert any("L1::evict_last" in line for line in stores)


@pytest.mark.parametrize("triton", lowering.TRITONS)
def test_hints_of_mla_arrive(triton):
    kernel = lowering.compile_text("mla", mla_kernel(), 90, triton, num_warps=4, num_stages=1)
    assert_latents_evicted_first(kernel, "tt.load", "ld.global")
    assert_results_evicted_last(kernel)


@pytest.mark.parametrize("triton", lowering.TRITONS)
def test_hints_of_asynchronous_copies_arrive(triton):
    """Triton before 3.9 has them on the copy and writes the copy without: the compiler's own limit, so noted here."""
    kernel = lowering.compile_text("mla", mla_kernel(), 90, triton, num_warps=4, num_stages=3)
    assert "cp.async" in kernel.ptx
    assert_results_evicted_last(kernel)
    if triton in ("3.6.0", "3.8.0"):
        assert hints(kernel.ttgir)["evict_first"] >= 5
        assert hints(kernel.ptx)["evict_first"] == 0
    else:
        assert_latents_evicted_first(kernel, "async_copy_global_to_local", "cp.async")


@pytest.mark.parametrize("triton", lowering.TRITONS)
@pytest.mark.control
def test_a_lost_hint_is_noticed(triton):
    plain = re.sub(r" evictionPolicy = \w+| \{cachePolicy = [^}]*\}", "", mla_kernel())
    assert hints(plain) == {"evict_first": 0, "evict_last": 0}
    kernel = lowering.compile_text("mla", plain, 90, triton, num_warps=4, num_stages=1)
    with pytest.raises(AssertionError):
        assert_latents_evicted_first(kernel, "tt.load", "ld.global")
    with pytest.raises(AssertionError):
        assert_results_evicted_last(kernel)


def test_a_hint_that_triton_does_not_read_is_an_error():
    text = mla_kernel() + "\n// a third evict_first, where no parser sees it"
    with pytest.raises(AssertionError, match=r"Triton read the hints \{'evict_first': 5, .* the kernel has"):
        lowering.compile_text("mla", text, 90, num_warps=4, num_stages=1)


def test_each_triton_gets_its_own_spelling():
    assert spell(OLD, (3, 8)) == OLD
    assert spell(NEW, (3, 8)) == OLD
    assert spell(OLD, (3, 9)) == NEW
    assert spell(NEW, (3, 9)) == NEW
    modified = OLD.replace("evictionPolicy", "cacheModifier = cg evictionPolicy")
    assert spell(spell(modified, (3, 9)), (3, 8)) == modified
    assert spell(modified, (3, 9)) == NEW.replace("none", "cg")
