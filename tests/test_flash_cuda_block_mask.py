"""`flash_attention` over a block mask by the CUDA kernel of csrc/attention: on the GPU, and how calls get there."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_attention_lists_on_host as on_host
from jax.sharding import AxisType, PartitionSpec
from lowering import H100, abstract_mesh, lower_for_four, lower_for_gpu
from test_flash_cuda import built as built
from test_flash_cuda import shapes

import pallas_attn
from pallas_attn import block_mask, mods
from pallas_attn._tile import triton

gpu = pytest.mark.gpu
TARGET = "pallas_attn_attention_lists_sm90"
BACKWARD = "pallas_attn_attention_backward_sm90"
GRADIENTS = pallas_attn.FlashAttentionCudaConfig(backward="cuda")
CASES = {
    **on_host.CASES,
    "long": on_host.Case(mods.causal(), 4000, 4000, 128, 128, heads=8, kv_heads=2, keep=True),
    "long, by head": on_host.Case(on_host.CASES["by head"].mask, 3000, 3000, 256, 192, heads=4, kv_heads=4),
}


def made(case: on_host.Case, mask=None, **options) -> pallas_attn.BlockMask:
    return block_mask(
        case.mask if mask is None else mask, q_len=case.q_len, kv_len=case.kv_len, batch=case.batch,
        num_heads=case.heads, block_q=case.blocks[0], block_kv=case.blocks[1], **{"max_partial": 512} | options,
    )  # fmt: skip


def call(case: on_host.Case, arrays, sinks, mask, implementation="cuda"):
    attend = functools.partial(
        pallas_attn.flash_attention,
        block_mask=mask,
        softcap=case.softcap or None,
        sinks=None if sinks is None else jnp.asarray(sinks, jnp.float32),
        return_lse=True,
        implementation=implementation,
    )
    return jax.jit(attend)(*map(jnp.asarray, arrays))


@gpu
@pytest.mark.parametrize("name", CASES)
def test_matches_reference(name):
    case = CASES[name]
    arrays, sinks = on_host.drawn(case), np.linspace(-1, 1, case.heads) if case.sinks else None
    mask = made(case)
    out, lse = (np.array(x) for x in call(case, arrays, sinks, mask))
    on_host.check(case, arrays, (out, lse / math.log(2)), sinks)
    for first, second in zip((out, lse), call(case, arrays, sinks, mask), strict=True):
        np.testing.assert_array_equal(first, np.array(second))
    # Blocks of the mask's that nobody sees, and those beyond it.
    other = made(case, mods.and_masks(case.mask, lambda b, h, q, k: k < case.kv_len // 2))
    with pytest.raises(AssertionError):
        on_host.check(case, arrays, (np.array(x) for x in call(case, arrays, sinks, other)), sinks)


@gpu
@pytest.mark.parametrize("config", [None, GRADIENTS], ids=["tiled", "cuda"])
@pytest.mark.parametrize(
    ("name", "dims"),
    [("documents", (64, 64)), ("by head", (64, 64)), ("by sequence", (96, 120)), ("long, by head", (128, 128)),
     ("documents", (256, 256)), ("long", (200, 136))],
)  # fmt: skip
def test_gradients_are_those_of_the_tiled_kernels(name, dims, config):
    case = CASES[name]._replace(dim=dims[0], value_dim=dims[1])
    arrays, mask = [jnp.asarray(x) for x in on_host.drawn(case)], made(case)

    def gradients(implementation, config=None):
        def loss(*floats):
            attend = functools.partial(
                pallas_attn.flash_attention, block_mask=mask, implementation=implementation, config=config,
                softcap=case.softcap or None,
            )  # fmt: skip
            return jnp.sum(jnp.sin(attend(*floats).astype(jnp.float32)))

        return jax.jit(jax.grad(loss, (0, 1, 2)))

    ours = gradients("cuda", config)
    found = ours(*arrays)
    for x, y, again in zip(found, gradients(triton.first_lowering())(*arrays), ours(*arrays), strict=True):
        np.testing.assert_array_equal(np.array(x, np.float32), np.array(again, np.float32))
        x, y = np.array(x, np.float32), np.array(y, np.float32)
        assert np.linalg.norm(x - y) < 1e-2 * np.linalg.norm(y)
        assert np.abs(y).max() > 0.1


@gpu
def test_more_blocks_than_are_kept_make_nan_in_rows_beyond():
    case = CASES["long"]
    arrays, length = on_host.drawn(case), case.kv_len

    @jax.jit
    def attend(query, key, value, ids):
        seen = mods.and_masks(mods.causal(), mods.documents(ids))
        mask = block_mask(seen, q_len=length, kv_len=length, max_partial=9)
        return pallas_attn.flash_attention(query, key, value, block_mask=mask, implementation="cuda")

    out = np.array(attend(*arrays, jnp.zeros(length, jnp.int32)), np.float32)
    assert np.isfinite(out[:, : 9 * 128]).all()
    assert np.isnan(out[:, 9 * 128 :]).all()


def over(query, key, value, ids, *, implementation="cuda", config=None, **options):
    """Built inside jit, of documents."""
    mask = block_mask(
        mods.and_masks(mods.causal(), mods.documents(ids)), q_len=2048, kv_len=2048,
        **{"max_partial": 64} | options,
    )  # fmt: skip
    return pallas_attn.flash_attention(
        query, key, value, block_mask=mask, implementation=implementation, config=config
    )


IDS = jax.ShapeDtypeStruct((2048,), jnp.int32)


def test_it_is_taken_where_it_is_asked_for(built):
    text = lower_for_gpu(over, *shapes(), IDS).as_text()
    [line] = [line for line in text.splitlines() if f"@{TARGET}(" in line]
    assert "tensor<64x2x2x128xi32>" in line
    assert "block_kv = 128" in line


def test_gradients_are_tiled_and_need_no_bits(built):
    def loss(query, key, value, ids):
        return over(query, key, value, ids).astype(jnp.float32).sum()

    text = lower_for_gpu(jax.grad(loss, (0, 1, 2)), *shapes(), IDS).as_text()
    [line] = [line for line in text.splitlines() if f"@{TARGET}(" in line]
    assert "tensor<1x2048x16x128xi8>" in line  # out's lower bits
    for line in text.splitlines():
        if "pallas_attn_flash_attention_d" in line:
            assert "64x2x2x128xi32" not in line


def test_a_hopper_gpu_takes_it_by_itself_where_bits_are_kept(built):
    assert (
        f"@{TARGET}(" in lower_for_gpu(functools.partial(over, implementation=None), *shapes(), IDS).as_text()
    )


@pytest.mark.parametrize(("dim", "kept"), [(128, None), (64, 64)], ids=["no bits", "few narrow pairs"])
def test_else_it_is_not_taken_and_bits_are_not_made(built, dim, kept):
    call = functools.partial(over, implementation=None, max_partial=kept)
    text = lower_for_gpu(call, *shapes(dim=dim), IDS).as_text()
    assert TARGET not in text
    assert "pallas_attn_flash_attention" in text
    bits = [line for line in text.splitlines() if "custom_call" in line and "64x2x2x128xi32" in line]
    assert not bits


@pytest.mark.parametrize(
    ("options", "dtype", "reason"),
    [
        ({"max_partial": None}, "bfloat16", "asks no mask_mod, but takes a block_mask that is made with max_partial"),
        ({}, "float32", "needs bfloat16 or float16, got float32"),
    ],
    ids=["no bits", "float32"],
)  # fmt: skip
def test_what_it_does_not_serve_it_says(built, options, dtype, reason):
    with abstract_mesh(H100), pytest.raises(ValueError, match=f"'cuda' cannot serve this call: {reason}"):
        jax.eval_shape(functools.partial(over, **options), *shapes(dtype=dtype), IDS)


def test_its_gradients_are_the_cuda_kernels_where_they_are_asked_for(built):
    def loss(query, key, value, ids):
        return over(query, key, value, ids, config=GRADIENTS).astype(jnp.float32).sum()

    text = lower_for_gpu(jax.grad(loss, (0, 1, 2)), *shapes(), IDS).as_text()
    [line] = [line for line in text.splitlines() if f"@{BACKWARD}(" in line]
    assert line.count("tensor<1x1x16x16x2xi32>") == 2
    assert "tensor<64x2x2x128xi32>" in line
    assert "block_kv = 128" in line
    assert "pallas_attn_flash_attention_d" not in text


def test_of_wide_heads_they_are_without_being_asked_for(built):
    def loss(query, key, value, ids):
        return over(query, key, value, ids, implementation=None).astype(jnp.float32).sum()

    query = jax.ShapeDtypeStruct((4, 2048, 8, 256), jnp.bfloat16)
    text = lower_for_gpu(jax.grad(loss, (0, 1, 2)), query, query, query, IDS).as_text()
    assert f"@{BACKWARD}(" in text
    assert "pallas_attn_flash_attention_d" not in text


def test_of_smaller_blocks_than_its_tiles_they_are_not(built):
    reason = "takes blocks of at least 128 queries and 128 keys, got 128 and 64"
    with abstract_mesh(H100), pytest.raises(ValueError, match=f"'cuda', which {reason}"):
        jax.eval_shape(functools.partial(over, config=GRADIENTS, block_kv=64), *shapes(), IDS)


def test_each_device_has_its_own_lists_and_all_bits(built):
    # Constants: what is made of arrays of the mesh's own is what the call without a mesh is made of.
    mask = block_mask(CASES["by head"].mask, q_len=512, kv_len=512, batch=2, num_heads=16, max_partial=200)
    specs = [PartitionSpec("x", None, "y")] * 3

    def gradients(*floats):
        def loss(*floats):
            attend = functools.partial(pallas_attn.flash_attention, block_mask=mask, config=GRADIENTS)
            return attend(*floats, implementation="cuda").astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1, 2))(*floats)

    text = lower_for_four(gradients, shapes(length=512, batch=2), specs, specs, AxisType.Explicit)
    for target, lists in ((TARGET, "tensor<1x8x4x4xi32>"), (BACKWARD, "tensor<1x8x4x4x2xi32>")):
        [line] = [line for line in text.splitlines() if f"@{target}(" in line]
        assert "tensor<1x512x8x128xbf16>" in line
        assert lists in line
        assert "tensor<200x2x2x128xi32>" in line
