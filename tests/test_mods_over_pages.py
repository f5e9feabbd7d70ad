"""Score and mask functions of the caller's own in the ops over pages: `ragged_paged_attention`, `paged_attention` and
`mla_decode`."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references.mods_numpy import Rules, attention
from support import ON_GPU, close

import pallas_attn
from pallas_attn import mods
from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._tile import walk
from pallas_attn._tile.masking import Rules as WalkRules
from pallas_attn._tile.quantization import quantize
from pallas_attn.mods.call import PagedSizes, over_pages
from pallas_attn.mods.operands import refused_by_cuda
from pallas_attn.mods.seen import Left, of_sequences
from pallas_attn.ops.ragged_attention.config import RaggedTiles

SEQS, PAGE, COLUMNS, PAGES = 5, 8, 32, 80
ROOM = PAGE * COLUMNS
LENGTHS = np.array([1, 127, 200, 0, 129])
DECODED, RAGGED = np.full(SEQS, 3), np.array([1, 1, 40, 0, 17])
HEADS, BAD_ID = 4, 2147480000
_rng = np.random.default_rng(0)


def _normal(*shape: int) -> jax.Array:
    return jnp.asarray(_rng.normal(size=shape), jnp.float32)


SLOPES = jnp.array([0.1, 0.2, 0.3, 0.4])
BY_KEY, TABLE = _normal(SEQS, ROOM), _normal(HEADS, ROOM)
IDS = jnp.asarray(np.sort(_rng.integers(0, 4, ROOM)), jnp.int32)
SHUFFLED = jnp.asarray(_rng.integers(0, 3, ROOM), jnp.int32)
STARTS = jnp.searchsorted(IDS, jnp.arange(4)).astype(jnp.int32)
PREFIXES = jnp.array([1, 30, 150, 0, 60], jnp.int32)
SHORT = BY_KEY[0, :41]  # shorter than the text: reads stay inside

SCORES: dict[str, Any] = {
    "nothing": lambda s, b, h, q, k: s,
    "temperature": mods.gate(1 + SLOPES),
    "alibi": mods.alibi(SLOPES),
    "soft cap": mods.soft_cap(2.0),
    "distance table": mods.distance_table(TABLE, -20),
    "t5": mods.distance_table(mods.t5_table(TABLE[:, :8].T, ROOM, ROOM, bidirectional=False), first=1 - ROOM),
    "key bias": lambda s, b, h, q, k: s + BY_KEY[b, k],
    "query bias": lambda s, b, h, q, k: s * (1 + TABLE[h, q] * 0.3) + SHORT[k],
    "minus infinity": lambda s, b, h, q, k: jnp.where(SHUFFLED[k] > 1, s, -jnp.inf),
    "squares": lambda s, b, h, q, k: 0.3 * s * s + jnp.sin(s),
}
MASKS: dict[str, Any] = {
    "causal": mods.causal(),
    "sinks and window": mods.sinks_and_window(4, 50),
    "documents": mods.documents(IDS),
    "shuffled": mods.documents(SHUFFLED),
    "in document": lambda b, h, q, k: (q - STARTS[IDS[q]] < 40) & (IDS[q] == IDS[k]),
    "prefix": mods.prefix_lm(PREFIXES),
    "dilated": mods.dilated(3, 90),
    "neighbourhood": mods.neighborhood(16, 16, 5),
    "block diffusion": mods.block_diffusion(ROOM // 2, 16),
    "global tokens": lambda b, h, q, k: (IDS[q] == 0) | (k < 4) | (q - k < 9),
    "by head": lambda b, h, q, k: q - k < 40 * (h + 1),
    "nothing": lambda b, h, q, k: (b > 1) & (k >= 0),
}


class Case(NamedTuple):
    op: str
    score: Any = None
    mask: Any = None
    options: dict[str, Any] = {}  # noqa: RUF012


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ragged": [
        dict(sinks=True, softcap=3.0, stored=jnp.int8),
        dict(causal=False, alibi_slopes=True),
        dict(sliding_window=70),
    ],
    "paged": [
        dict(sinks=True, sliding_window=70),
        dict(stored=jnp.int8, layout="HND", alibi_slopes=True),
        dict(softcap=3.0, one_query=True, block_q=8),  # products are transposed
    ],
    "mla": [dict(causal=True), {}, dict(causal=True, one_query=True)],
}


def _composed() -> dict[str, Case]:
    """Drawn once, by a seed: each score and each mask is in one at least."""
    rng = np.random.default_rng(7)
    scores, masks = (list(rng.permutation(list(names))) for names in (SCORES, MASKS))
    found = {}
    for i in range(10):
        op, score = list(OPTIONS)[i % 3], scores[i]
        first, second = masks[i], masks[(i + 10) % len(masks)]
        join = rng.choice(["and", "or"])
        mask = dict(**{"and": mods.and_masks, "or": mods.or_masks})[join](MASKS[first], MASKS[second])
        options = OPTIONS[op][i // 3 % 3]
        found[f"{op}, {score}, {first} {join} {second}"] = Case(op, SCORES[score], mask, options)
    return found


COMPOSED = _composed()


class Inputs(NamedTuple):
    """Numpy's: pools [pages, slots, heads, dim] whose slots hold NaN where no sequence owns them."""

    queries: list[np.ndarray]
    keys: list[np.ndarray]
    values: list[np.ndarray]
    pools: tuple[np.ndarray, ...]
    tables: np.ndarray
    q_lens: np.ndarray


