"""16-bit gradients where keys or values share an offset: as close to float64 as those of jax.nn's plain implementation.

What is common to keys leaves softmax as it is, and so must it gradients. Tests of N(0, 1) alone never ask that.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flash_inputs import SMALL_TILES
from support import ON_GPU

import pallas_attn
from pallas_attn._tile import low_bits, weights
from pallas_attn.ops.blocksparse_attention import BlockSparseConfig, builders

MOST = 1.25  # times the error of jax.nn's
HEADS, DIM = 4, 64
# (keys, values, one channel of keys, one of values)
SHIFTS = [
    (0, 0, 0, 0),
    (4, 0, 0, 0),
    (8, 0, 0, 0),
    (0, 4, 0, 0),
    (0, 8, 0, 0),
    (4, 4, 0, 0),
    (8, 8, 0, 0),
    (0, 0, 50, 0),
    (0, 0, 0, 50),
    (0, 0, 50, 50),
]
SMALL_BLOCKS = BlockSparseConfig(
    block_q=32, block_kv=32, decode_block_kv=32, dq_block_q=32, dq_block_kv=32, dkv_block_q=32, dkv_block_kv=32
)  # fmt: skip


def drawn(length: int, dtype: str, shift: tuple[int, ...], dim: int = DIM) -> list[jax.Array]:
    """query, key, value, d_out [1, length, HEADS, dim]."""
    rng = np.random.default_rng(0)
    query, key, value, d_out = (rng.standard_normal((1, length, HEADS, dim)) for _ in range(4))
    key, value = key + shift[0], value + shift[1]
    key[..., 3] += shift[2]
    value[..., 5] += shift[3]
    return [jnp.asarray(x, jnp.dtype(dtype)) for x in (query, key, value, d_out)]


@functools.partial(jax.jit, static_argnames="causal")
def of_a_head(query, key, value, d_out, causal: bool):
    """Gradients of query, key, value [tokens, dim] and of a bias [queries, keys]."""
    scale = query.shape[-1] ** -0.5
    logits = query @ key.T * scale
    if causal:
        logits = jnp.where(jnp.tri(*logits.shape, dtype=bool), logits, -jnp.inf)
    p = jax.nn.softmax(logits)
    dp = d_out @ value.T
    ds = p * (dp - jnp.sum(p * dp, axis=-1, keepdims=True))
    return ds @ key * scale, ds.T @ query * scale, p.T @ d_out, ds


def exact(arrays: list[jax.Array], causal: bool, biased: bool) -> list[np.ndarray]:
    """Gradients of query, key, value and, if asked for, of a bias [1, HEADS, queries, keys], in float64.

    By JAX, on the GPU where there is one: a host takes a minute for 4096 tokens.
    """
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in arrays]
        heads = [of_a_head(*(x[0, :, head] for x in wide), causal)[: 3 + biased] for head in range(HEADS)]
        return [
            np.stack([np.asarray(x) for x in of_heads], axis=axis)[None]
            for of_heads, axis in zip(zip(*heads, strict=True), (1, 1, 1, 0), strict=False)
        ]


def pulled(attention, query, key, value, d_out, bias):
    out, pull = jax.vjp(attention, query, key, value, *bias)
    return pull(d_out.astype(out.dtype))


def flash(query, key, value, bias=None, *, causal: bool, implementation: str):
    config = SMALL_TILES if implementation == "interpret" else None
    return pallas_attn.flash_attention(
        query, key, value, bias=bias, causal=causal, implementation=implementation, config=config
    )


def blocksparse(query, key, value, *, causal: bool, implementation: str):
    length, size = query.shape[1], 128 if implementation == "cuda" else 32
    assert causal
    layout = builders.dense_causal(length, block_size=size, q_block_size=size)
    ends = jnp.array([0, length], jnp.int32)
    config = SMALL_BLOCKS if implementation == "interpret" else None
    out = pallas_attn.blocksparse_attention(
        *(x[0] for x in (query, key, value)),
        layout,
        cu_q_lens=ends,
        cu_k_lens=ends,
        implementation=implementation,
        config=config,
    )
    return out[None]


@functools.cache
def theirs(length: int, dtype: str, causal: bool, shift: tuple[int, ...], biased: bool, dim: int):
    """Inputs, the right gradients, and how far off jax.nn's are."""
    arrays = drawn(length, dtype, shift, dim)
    bias = (jnp.zeros((1, HEADS, length, length), jnp.float32),) if biased else ()
    plain = functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation="xla")
    right = exact(arrays, causal, biased)
    return arrays, bias, right, errors(pulled(plain, *arrays, bias), right)


