"""Gradients of the "xla" implementations, against autodiff of dense attention in float64, under jit."""

import functools
from typing import Literal

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn
from pallas_attn import LocalStride
from pallas_attn._tile.layout import to_nhd
from pallas_attn.testing import cases

OPTIONS = {
    "plain": {},
    "several queries": {"q_len": 3},
    "window": {"q_len": 2, "sliding_window": 9},
    "logits": {"softcap": 3.0, "alibi": True, "sinks": True, "q_len": 2},
    "pattern": {"block_sparse": LocalStride(16, 1, 2, 1)},
    "HND": {"layout": "HND"},
    "PACKED": {"layout": "PACKED"},
}


WHICH: tuple[Literal["key"], Literal["value"]] = ("key", "value")


def in_float64(array) -> jax.Array:
    return jnp.asarray(np.nan_to_num(np.asarray(array, np.float64)))


def dense(case: cases.DecodeCase, query, key_cache, value_cache, tables, extras):
    """As the textbook has it, of the NHD pools' own tokens; (out, lse) of [num_seqs, q_len, num_heads]."""
    query = query.reshape(case.num_seqs, case.q_len, case.num_heads, case.head_dim)
    slopes = extras.get("alibi_slopes", jnp.zeros(case.num_heads))
    outs, lses = [], []
    for seq, length in enumerate(case.seq_lens):
        if length == 0:
            outs.append(jnp.zeros_like(query[0]))
            lses.append(jnp.full(query.shape[1:3], -jnp.inf))
            continue
        page, offset = inputs.token_places(tables[seq], length, case.page_size)
        k, v = (jnp.repeat(pool[page, offset], case.group, axis=1) for pool in (key_cache, value_cache))
        logits = jnp.einsum("qhd,khd->qhk", query[seq], k) * case.head_dim**-0.5
        if case.softcap:
            logits = case.softcap * jnp.tanh(logits / case.softcap)
        at = length - case.q_len + np.arange(case.q_len)
        logits += slopes[:, None] * (np.arange(length) - at[:, None, None])
        logits = jnp.where(inputs.visible(case, length), logits, -jnp.inf)
        if "sinks" in extras:
            sink = jnp.broadcast_to(extras["sinks"][:, None], (*logits.shape[:2], 1))
            logits = jnp.concatenate([logits, sink], axis=-1)
        lses.append(jax.nn.logsumexp(logits, axis=-1))
        outs.append(jnp.einsum("qhk,khd->qhd", jnp.exp(logits - lses[-1][..., None])[..., :length], v))
    return jnp.stack(outs), jnp.stack(lses)


def loss(out, lse):
    """Of every row, with a weight of its own."""
    out, lse = out.reshape(lse.shape + out.shape[-1:]), jnp.where(jnp.isfinite(lse), lse, 0)
    weight = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
    return jnp.sum(out * weight) + jnp.sum(lse * weight[..., 0])


@pytest.mark.parametrize(
    "option", [name if name == "logits" else pytest.param(name, marks=pytest.mark.once) for name in OPTIONS]
)
@pytest.mark.sweep(option=lambda option: OPTIONS[option])
def test_paged_attention(option):
    # More than one chunk of the loop; every query sees a token, or the dense form would divide by zero.
    case = cases.DecodeCase((300, 0, 17), 4, 2, 8, 16, "float32", **OPTIONS[option])
    data = inputs.make(case)
    query, *_, tables, lens = data.arguments()
    floats = {"query": query, "pools": data.arguments()[1:3], "extras": data.extras}

    @jax.jit
    def ours(floats):
        out, lse = pallas_attn.paged_attention(
            floats["query"],
            *floats["pools"],
            tables,
            lens,
            **floats["extras"],
            layout=case.layout,
            sliding_window=case.sliding_window,
            softcap=case.softcap,
            block_sparse=case.block_sparse,
            return_lse=True,
            implementation="xla",
        )
        return loss(out, lse.reshape(case.num_seqs, case.q_len, case.num_heads))

    def theirs(floats):
        return loss(*dense(case, floats["query"], *floats["pools"], data.block_tables, floats["extras"]))

    value, gradients = jax.jit(jax.value_and_grad(ours))(floats)
    nhd = [to_nhd(pool, case.layout, which) for which, pool in zip(WHICH, floats["pools"], strict=True)]
    with jax.enable_x64(True):
        wide = jax.tree.map(in_float64, {**floats, "pools": nhd})
        expected_value, expected = jax.jit(jax.value_and_grad(theirs))(wide)
    np.testing.assert_allclose(value, expected_value, rtol=1e-4)
    for which, got, want in zip(WHICH, gradients.pop("pools"), expected.pop("pools"), strict=True):
        got = to_nhd(got, case.layout, which)
        np.testing.assert_allclose(got, want, atol=2e-4, err_msg=which)
        assert np.abs(want).max() > 0.1
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-4, rtol=1e-3), gradients, expected)
    for name, gradient in gradients["extras"].items():
        assert np.abs(gradient).max() > 0.01, name


