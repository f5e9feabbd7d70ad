"""`flash_attention` with functions of the caller's own: outputs and gradients, captured arrays' too."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from lowering import lower_for_four
from support import ON_GPU, close

from pallas_attn import (
    BlockMask,
    FlashAttentionConfig,
    FlashAttentionTiles,
    block_mask,
    flash_attention,
    mods,
)
from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._tile.band import Band
from pallas_attn.mods.call import Sizes, of_call
from pallas_attn.ops.flash_attention import cuda
from pallas_attn.ops.flash_attention.operands import Operands, Rules

BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 16
_rng = np.random.default_rng(0)
SHORT, LONG = 129, 200
IDS = jnp.asarray(np.sort(_rng.integers(0, 4, LONG)), jnp.int32)
SHUFFLED = jnp.asarray(_rng.integers(0, 3, LONG), jnp.int32)
STARTS = jnp.searchsorted(IDS, jnp.arange(4)).astype(jnp.int32)
PREFIXES = jnp.array([30, 150], jnp.int32)


def _normal(*shape: int) -> jax.Array:
    return jnp.asarray(_rng.normal(size=shape), jnp.float32)


class Case(NamedTuple):
    score: Callable[..., Any] | None = None
    """Of the captured array, and of q_len and kv_len: a score_mod."""
    captured: Any = None
    mask: Any = None
    q_len: int = LONG
    kv_len: int = LONG
    options: Mapping[str, Any] = MappingProxyType({})


SLOPES = jnp.array([0.1, 0.2, 0.3, 0.4])
TABLE = _normal(HEADS, 2 * LONG)
CASES = {
    "causal": Case(mask=mods.causal()),
    "window": Case(mask=mods.sliding_window(50, 20), q_len=SHORT),
    "causal documents": Case(mask=mods.and_masks(mods.causal(), mods.documents(IDS))),
    "shuffled documents": Case(mask=mods.documents(SHUFFLED)),
    "in document": Case(mask=lambda b, h, q, k: (q - STARTS[IDS[q]] < 40) & (IDS[q] == IDS[k])),
    "prefix by batch": Case(mask=mods.prefix_lm(PREFIXES)),
    "dilated": Case(mask=mods.dilated(3, 90)),
    "by head": Case(mask=lambda b, h, q, k: (k <= q) & (q - k < 40 * (h + 1))),
    "global tokens": Case(
        mask=mods.or_masks(mods.sliding_window(9, 9), lambda b, h, q, k: (IDS[q] == 0) | (k < 4))
    ),
    "rows that see nothing": Case(mask=lambda b, h, q, k: (q > 100) & (k > q), kv_len=SHORT),
    "beside a window": Case(mask=mods.documents(IDS), options=dict(causal=True, sliding_window=30)),
    "alibi": Case(lambda c, *_: mods.alibi(c), SLOPES, options=dict(causal=True)),
    "gate by query": Case(lambda c, *_: mods.gate(c), TABLE[:, :SHORT], q_len=SHORT),
    "key bias": Case(
        lambda c, *_: lambda s, b, h, q, k: s + c[b, k] * s,
        _normal(BATCH, SHORT),
        mask=mods.causal(),
        kv_len=SHORT,
    ),
    "distance table": Case(
        lambda c, q_len, kv_len: mods.distance_table(c, 1 - kv_len),
        TABLE,
        q_len=SHORT,
        mask=mods.documents(IDS),
    ),
    "clipped table": Case(lambda c, *_: mods.distance_table(c, -20), TABLE[:, :41], kv_len=SHORT),
    "buckets": Case(
        lambda c, *_: lambda s, b, h, q, k: s + c[h, jnp.minimum(jnp.abs(q - k) // 16, 7)], TABLE[:, :8]
    ),
    "by document": Case(lambda c, *_: lambda s, b, h, q, k: s * jnp.exp(c[SHUFFLED[q]]), SLOPES[:3]),
    "one number": Case(lambda c, *_: lambda s, b, h, q, k: s * c, jnp.float32(0.7), mask=mods.causal()),
    "soft cap": Case(lambda *_: mods.soft_cap(2.0)),
    "minus infinity": Case(lambda *_: lambda s, b, h, q, k: jnp.where(SHUFFLED[k] > 1, s, -jnp.inf)),
    "squares": Case(lambda *_: lambda s, b, h, q, k: 0.3 * s * s + jnp.sin(s), mask=mods.causal()),
    "everything": Case(
        lambda c, *_: mods.alibi(c),
        SLOPES,
        mask=mods.documents(IDS),
        options=dict(causal=True, softcap=3.0, sinks=True, bias=True, layout="BNTH"),
    ),
}


@functools.cache
def inputs(case_name: str) -> tuple[jax.Array, ...]:
    case, rng = CASES[case_name], np.random.default_rng(1)
    sizes = (case.q_len, HEADS), (case.kv_len, KV_HEADS), (case.kv_len, KV_HEADS), (case.q_len, HEADS)
    return tuple(jnp.asarray(rng.normal(size=(BATCH, *size, DIM)), jnp.float32) for size in sizes)


def dense(query, key, value, captured, case: Case):
    """(out, lse), with all pairs at once. The order is soft cap, score_mod, bias, masks."""
    options = case.options
    key, value = (jnp.repeat(x, HEADS // KV_HEADS, 2) for x in (key, value))
    score = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest") * DIM**-0.5
    if "softcap" in options:
        score = options["softcap"] * jnp.tanh(score / options["softcap"])
    at = [
        jnp.arange(size).reshape([-1 if i == axis else 1 for i in range(4)])
        for axis, size in enumerate(score.shape)
    ]
    if case.score is not None:
        score = jnp.broadcast_to(case.score(captured, case.q_len, case.kv_len)(score, *at), score.shape)
    if "bias" in options:
        score = score + BIAS
    seen = jnp.broadcast_to(True if case.mask is None else case.mask(*at), score.shape)
    if options.get("causal"):
        seen &= (at[3] <= at[2]) & (at[2] - at[3] < options.get("sliding_window", 10**6))
    score = jnp.where(seen, score, -jnp.inf)
    if "sinks" in options:
        score = jnp.concatenate([score, jnp.broadcast_to(SLOPES[:, None, None], (*score.shape[:3], 1))], -1)
    sees = jnp.any(score > -jnp.inf, -1, keepdims=True)
    weights = jnp.where(sees, jax.nn.softmax(jnp.where(sees, score, 0.0), -1), 0.0)[..., : case.kv_len]
    lse = jnp.where(sees[..., 0], jax.nn.logsumexp(jnp.where(sees, score, 0.0), -1), -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value, precision="highest"), jnp.moveaxis(lse, 1, 2)


BIAS = _normal(1, HEADS, LONG, LONG)


def attend(query, key, value, captured, case: Case, **options):
    options = {**case.options, **options}
    transposed = options.get("layout") == "BNTH"
    if transposed:
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    score_mod = None if case.score is None else case.score(captured, case.q_len, case.kv_len)
    options |= {"bias": BIAS} if "bias" in options else {}
    options |= {"sinks": SLOPES} if "sinks" in options else {}
    options.setdefault("mask_mod", case.mask)
    out, lse = flash_attention(query, key, value, score_mod=score_mod, return_lse=True, **options)
    return (jnp.swapaxes(out, 1, 2), jnp.moveaxis(lse, 1, 2)) if transposed else (out, lse)


def results(fn, name: str):
    """(out, lse, gradients) of a case; the gradients are of out and lse together."""
    case, (query, key, value, d_out) = CASES[name], inputs(name)
    captured = jnp.zeros(()) if case.captured is None else case.captured

    def run(query, key, value, captured):
        out, lse = fn(query, key, value, captured, case)
        return (out * d_out).sum() + jnp.where(jnp.isfinite(lse), lse, 0.0).sum(), (out, lse)

    gradients, (out, lse) = jax.grad(run, (0, 1, 2, 3), has_aux=True)(query, key, value, captured)
    return out, lse, *gradients


@functools.cache
def expected(name: str):
    with jax.enable_x64(True):
        case = CASES[name]

        def wide(query, key, value, captured, case):
            return dense(*(jnp.asarray(x, jnp.float64) for x in (query, key, value, captured)), case)

        del case
        return results(wide, name)


IMPLEMENTATIONS = ["xla", "interpret", *ON_GPU]


def given(name: str) -> list[str]:
    """Which of its fields a case has."""
    case = CASES[name]
    return [field for field, value in case._asdict().items() if value is not case._field_defaults[field]]


@pytest.mark.sweep(name=given)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_is_what_all_pairs_say(name, implementation):
    for got, want in zip(
        results(functools.partial(attend, implementation=implementation), name), expected(name), strict=True
    ):
        close(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["pallas", "triton"])
def test_gradients_have_the_same_bits_again(implementation):
    for name in ("alibi", "clipped table", "by document", "distance table", "key bias"):
        first, again = (
            results(functools.partial(attend, implementation=implementation), name) for _ in range(2)
        )
        for one, other in zip(first, again, strict=True):
            np.testing.assert_array_equal(one, other)


def _by_all(score, batch, head, key):
    return score + TABLE[head, key] * 0.5 + 0.02 * key * batch


WRONG = {
    "the mod left out": lambda s, b, h, q, k: s,
    "query and key transposed": lambda s, b, h, q, k: _by_all(s, b, h, q),
    "head 0 for all": lambda s, b, h, q, k: _by_all(s, b, 0, k),
    "the place in its group": lambda s, b, h, q, k: _by_all(s, b, h % 2, k),
    "the batch left out": lambda s, b, h, q, k: _by_all(s, 0, h, k),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.control
def test_what_is_wrong_is_seen(name):
    query, key, value, _ = inputs("causal")
    wrong, right = WRONG[name], lambda s, b, h, q, k: _by_all(s, b, h, k)
    want, _ = dense(query, key, value, None, Case(lambda *_: right))
    run = functools.partial(flash_attention, query, key, value, implementation="xla")
    close(run(score_mod=right), want)
    with pytest.raises(AssertionError):
        close(run(score_mod=wrong), want, 1e-2)


def _given(mask, length=LONG, **sizes) -> BlockMask:
    return block_mask(mask, q_len=length, kv_len=length, batch=BATCH, num_heads=HEADS, **sizes)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_a_block_mask_is_shared_by_layers(implementation):
    """Made once inside jit, used in each step of a scan; its blocks may be smaller than tiles would be."""
    query, key, value, _ = inputs("by head")

    @jax.jit
    def layers(query, ids):
        shared = _given(mods.and_masks(CASES["by head"].mask, mods.documents(ids)), block_q=32, block_kv=16)

        def layer(x, _):
            return flash_attention(x, key, value, block_mask=shared, implementation=implementation), None

        return jax.lax.scan(layer, query, None, length=2)[0]

    want, case = (
        query,
        CASES["by head"]._replace(mask=mods.and_masks(CASES["by head"].mask, mods.documents(IDS))),
    )
    for _ in range(2):
        want, _ = dense(want, key, value, None, case)
    close(layers(query, IDS), want)


@pytest.mark.parametrize("wrong", ["a block left out", "partial taken for full"])
def test_kernels_go_by_the_lists(wrong):
    query, key, value, _ = inputs("causal")
    causal = mods.or_masks(mods.causal(), lambda b, h, q, k: k < 1)  # no band, by its steps
    whole = _given(causal, block_q=32, block_kv=32)
    ends = np.array(whole.of_queries.ends)
    ends = ends - [0, 1] if wrong == "a block left out" else ends[..., [1, 1]]
    changed = BlockMask(**{**vars(whole), "of_queries": whole.of_queries._replace(ends=jnp.asarray(ends))})
    want, _ = dense(query, key, value, None, CASES["causal"])
    run = functools.partial(flash_attention, query, key, value, implementation="interpret")
    close(run(block_mask=whole), want)
    with pytest.raises(AssertionError):
        close(run(block_mask=changed), want, 1e-2)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_what_nobody_sees_may_be_nan(implementation):
    """In blocks that are empty, and beyond what a read may reach."""
    query, key, value, d_out = inputs("causal")
    mask = mods.and_masks(mods.sliding_window(50, 50), lambda b, h, q, k: k < 128)
    hidden = jnp.arange(LONG)[:, None, None] >= 128
    key, value = (jnp.where(hidden, jnp.nan, x) for x in (key, value))

    def run(key, value):
        return (
            flash_attention(query, key, value, mask_mod=mask, implementation=implementation) * d_out
        ).sum()

    loss, gradients = jax.value_and_grad(run, (0, 1))(key, value)
    assert np.isfinite(loss)
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        np.testing.assert_array_equal(gradient[:, 128:], 0)


def test_transformations():
    query, key, value, d_out = inputs("alibi")

    def loss(slopes, query):
        out = flash_attention(
            query,
            key,
            value,
            score_mod=mods.alibi(slopes),
            mask_mod=mods.prefix_lm(PREFIXES),
            implementation="xla",
        )
        return (out * d_out).sum()

    plain = jax.grad(loss)(SLOPES, query)
    close(jax.jit(jax.grad(jax.checkpoint(loss)))(SLOPES, query), plain)
    many = jax.vmap(jax.grad(loss))(jnp.stack([SLOPES, 2 * SLOPES]), jnp.stack([query, query]))
    close(many[0], plain)
    close(many[1], jax.grad(loss)(2 * SLOPES, query))


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_64_bit_types_change_nothing(implementation):
    query, key, value, d_out = inputs("by head")

    def loss(slopes):
        options = dict(score_mod=mods.alibi(slopes), mask_mod=CASES["by head"].mask)
        return (flash_attention(query, key, value, **options, implementation=implementation) * d_out).sum()

    want = jax.grad(loss)(SLOPES)
    with jax.enable_x64(True):
        got = jax.grad(loss)(SLOPES)
    assert got.dtype == jnp.float32
    close(got, want)


@pytest.mark.slow
def test_many_closures_compile_once():
    query, key, value, _ = inputs("alibi")
    compiled = []
    jax.clear_caches()  # another test may have compiled it
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    try:
        counts = []
        for i in range(50):
            slopes, prefixes = (jnp.asarray(np.asarray(x) + i) for x in (SLOPES, PREFIXES))
            flash_attention(
                query,
                key,
                value,
                score_mod=mods.alibi(slopes),
                mask_mod=mods.prefix_lm(prefixes),
                implementation="xla",
            )
            counts.append(compiled.count("/jax/core/compile/backend_compile_duration"))
    finally:
        jax.monitoring.clear_event_listeners()
    assert counts[0] > 0
    assert counts[-1] == counts[0]


@pytest.mark.parametrize("captures", [False, True])
def test_axes_may_be_explicit(captures):
    """What is captured may be sharded, and constants are worked out where no device is."""
    ids = jax.ShapeDtypeStruct((2, 256), jnp.int32)
    query = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    specs = [PartitionSpec("x", None, "y"), PartitionSpec("x")]

    def attend(query, ids):
        mask = mods.documents(ids) if captures else mods.sinks_and_window(4, 64)
        score = (lambda score, b, h, q, k: score * ids[b, k]) if captures else mods.soft_cap(3.0)
        return [flash_attention(query, query, query, mask_mod=mask, score_mod=score)]

    assert "pallas_attn_flash_attention" in lower_for_four(
        attend, [query, ids], specs, specs[:1], AxisType.Explicit
    )


def test_refusals():
    query, key, value, _ = inputs("causal")
    stale, transposed = _given(mods.causal(), 100), _given(CASES["by head"].mask)
    few = block_mask(mods.prefix_lm(PREFIXES), q_len=LONG, kv_len=LONG)
    table = jnp.zeros((3, 3))
    ids = jnp.zeros((BATCH, LONG), jnp.int32)
    calls = {
        "'block_mask': expected one of q_len 200 and kv_len 200, got of 100 and 100": dict(block_mask=stale),
        "'block_mask': expected one of 2 sequences": dict(block_mask=few),
        "'block_mask': expected None where there is a mask_mod": dict(
            block_mask=transposed, mask_mod=mods.causal()
        ),
        "'block_mask': expected neither causal": dict(block_mask=transposed, causal=True),
        "'mask_mod': expected None beside documents": dict(mask_mod=mods.causal(), segment_ids=ids),
        "'mask_mod': expected a function that returns a bool": dict(mask_mod=lambda b, h, q, k: q),
        "'score_mod': expected elementwise": dict(
            score_mod=lambda s, b, h, q, k: s + table.sum() * jax.lax.erf(s)
        ),
    }
    for words, options in calls.items():
        with pytest.raises((TypeError, ValueError), match=f"flash_attention: argument {words}"):
            flash_attention(query, key, value, **options)

    def loss(array):
        mod = lambda s, b, h, q, k: s + array[SHUFFLED[q], SHUFFLED[k]]  # noqa: E731
        return flash_attention(query, key, value, score_mod=mod, implementation="interpret").sum()

    with pytest.raises(
        NotImplementedError, match="'score_mod': expected captured arrays with gradients to be read by"
    ):
        jax.grad(loss)(table)
    assert np.isfinite(jax.grad(lambda x: loss(jax.lax.stop_gradient(x)))(table)).all()


def test_cuda_says_why_it_serves_none():
    query, key, value, _ = inputs("causal")
    rules = Rules("BTNH", 1.0, None, Band())
    sizes = Sizes(BATCH, KV_HEADS, HEADS // KV_HEADS, LONG, LONG)
    given = (
        (None, mods.dilated(2, 9), "asks no mask_mod, but takes a block_mask that is made with max_partial"),
        (mods.soft_cap(1.0), None, "is compiled before a score_mod is known"),
    )
    for score_mod, mask_mod, words in given:
        of_mods, *_ = of_call(ArgumentChecker("flash_attention"), sizes, score_mod, mask_mod, None, Band())
        operands = Operands(query=query, key=key, value=value, mods=of_mods, rules=rules)
        assert cuda.unsupported(operands) == words


def test_a_block_ends_with_its_tokens_whatever_the_tiles():
    """Tiles divide the length, blocks do not: the last block has tiles that hold no token."""
    length, tiles = 160, FlashAttentionTiles(32, 32)
    floats = [_normal(1, length, heads, DIM) for heads in (4, 2, 2)]
    mask = block_mask(lambda b, h, q, k: (q + k) % 3 < 2, q_len=length, kv_len=length)

    def gradients(implementation, config):
        def loss(*floats):
            attend = functools.partial(flash_attention, implementation=implementation, config=config)
            return jnp.sum(jnp.sin(attend(*floats, block_mask=mask)))

        return jax.jit(jax.grad(loss, (0, 1, 2)))(*floats)

    found = gradients("interpret", FlashAttentionConfig(tiles, tiles, tiles))
    for x, y in zip(found, gradients("xla", None), strict=True):
        close(x, y)
