"""Messages of `mla_decode` and its FlashMLA-named twin, and wrong outputs that its comparison must reject."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import unchecked

import pallas_attn
from pallas_attn.ops.mla_decode import MLADecodeConfig, MLASchedule
from pallas_attn.ops.mla_decode.api import mla_decode

decode = unchecked(mla_decode)


def arguments(**changes) -> dict[str, Any]:
    shape: dict[str, Any] = dict(
        query=jax.ShapeDtypeStruct((2, 1, 4, 576), jnp.bfloat16),
        latent_cache=jax.ShapeDtypeStruct((9, 64, 2, 576), jnp.bfloat16),
        block_tables=jax.ShapeDtypeStruct((2, 5), jnp.int32),
        seq_lens=jax.ShapeDtypeStruct((2,), jnp.int32),
    )
    return shape | changes


def of(*shape, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


SCHEDULE: Any = MLASchedule(of(7, 8, dtype=jnp.int32), of(4, dtype=jnp.int32))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            dict(query=of(2, 1, 4, 512)),
            ValueError,
            "'query': expected shape [num_seqs, q_len, num_heads, 576]",
        ),
        (dict(query=of(2, 4, 576)), ValueError, "'query': expected shape"),
        (
            dict(query=of(2, 1, 4, 576, dtype=jnp.int8)),
            TypeError,
            "'query': expected dtype bfloat16 or float16",
        ),
        (
            dict(latent_cache=of(9, 64, 2, 576, dtype=jnp.float16)),
            TypeError,
            "'latent_cache': expected dtype bf",
        ),
        (
            dict(latent_cache=of(9, 64, 3, 576)),
            ValueError,
            "'query': expected a multiple of num_kv_heads (3)",
        ),
        (dict(latent_cache=of(0, 64, 1, 576)), ValueError, "'latent_cache': expected no empty dimension"),
        (dict(block_tables=of(3, 5, dtype=jnp.int32)), ValueError, "num_seqs=2 (as query)"),
        (dict(seq_lens=of(2, dtype=jnp.int16)), TypeError, "'seq_lens': expected dtype int32, got int16"),
        (dict(scale=-1.0), ValueError, "'scale': expected a finite number above 0"),
        (dict(causal=None), TypeError, "'causal': expected True or False, got None of type NoneType"),
        (dict(schedule=(1, 2)), TypeError, "'schedule': expected an MLASchedule or None, got tuple"),
        (dict(schedule=SCHEDULE), ValueError, "'schedule.num_splits': expected shape [3], got [4]"),
        (
            dict(implementation="mosaic"),
            ValueError,
            "'implementation': expected None or one of 'cuda', 'pallas'",
        ),
        (dict(implementation="pallas"), ValueError, "'pallas' cannot serve this call: needs an NVIDIA GPU"),
        (
            dict(implementation="xla", config=MLADecodeConfig(16, 32)),
            ValueError,
            "'config': expected None for",
        ),
    ],
)
def test_messages(changes, error, message):
    if "needs an NVIDIA GPU" in message and jax.default_backend() == "gpu":
        pytest.skip("there is one")
    given = arguments(**changes)
    options = {k: given.pop(k) for k in list(given) if k not in arguments()}
    with pytest.raises(error) as raised:
        jax.eval_shape(lambda a: decode(**a, **options), given)
    assert message in str(raised.value)
    assert str(raised.value).startswith("mla_decode: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(block_q=8), "'block_q': expected a power of two >= 16, got 8"),
        (dict(block_kv=48), "'block_kv': expected a power of two >= 16, got 48"),
        (dict(num_splits=-1), "'num_splits': expected at least 0, got -1"),
        (dict(num_warps=3), "'num_warps': expected a power of two >= 1, got 3"),
    ],
)
def test_config_messages(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        MLADecodeConfig(**(dict(block_q=16, block_kv=32) | changes))


def test_flash_mla_messages():
    data = [jnp.zeros(x.shape, x.dtype) for x in arguments().values()]
    metadata = pallas_attn.get_mla_metadata(data[-1], 2, 2)
    with pytest.raises(
        ValueError, match="flash_mla_with_kvcache: argument 'head_dim_v': expected 512, got 576"
    ):
        pallas_attn.flash_mla_with_kvcache(*data, 576, *metadata)  # type: ignore[reportCallIssue]
    with pytest.raises(
        ValueError, match="get_mla_metadata: argument 'num_heads_k': expected at least 1, got 0"
    ):
        pallas_attn.get_mla_metadata(data[-1], 16, 0)
    with pytest.raises(
        TypeError, match=r"argument 'num_heads_per_head_k': expected an int, got 4\.5 of type"
    ):
        unchecked(pallas_attn.get_mla_metadata)(data[-1], 4.5, 1)
    flash_mla = unchecked(pallas_attn.flash_mla_with_kvcache)
    with pytest.raises(ValueError, match=r"flash_mla_with_kvcache: argument 'block_table': expected shape"):
        flash_mla(data[0], data[1], data[2][:1], data[3], 512, *metadata)
    with pytest.raises(
        TypeError, match="flash_mla_with_kvcache: argument 'k_cache': expected dtype bfloat16"
    ):
        flash_mla(data[0], data[1].astype(jnp.float16), *data[2:], 512, *metadata)
    with pytest.raises(ValueError, match=r"argument 'q': expected a multiple of num_heads_k \(3\), got 4"):
        flash_mla(data[0], jnp.zeros((9, 64, 3, 576), jnp.bfloat16), *data[2:], 512, *metadata)
    with pytest.raises(
        ValueError, match=r"argument 'cache_seqlens': expected shape \[batch_size=2 \(as q\)\], got \[3\]"
    ):
        flash_mla(*data[:3], jnp.zeros(3, jnp.int32), 512, *metadata)
    with pytest.raises(ValueError, match=r"argument 'num_splits': expected shape \[3\], got \[2\]"):
        flash_mla(*data, 512, metadata[0], metadata[1][:2])
    with pytest.raises(ValueError, match=r"argument 'softmax_scale': expected a finite number above 0"):
        flash_mla(*data, 512, *metadata, 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(overhead_blocks=2**26), "'overhead_blocks': expected at most 1024, got 67108864"),
        (dict(num_parts=70000), "'num_parts': expected at most 4096, got 70000"),
        (dict(num_parts=0), "'num_parts': expected at least 1, got 0"),
    ],
)
def test_schedules_that_would_overflow_are_refused(options, message):
    with pytest.raises(ValueError, match=f"mla_schedule: argument {message}"):
        pallas_attn.mla_schedule(jnp.full(3, 100, jnp.int32), num_heads=4, **options)


@pytest.mark.parametrize("scale", [1e39, 1e-60, float("nan"), 10**400, True, np.complex64(1)])
def test_scales_that_float32_does_not_hold_are_refused(scale):
    error = TypeError if isinstance(scale, bool | np.complex64) else ValueError
    with pytest.raises(error, match=r"'scale': expected a finite number above 0, or None, got "):
        jax.eval_shape(lambda a: decode(**a, scale=scale), arguments())


@pytest.mark.once
def test_gradients_are_refused_where_there_are_none():
    query, *rest = (jnp.ones(x.shape, x.dtype) for x in arguments().values())

    def total(query, implementation):
        return decode(query, *rest, implementation=implementation).astype(jnp.float32).sum()

    assert jax.grad(total)(query, "xla").shape == query.shape
    with pytest.raises(NotImplementedError, match=r"^mla_decode: the kernel has no gradients"):
        jax.grad(total)(query, "interpret")