@pytest.mark.parametrize("causal", [False, True])
def test_mla_decode(causal):
    case = cases.MLADecodeCase((300, 17), 4, q_len=2, causal=causal, page_size=16, dtype="float32")
    data = inputs.make(case)
    query, cache, tables, lens = data.arguments()

    @jax.jit
    def ours(query, cache):
        return loss(
            *pallas_attn.mla_decode(
                query, cache, tables, lens, causal=causal, return_lse=True, implementation="xla"
            )
        )

    def theirs(query, cache):
        outs, lses = [], []
        for seq, length in enumerate(case.seq_lens):
            page, offset = inputs.token_places(data.block_tables[seq], length, case.page_size)
            tokens = cache[page, offset, 0]
            logits = jnp.einsum("qhd,kd->qhk", query[seq], tokens) * 576**-0.5
            end = length - (1 - np.arange(2)) if causal else np.full(2, length)
            logits = jnp.where(np.arange(length) < end[:, None, None], logits, -jnp.inf)
            lses.append(jax.nn.logsumexp(logits, axis=-1))
            outs.append(jnp.exp(logits - lses[-1][..., None]) @ tokens[:, :512])
        return loss(jnp.stack(outs), jnp.stack(lses))

    got = jax.jit(jax.grad(ours, (0, 1)))(query, cache)
    with jax.enable_x64(True):
        wide = [in_float64(x) for x in (query, cache)]
        expected = jax.jit(jax.grad(theirs, (0, 1)))(*wide)
    for mine, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, other, atol=5e-4)


def test_scales_and_the_query_of_a_quantised_cache():
    """Its elements have no gradients, and say so; what is float32 has."""
    case = cases.DecodeCase((40, 3), 4, 2, 16, 16, cache_dtype="float8_e4m3fn", scale_per_head=True)
    data = inputs.make(case)
    query, keys, values, tables, lens = data.arguments()
    query = query.astype(jnp.float32)

    @jax.jit
    def total(query, k_scale, v_scale, keys=keys, values=values):
        call = functools.partial(pallas_attn.paged_attention, implementation="xla")
        return jnp.sum(jnp.sin(call(query, keys, values, tables, lens, k_scale=k_scale, v_scale=v_scale)))

    scales = [jnp.asarray(data.extras[name]) for name in ("k_scale", "v_scale")]
    gradients = jax.grad(total, (0, 1, 2))(query, *scales)
    for i, gradient in enumerate(gradients):
        at = [query, *scales]
        direction = jnp.cos(jnp.arange(at[i].size, dtype=jnp.float32)).reshape(at[i].shape)
        step = 1e-2 if i == 0 else 1e-3
        ends = [
            total(*(x + sign * step * direction if j == i else x for j, x in enumerate(at)))
            for sign in (1, -1)
        ]
        slope = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(jnp.sum(gradient * direction), slope, rtol=2e-2, atol=2e-2)
    with pytest.raises(
        NotImplementedError,
        match=r"paged_attention: argument 'key_cache': expected a cache that is not quantised .*float8_e4m3fn",
    ):
        jax.grad(total, 3)(query, *scales, keys)