def _drawn(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """float32, of numbers that fp16 has, too."""
    return rng.normal(size=shape).astype(np.float16).astype(np.float32)


@functools.cache
def inputs(op: str, one_query: bool = False) -> Inputs:
    rng = np.random.default_rng(1)
    heads, dim = (1, 576) if op == "mla" else (2, 16)
    q_lens = RAGGED if op == "ragged" else DECODED if not one_query else np.ones(SEQS, int)
    tables = np.full((SEQS, COLUMNS), BAD_ID, np.int32)
    pools = [np.full((PAGES, PAGE, heads, dim), np.nan, np.float32) for _ in range(1 if op == "mla" else 2)]
    free, held = iter(rng.permutation(PAGES)), []
    for seq, length in enumerate(LENGTHS):
        own = [_drawn(rng, length, heads, dim) for _ in pools]
        used = -(-length // PAGE)
        tables[seq, :used] = [next(free) for _ in range(used)]
        at = np.arange(length)
        for pool, tokens in zip(pools, own, strict=True):
            pool[tables[seq, at // PAGE], at % PAGE] = tokens
        held.append(own)
    queries = [_drawn(rng, n, HEADS, dim) for n in q_lens]
    keys, values = [own[0] for own in held], [own[-1][..., :512] for own in held]
    return Inputs(queries, keys, values, tuple(pools), tables, q_lens)


RAGGED_CONFIG = pallas_attn.RaggedAttentionConfig(
    long=RaggedTiles(block_q=32, block_kv=16, num_splits=2, min_split_tokens=16, target_programs=40),
    short=RaggedTiles(block_q=16, block_kv=16, num_splits=0, min_split_tokens=16, target_programs=40),
)
SIZES = dict(block_q=16, block_kv=16, num_splits=4, min_split_tokens=16, target_programs=64)
CONFIGS = {
    "ragged": RAGGED_CONFIG,
    "paged": pallas_attn.PagedAttentionConfig(**SIZES),
    "mla": pallas_attn.MLADecodeConfig(**SIZES, num_warps=4),
}
SCALE = jnp.float32(1 / 32)


def _is_rounded(op: str, implementation: str) -> bool:
    """The kernel for latents has none in float32, but where it is interpreted."""
    return op == "mla" and implementation in ("pallas", "triton")


def limit(op: str, implementation: str) -> float:
    return 5e-3 if _is_rounded(op, implementation) else 1e-4 if op == "mla" else 3e-5


def attend(case: Case, given: Inputs, implementation: str, **changed: Any) -> list[tuple[Any, Any]]:
    """(out, lse) of each sequence."""
    options = {"score_mod": case.score, "mask_mod": case.mask, **case.options, **changed}
    options.pop("one_query", None)
    block_q = options.pop("block_q", 16)
    for name in ("sinks", "alibi_slopes"):
        if name in options:
            options[name] = SLOPES
    dtype = jnp.float16 if _is_rounded(case.op, implementation) else jnp.float32
    pools = [jnp.asarray(pool, dtype) for pool in given.pools]
    if (stored := options.pop("stored", None)) is not None:
        pools = [quantize(jnp.where(jnp.isnan(pool), 2.0, pool), stored, SCALE) for pool in pools]
        options |= dict(k_scale=SCALE, v_scale=SCALE)
    if options.get("layout") == "HND":
        pools = [jnp.swapaxes(pool, 1, 2) for pool in pools]
    options |= dict(return_lse=True, implementation=implementation, scale=0.3 if case.op != "mla" else 0.05)
    if implementation != "xla":
        options["config"] = CONFIGS[case.op]
        if block_q != 16:
            options["config"] = pallas_attn.PagedAttentionConfig(**SIZES | {"block_q": block_q})
    lengths, tables = jnp.asarray(LENGTHS, jnp.int32), jnp.asarray(given.tables)
    if case.op == "ragged":
        bounds = np.concatenate([[0], np.cumsum(given.q_lens)])
        query = np.concatenate([*given.queries, np.full((2, HEADS, 16), np.nan, np.float32)])
        ends = jnp.asarray(bounds, jnp.int32)
        found = pallas_attn.ragged_paged_attention(
            jnp.asarray(query), *pools, tables, lengths, ends, **options
        )
        return [tuple(x[a:b] for x in found) for a, b in itertools.pairwise(bounds)]
    fn: Callable[..., Any] = pallas_attn.mla_decode if case.op == "mla" else pallas_attn.paged_attention
    out, lse = fn(jnp.asarray(np.stack(given.queries), dtype), *pools, tables, lengths, **options)
    return list(zip(out, lse, strict=True))


def expected(case: Case, given: Inputs) -> list[tuple[np.ndarray, np.ndarray]]:
    options, keys, values = dict(case.options), given.keys, given.values
    if "stored" in options:
        keys, values = (
            [np.asarray(quantize(jnp.asarray(x), jnp.int8, SCALE), np.float64) * float(SCALE) for x in side]
            for side in (keys, values)
        )
    arrays = {name: np.asarray(SLOPES) for name in ("sinks", "alibi_slopes") if name in options}
    rest = {name: options[name] for name in ("softcap", "sliding_window") if name in options}
    causal = options.get("causal", case.op != "mla")
    rules = Rules(0.3 if case.op != "mla" else 0.05, case.score, case.mask, causal=causal, **arrays, **rest)
    return attention(given.queries, keys, values, rules)


def all_close(got: Any, want: Any, limit: float = 3e-5) -> None:
    for one, other in zip(got, want, strict=True):
        for x, y in zip(one, other, strict=True):
            close(x, y, limit)


IMPLEMENTATIONS = ["xla", "interpret", *ON_GPU]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", COMPOSED)
@pytest.mark.sweep(name=lambda name: [COMPOSED[name].op])
def test_is_what_all_pairs_say(name, implementation):
    case = COMPOSED[name]
    given = inputs(case.op, case.options.get("one_query", False))
    all_close(attend(case, given, implementation), expected(case, given), limit(case.op, implementation))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", ["ragged", "paged", "mla"])
@pytest.mark.parametrize("sinks", [0, 8])
def test_pages_that_a_mask_empties_are_anyones(op, implementation, sinks):
    """Neither what they hold nor which they are is looked at: only what blocks of 16 that a window leaves is, and sinks
    before it."""
    mask = mods.sinks_and_window(sinks, 20)
    case = Case(op, mods.gate(1 + SLOPES), mask, dict(causal=True) if op == "mla" else {})
    given = inputs(op)
    tables, pools = given.tables.copy(), tuple(pool.copy() for pool in given.pools)
    for seq, (length, q_len) in enumerate(zip(LENGTHS, given.q_lens, strict=True)):
        unseen = max(length - q_len - 20, 0) // 16 * 16 // PAGE
        gap = np.s_[-(-sinks // 16) * 16 // PAGE : unseen]
        for pool in pools:
            pool[tables[seq, gap]] = np.nan
        tables[seq, gap] = BAD_ID
    assert (tables != given.tables).sum() > 10
    found = attend(case, given._replace(tables=tables, pools=pools), implementation)
    all_close(found, expected(case, given), limit(op, implementation))


def _by_all(score, batch, head, query, key):
    return score + TABLE[head, key] * 0.5 + 0.02 * key * batch + BY_KEY[0, query] * score


RIGHT = Case("paged", _by_all, lambda b, h, q, k: q - k < 60)
WRONG = {
    "the score_mod left out": RIGHT._replace(score=None),
    "the mask_mod left out": RIGHT._replace(mask=None),
    "a key too many": RIGHT._replace(mask=lambda b, h, q, k: q - k < 61),
    "query and key in each other's place": RIGHT._replace(score=lambda s, b, h, q, k: _by_all(s, b, h, k, q)),
    "head 0 for all": RIGHT._replace(score=lambda s, b, h, q, k: _by_all(s, b, 0, q, k)),
    "the place in its group": RIGHT._replace(score=lambda s, b, h, q, k: _by_all(s, b, h % 2, q, k)),
    "the batch left out": RIGHT._replace(score=lambda s, b, h, q, k: _by_all(s, 0, h, q, k)),
    "queries counted from 0": RIGHT._replace(
        score=lambda s, b, h, q, k: _by_all(s, b, h, q - jnp.asarray(LENGTHS)[b] + 3, k)
    ),
}


@pytest.mark.once
@pytest.mark.control
def test_what_is_wrong_is_seen():
    """What a kernel that got it wrong would give is none of what all pairs say."""
    given = inputs("paged")
    found = attend(RIGHT, given, "xla")
    all_close(found, expected(RIGHT, given))
    for wrong in WRONG.values():
        other = expected(wrong, given)
        with pytest.raises(AssertionError):
            all_close(found, other, 1e-2)


def _mods(mask: Any, num_seqs: int, max_len: int, score: Any = None) -> Any:
    sizes = PagedSizes(num_seqs, HEADS, max_len // 16, 16)
    return over_pages(ArgumentChecker("f"), sizes, score, mask, shared_seqs=True)[0]


@pytest.mark.slow
@pytest.mark.once
def test_what_is_left_holds_all_that_is_seen():
    find = jax.jit(of_sequences, static_argnums=(2, 3))
    lengths, q_len = jnp.asarray(LENGTHS, jnp.int32), 3
    at = list(np.ix_(range(SEQS), range(HEADS), range(q_len), range(ROOM)))
    at[2] = LENGTHS[:, None, None, None] - q_len + at[2]
    real = (at[2] >= 0) & (at[3] < LENGTHS[:, None, None, None])
    widest = {"nobody's": 0, "the next": 32}
    own = {"nobody's": lambda b, h, q, k: k < 0 * q, "the next": lambda b, h, q, k: (k > q) & (k <= q + 2)}
    for name, mask in (MASKS | own).items():
        left = find(_mods(mask, SEQS, ROOM), lengths, q_len, ROOM)
        seen = (np.asarray(mask(*map(jnp.asarray, at))) & real).any((1, 2))
        inside = walk.Seen(*(x[:, None] for x in left)).among(jnp.asarray(at[3][0, 0]))
        assert not (seen & ~inside).any(), name
        assert (left.end - left.first).max() <= widest.get(name, ROOM)


def test_a_window_is_walked_as_a_window():
    """64 sequences of 32k: as many tiles as `sliding_window` has, or one more at each end, of bounds by blocks."""
    lengths = jnp.asarray(np.random.default_rng(0).integers(1, 32769, 64), jnp.int32)
    find = jax.jit(of_sequences, static_argnums=(2, 3))
    left = find(_mods(mods.sliding_window(1023), 64, 32768), lengths, 1, 32768)
    plan = functools.partial(walk.plan, q_len=1, block_kv=64, distinct=1, first_offset=0)
    own, windows = Left.of(left, 64).tiles, plan(lengths, rules=WalkRules(1024)).num_tiles
    assert int(jnp.max(own - windows)) <= 1
    assert int(jnp.max(own)) <= 18
    np.testing.assert_array_equal(own, plan(lengths, rules=WalkRules(), left=left).num_tiles)
    with_sinks = find(_mods(mods.sinks_and_window(4, 1023), 64, 32768), lengths, 1, 32768)
    assert int(jnp.max(Left.of(with_sinks, 64).tiles - own)) <= 1


@pytest.mark.parametrize("op", ["ragged", "paged", "mla"])
def test_64_bit_types_change_nothing(op):
    case = Case(op, mods.alibi(SLOPES), mods.sinks_and_window(8, 20), {})
    given = inputs(op)
    want = attend(case, given, "xla")
    with jax.enable_x64(True):
        all_close(attend(case, given, "xla"), want)


@pytest.mark.slow
@pytest.mark.once
def test_transformations_and_gradients():
    """Of "xla", which has gradients: those of what a score_mod captures too."""
    given = inputs("paged")
    query, weights = jnp.asarray(np.stack(given.queries)), _normal(SEQS, 3, HEADS, 16)
    pools = [jnp.asarray(np.nan_to_num(pool)) for pool in given.pools]
    tables, lengths = jnp.asarray(given.tables), jnp.asarray(LENGTHS, jnp.int32)

    def loss(slopes, query, prefixes=PREFIXES):
        mask = mods.and_masks(mods.prefix_lm(prefixes), mods.sliding_window(60))
        out = pallas_attn.paged_attention(
            query, *pools, tables, lengths, score_mod=mods.alibi(slopes), mask_mod=mask, implementation="xla"
        )
        return (out * weights).sum()

    def dense(slopes, query):
        total, one = 0.0, zip(query, given.keys, given.values, strict=True)
        for seq, (q, key, value) in enumerate(one):
            if (length := len(key)) == 0:
                continue
            at = jnp.arange(length - 3, length)[None, :, None], jnp.arange(length)[None, None, :]
            key, value = (jnp.repeat(jnp.asarray(x), 2, axis=1) for x in (key, value))
            score = jnp.einsum("qhd,khd->hqk", q, key, precision="highest") / 4
            score = score - slopes[:, None, None] * jnp.abs(at[0] - at[1])
            seen = (at[0] - at[1] <= 60) & (at[1] <= at[0]) & (at[0] >= 0)
            some = seen.any(-1, keepdims=True)
            score = jnp.where(seen | ~some, score, -jnp.inf)
            shares = jnp.where(some, jax.nn.softmax(score, -1), 0.0)
            out = jnp.einsum("hqk,khd->qhd", shares, value, precision="highest")
            total += (out * weights[seq]).sum()
        return total

    plain = jax.jit(jax.grad(loss, (0, 1)))(SLOPES, query)
    for got, want in zip(plain, jax.grad(dense, (0, 1))(SLOPES, query), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-4)
    again = jax.jit(jax.grad(jax.checkpoint(loss), (0, 1)))(SLOPES, query)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), again, plain)
    slopes, prefixes = jnp.stack([SLOPES, 2 * SLOPES]), jnp.stack([PREFIXES, PREFIXES // 2])
    wanted = jnp.stack([loss(s, query, p) for s, p in zip(slopes, prefixes, strict=True)])
    mapped = jax.vmap(lambda s, p: loss(s, query, p))(slopes, prefixes)
    np.testing.assert_allclose(mapped, wanted, rtol=1e-4)
    _, scanned = jax.lax.scan(lambda c, one: (c, loss(one[0], query, one[1])), 0, (slopes, prefixes))
    np.testing.assert_allclose(scanned, wanted, rtol=1e-4)


@pytest.mark.once
def test_many_closures_compile_once():
    given, compiled, counts = inputs("paged"), [], []
    jax.clear_caches()  # another test may have compiled it
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    try:
        for i in range(50):
            slopes, prefixes = (jnp.asarray(np.asarray(x) + i) for x in (SLOPES, PREFIXES))
            attend(Case("paged", mods.alibi(slopes), mods.prefix_lm(prefixes)), given, "xla")
            counts.append(compiled.count("/jax/core/compile/backend_compile_duration"))
    finally:
        jax.monitoring.clear_event_listeners()
    assert counts[0] > 0
    assert counts[-1] == counts[0]


def test_refusals():
    table = jnp.zeros((3, 3))
    schedule = pallas_attn.mla_schedule(jnp.asarray(LENGTHS, jnp.int32), num_heads=HEADS, num_parts=4)
    tree = dict(tree_mask=jnp.ones((SEQS, 3, 3), bool), query_positions=jnp.zeros((SEQS, 3), jnp.int32))
    calls = {
        "ragged_paged_attention: argument 'mask_mod': expected a function that returns a bool": (
            "ragged",
            dict(mask_mod=lambda b, h, q, k: q),
        ),
        "paged_attention: argument 'score_mod': expected elementwise": (
            "paged",
            dict(score_mod=lambda s, b, h, q, k: s + table[h].sum()),
        ),
        "paged_attention: argument 'query_positions': expected None beside a score_mod": (
            "paged",
            dict(score_mod=mods.soft_cap(1.0), **tree),
        ),
        "mla_decode: argument 'schedule': expected None beside a mask_mod": (
            "mla",
            dict(mask_mod=mods.causal(), schedule=schedule),
        ),
        "mla_decode: argument 'mask_mod': expected a function of": ("mla", dict(mask_mod=lambda q, k: q > k)),
    }
    for words, (op, options) in calls.items():
        with pytest.raises((TypeError, ValueError), match=words):
            attend(Case(op), inputs(op), "xla", **options)

    def loss(slopes):
        case = Case("paged", mods.alibi(slopes))
        return attend(case, inputs("paged"), "interpret")[1][0].sum()

    with pytest.raises(NotImplementedError, match=r"paged_attention: .*'xla'"):
        jax.grad(loss)(SLOPES)
    given = {
        "has no mask_mod": _mods(mods.causal(), 2, 64),
        "is compiled before a score_mod is known": _mods(None, 2, 64, mods.soft_cap(1.0)),
    }
    assert {words: refused_by_cuda(one) for words, one in given.items()} == {words: words for words in given}
    assert refused_by_cuda(None) is None
