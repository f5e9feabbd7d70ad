"""Gradients by the CUDA kernel of csrc/attention/sm90/backward, which `flash_attention` takes where it is told to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from lowering import lower_for_four
from support import as_if_cuda

import pallas_attn

TARGET = "pallas_attn_attention_backward_sm90"
GRADIENTS = pallas_attn.FlashAttentionCudaConfig(backward="cuda")

OWN = [  # query heads, KV heads, dim, dtype, options
    (4, 2, 128, "bfloat16", {"causal": True}),
    (4, 4, 64, "bfloat16", {}),
    (6, 2, 120, "float16", {"causal": True, "sliding_window": (70, 9), "layout": "BNTH"}),
    (2, 1, 64, "float16", {"softcap": 3.0, "q_offset": -40, "causal": True}),
    (4, 1, 128, "bfloat16", {"causal": True, "segments": 9}),
    (2, 2, 96, "bfloat16", {"causal": True}),
    (4, 2, (192, 128), "bfloat16", {"causal": True}),
    (2, 1, 256, "float16", {"sliding_window": (99, 9), "segments": 3}),
    (4, 2, 128, "bfloat16", {"causal": True, "alibi": True}),
    (4, 1, 64, "bfloat16", {"alibi": True, "layout": "BNTH"}),
    (2, 2, 88, "float16", {"sliding_window": (90, 0), "segments": 5, "alibi": True}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", OWN, ids=str)
def test_its_own_gradients(case):
    """Of everything that has some, a sink's and the lse's too, and the same bits again."""
    heads, kv_heads, dim, dtype, options = case
    options, tokens, rng = dict(options), 700, np.random.default_rng(0)
    if count := options.pop("segments", None):
        options["segment_ids"] = jnp.asarray(np.sort(rng.integers(0, count, (2, tokens)), axis=1), jnp.int32)
    alibi = options.pop("alibi", False)
    dim, value_dim = dim if isinstance(dim, tuple) else (dim, dim)
    heads_first = options.get("layout") == "BNTH"
    floats = [
        jnp.asarray(
            rng.standard_normal((2, n, tokens, d) if heads_first else (2, tokens, n, d)), jnp.dtype(dtype)
        )
        for n, d in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    ]
    floats.append(jnp.asarray(rng.standard_normal(heads), jnp.float32))
    if alibi:
        floats.append(jnp.asarray(0.5 / np.arange(1, heads + 1), jnp.float32))

    def pulled(implementation, *floats):
        def attention(query, key, value, sinks, *slopes):
            bias = (lambda s, b, h, q, k: s - slopes[0][h] * (q - k)) if slopes else None
            return pallas_attn.flash_attention(
                query, key, value, sinks=sinks, return_lse=True, implementation=implementation, score_mod=bias,
                config=GRADIENTS if implementation == "cuda" else None, **options,
            )  # fmt: skip

        results, pull = jax.vjp(attention, *floats)
        # Of few numbers, which 16 bits have too.
        return pull(
            tuple(jnp.cos(jnp.arange(r.size) % 97.0).reshape(r.shape).astype(r.dtype) for r in results)
        )

    ours = jax.jit(functools.partial(pulled, "cuda"))
    assert TARGET in ours.lower(*floats).as_text()
    found = ours(*floats)
    right = jax.jit(functools.partial(pulled, "xla"))(*(x.astype(jnp.float32) for x in floats))
    for x, y in zip(found, right, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) < {"bfloat16": 8e-3, "float16": 1e-3}[dtype] * np.linalg.norm(y)
    for x, y in zip(found, ours(*floats), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("tilted", [False, True])
@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Manual])
def test_each_device_calls_it_with_what_is_its_own(monkeypatch, axis_type, tilted):
    """Explicit axes, and shard_map's, whose check of what varies it passes. Slopes are those of its heads."""
    as_if_cuda(monkeypatch)
    slopes = jnp.arange(16.0)
    alibi = (lambda s, b, h, q, k: s - slopes[h] * (q - k)) if tilted else None
    specs = [PartitionSpec("x", None, "y")] * 3
    arrays = [jax.ShapeDtypeStruct((2, 2048, heads, 128), jnp.bfloat16) for heads in (16, 4, 4)]

    def gradients(*floats):
        def loss(*floats):
            return (
                pallas_attn.flash_attention(
                    *floats, causal=True, score_mod=alibi, implementation="cuda", config=GRADIENTS
                )
                .astype(jnp.float32)
                .sum()
            )

        return jax.grad(loss, (0, 1, 2))(*floats)

    text = lower_for_four(gradients, arrays, specs, specs, axis_type)
    [call] = [line for line in text.splitlines() if f"@{TARGET}(" in line]
    assert "tensor<1x2048x8x128xbf16>" in call
    assert ("tensor<8xf32>" in call) == tilted