@pytest.mark.parametrize("op", ["paged_attention", "mla_decode"])
def test_backwards_memory_does_not_follow_the_table(op):
    """Weights are worked out again, chunk by chunk."""

    def temporary_bytes(max_pages: int) -> int:
        shape = jax.ShapeDtypeStruct
        table, lens = shape((2, max_pages), jnp.int32), shape((2,), jnp.int32)
        if op == "paged_attention":
            pool = shape((8, 16, 4, 64), jnp.float32)
            arguments = (shape((2, 4, 64), jnp.float32), pool, pool, table, lens)
        else:
            pool = shape((8, 16, 1, 576), jnp.float32)
            arguments = (shape((2, 1, 4, 576), jnp.float32), pool, table, lens)
        call = functools.partial(getattr(pallas_attn, op), implementation="xla")
        gradient = jax.jit(jax.grad(lambda *a: jnp.sum(call(*a)), tuple(range(len(arguments) - 2))))
        return gradient.lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(4096) < 2 * temporary_bytes(64)


def check_unseen(call, arrays: dict[str, jax.Array], unseen: dict[str, np.ndarray]) -> None:
    """Results and gradients have the same bits whether what is `unseen` holds 0 or NaN; its own gradients are 0."""

    @jax.jit
    def both(arrays):
        out, pull = jax.vjp(lambda arrays: call(**arrays), arrays)
        return out, pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))[0]

    def filled(number: float) -> dict[str, jax.Array]:
        masks = {name: mask.reshape(*mask.shape, *[1] * (arrays[name].ndim - mask.ndim))
                 for name, mask in unseen.items()}  # fmt: skip
        return arrays | {name: jnp.where(mask, number, arrays[name]) for name, mask in masks.items()}

    out, gradients = both(filled(0.0))
    assert np.abs(out).max() > 0.1
    jax.tree.map(np.testing.assert_array_equal, both(filled(np.nan)), (out, gradients))
    for name, mask in unseen.items():
        assert np.abs(gradients[name]).max() > 0.1, name
        assert (np.asarray(gradients[name])[mask] == 0).all(), name


@pytest.mark.once
def test_a_query_before_its_sequences_start_is_in_no_gradient():
    """Two of three query tokens of a sequence of one."""
    rng = np.random.default_rng(0)
    arrays = {"query": rng.standard_normal((2, 3, 2, 16)), "key": rng.standard_normal((3, 8, 1, 16))}
    arrays = {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}
    tables, lens = jnp.array([[2, 7], [0, 1]], jnp.int32), jnp.array([1, 12], jnp.int32)

    def call(query, key):
        return pallas_attn.paged_attention(query, key, key + 1, tables, lens, implementation="xla")

    early = np.array([[True, True, False], [False] * 3])
    free = np.arange(24).reshape(3, 8)
    check_unseen(call, arrays, {"query": early, "key": (free > 16) | (free >= 12) & (free < 16)})


@pytest.mark.once
def test_sequences_left_to_another_kernel_are_in_no_gradient():
    rng = np.random.default_rng(0)
    shapes = {"query": (4, 2, 16), "key": (4, 1, 16), "key_cache": (2, 8, 1, 16)}
    arrays = {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    tables = jnp.array([[0], [1]], jnp.int32)
    lens, cu_q_lens = jnp.array([8, 6], jnp.int32), jnp.array([0, 3, 4], jnp.int32)

    def call(query, key, key_cache):
        return pallas_attn.prefix_prefill(
            *(query, key, key + 1, key_cache, key_cache + 1, tables, lens, cu_q_lens),
            skip_decode=True,
            implementation="xla",
        )

    last, free = np.arange(4) == 3, np.arange(16).reshape(2, 8)
    check_unseen(call, arrays, {"query": last, "key": last, "key_cache": free >= 5})