def errors(found, right) -> list[float]:
    return [
        float(np.linalg.norm(np.asarray(ours, np.float64) - true) / np.linalg.norm(true))
        for ours, true in zip(found, right, strict=True)
    ]


def ratios(attention, length: int, dtype: str, causal: bool, biased: bool, dim: int = DIM, shifts=SHIFTS):
    """{shift: error over jax.nn's, of each gradient}"""
    ours = jax.jit(functools.partial(pulled, attention))
    found = {}
    for shift in shifts:
        arrays, bias, right, yardstick = theirs(length, dtype, causal, shift, biased, dim)
        mine = errors(ours(*arrays, bias), right)
        found[shift] = [one / other for one, other in zip(mine, yardstick, strict=True)]
    return found


def check(found) -> None:
    wrong = {shift: np.round(those, 2) for shift, those in found.items() if not max(those) <= MOST}
    assert not wrong, f"times jax.nn's error: {wrong}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_flash_attention(implementation, dtype):
    attention = functools.partial(flash, causal=True, implementation=implementation)
    check(ratios(attention, 96, dtype, True, biased=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_blocksparse_attention(implementation, dtype):
    attention = functools.partial(blocksparse, causal=True, implementation=implementation)
    check(ratios(attention, 96, dtype, True, biased=False))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [64, 512, 4096])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("implementation", ON_GPU)
def test_flash_attention_on_a_gpu(implementation, dtype, causal, length):
    attention = functools.partial(flash, causal=causal, implementation=implementation)
    check(ratios(attention, length, dtype, causal, biased=length < 4096, dim=128))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [256, 512, 4096])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("implementation", ["cuda", *ON_GPU])
def test_blocksparse_attention_on_a_gpu(implementation, dtype, length):
    attention = functools.partial(blocksparse, causal=True, implementation=implementation)
    check(ratios(attention, length, dtype, True, biased=False, dim=128))


@pytest.mark.parametrize("lost", ["lower bits of out", "sums of what was rounded"])
@pytest.mark.control
def test_what_is_not_looked_at_is_caught(lost, monkeypatch):
    """Negative control: with delta of the rounded out, or with gradients of logits that do not add up."""
    if lost == "lower bits of out":
        monkeypatch.setattr(low_bits, "joined", lambda rounded, low: rounded.astype(jnp.float32))
        attention = functools.partial(flash, causal=True, implementation="xla")
    else:
        monkeypatch.setattr(weights, "settled", lambda total, *_: total)
        attention = functools.partial(blocksparse, causal=True, implementation="interpret")
    which = (0, 8, 0, 0) if lost == "lower bits of out" else (8, 0, 0, 0)
    plain, both = (0, 0, 0, 0), (8, 8, 0, 0)
    for shift in (plain, which, both):  # by what is compiled already
        theirs(96, "bfloat16", True, shift, False, DIM)
    jax.clear_caches()
    try:
        found = ratios(attention, 96, "bfloat16", True, biased=False, shifts=(plain, which, both))
    finally:
        jax.clear_caches()
    assert max(found[plain]) <= MOST < max(found[which])
    assert found[both][0] > 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kept", [jnp.int8, jnp.int16])
def test_lower_bits(dtype, kept):
    """Numbers come back with so many bits more; what is not finite, or too small, no worse than it was."""
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal(2000) * np.exp2(rng.integers(-12, 12, 2000))
    edge = [0.0, -0.0, 1.0, -2.0, 1e-30, -1e-7, 3e-5, 6e4, 1e30, np.inf, -np.inf, np.nan]
    exact = jnp.asarray([*numbers, *edge], jnp.float32)
    rounded = exact.astype(dtype)
    found = np.asarray(low_bits.joined(rounded, low_bits.of(exact, rounded, kept)), np.float64)
    true, before = np.asarray(exact, np.float64), np.asarray(rounded, np.float64)
    finite = np.isfinite(before)
    np.testing.assert_array_equal(found[~finite], before[~finite])
    found, true, before = found[finite], true[finite], before[finite]
    assert (np.abs(found - true) <= np.abs(before - true)).all()
    most = 2.0 ** -(jnp.finfo(dtype).nmant + 1 + 7) if kept == jnp.int8 else 2.0**-23
    normal = np.abs(true[:2000]) >= float(jnp.finfo(dtype).smallest_normal)
    assert normal.sum() > 1900
    np.testing.assert_allclose(found[:2000][normal], true[:2000][normal], rtol=most)
