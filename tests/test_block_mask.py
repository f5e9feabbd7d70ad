"""Which blocks of a mask are empty and full: against brute force, and never from anything of the mask's size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import mods
from pallas_attn.mods import bits, blocks, intervals, lists
from pallas_attn.mods.program import BATCH, HEAD, KEY, QUERY, Number
from pallas_attn.mods.trace import trace

LENGTH = 1024
_rng = np.random.default_rng(0)
SORTED = jnp.asarray(np.sort(_rng.integers(0, 8, LENGTH)), jnp.int32)
SHUFFLED = jnp.asarray(_rng.integers(0, 8, LENGTH), jnp.int32)
STARTS = jnp.searchsorted(SORTED, jnp.arange(8)).astype(jnp.int32)
MASKS = {
    "causal": mods.causal(),
    "window": mods.sliding_window(200, 30),
    "documents": mods.documents(SORTED),
    "shuffled documents": mods.documents(SHUFFLED),
    "causal in documents": mods.and_masks(mods.causal(), mods.documents(SORTED)),
    "near a document's start": lambda b, h, q, k: k - STARTS[SORTED[q]] < 100,
    "prefix": mods.prefix_lm(jnp.array([100, 700], jnp.int32)),
    "dilated": mods.dilated(3, 300),
    "neighborhood": mods.neighborhood(32, 32, 7),
    "sinks and window": mods.sinks_and_window(4, 256),
    "block diffusion": mods.block_diffusion(LENGTH // 2, 32),
    "by head": lambda b, h, q, k: (k <= q) & (q - k < 128 * (h + 1)),
    "nothing": mods.not_mask(mods.or_masks(mods.causal(), mods.not_mask(mods.causal()))),
    "everything": mods.and_masks(),
}


def dense(mask, batch, heads, q_len, kv_len):
    """[batch, heads, q_len, kv_len]"""
    query, key = jnp.arange(q_len)[:, None], jnp.arange(kv_len)[None]

    def one(b, h):
        return jnp.broadcast_to(mask(b, h, query, key), (q_len, kv_len))

    return np.asarray(jax.vmap(lambda b: jax.vmap(lambda h: one(b, h))(jnp.arange(heads)))(jnp.arange(batch)))


def kinds_of(seen, block_q, block_kv):
    """Of a dense mask. What is full but for tokens that do not exist is partial."""
    rows, columns = (
        -(-size // block) for size, block in zip(seen.shape[2:], (block_q, block_kv), strict=True)
    )
    room = [(0, 0), (0, 0), (0, rows * block_q - seen.shape[2]), (0, columns * block_kv - seen.shape[3])]
    tiles = np.pad(seen, room).reshape(*seen.shape[:2], rows, block_q, columns, block_kv)
    return np.where(tiles.all((3, 5)), blocks.FULL, np.where(tiles.any((3, 5)), blocks.PARTIAL, blocks.EMPTY))


@pytest.mark.parametrize("name", MASKS)
def test_kinds_of_blocks(name):
    length = LENGTH if name in ("neighborhood", "block diffusion") else 1000
    found = mods.block_mask(
        MASKS[name], q_len=length, kv_len=length, batch=2, num_heads=3, block_q=128, block_kv=64
    )
    batch, heads = found.shape[:2]
    assert (batch, heads) == (2 if name == "prefix" else 1, 3 if name == "by head" else 1)
    want = kinds_of(dense(MASKS[name], batch, heads, length, length), 128, 64)
    np.testing.assert_array_equal(found.kinds(), want)
    # What the kernels of keys go by says the same.
    ends, order = (np.asarray(x) for x in (found.of_keys.ends, found.of_keys.order))
    for place in np.ndindex(order.shape[:3]):
        full, partial = ends[place]
        of_key = want[place[0], place[1], :, place[2]]
        np.testing.assert_array_equal(of_key[order[place][:full]], blocks.FULL)
        np.testing.assert_array_equal(of_key[order[place][full:partial]], blocks.PARTIAL)
        np.testing.assert_array_equal(of_key[order[place][partial:]], blocks.EMPTY)


def _open(mask, batch=2, heads=3, q_len=LENGTH, kv_len=LENGTH, block_q=128, block_kv=64):
    """(surely full, surely empty) by intervals alone."""
    program, arrays = trace("f", "mask_mod", mask)
    rows, columns = np.arange(-(-q_len // block_q))[:, None], np.arange(-(-kv_len // block_kv))[None]
    known = {
        BATCH: intervals.exactly(jnp.arange(batch).reshape(-1, 1, 1, 1)),
        HEAD: intervals.exactly(jnp.arange(heads).reshape(-1, 1, 1)),
        QUERY: blocks._interval(rows.astype(np.int32), block_q, q_len),
        KEY: blocks._interval(columns.astype(np.int32), block_kv, kv_len),
    }
    (result,) = program.results
    found = (
        intervals.exactly(result.value)
        if isinstance(result, Number)
        else intervals.evaluate(program, arrays, known, {QUERY: block_q, KEY: block_kv})[result]
    )
    shape = (batch, heads, rows.size, columns.size)
    return np.broadcast_to(found.low, shape), ~np.broadcast_to(found.high, shape)


@pytest.mark.parametrize(
    "name", ["causal", "documents", "causal in documents", "dilated", "neighborhood", "prefix"]
)
def test_intervals_leave_open_what_is_partial_and_no_more(name):
    full, empty = _open(MASKS[name])
    want = kinds_of(dense(MASKS[name], 2, 3, LENGTH, LENGTH), 128, 64)
    np.testing.assert_array_equal(full, want == blocks.FULL)
    np.testing.assert_array_equal(empty, want == blocks.EMPTY)


def test_blocks_that_stay_open_count_as_partial_where_nobody_looks():
    sizes = dict(q_len=LENGTH, kv_len=LENGTH)
    looked_at, open_ones = (
        mods.block_mask(MASKS["nothing"], **sizes, exact=exact).kinds() for exact in (True, False)
    )
    assert (looked_at == blocks.EMPTY).all()
    assert (open_ones == np.where(np.eye(8), blocks.PARTIAL, blocks.EMPTY)).all()


@pytest.mark.parametrize("name", ["causal in documents", "sinks and window", "prefix", "dilated"])
def test_a_few_pairs_show_what_is_seen_in_part(monkeypatch, name):
    """No block of these is looked at pair by pair."""
    monkeypatch.setattr(blocks, "_looked_at", lambda *given: jnp.full_like(given[3], blocks.FULL))
    sizes = dict(batch=2, num_heads=3, block_kv=64)
    found = mods.block_mask(MASKS[name], q_len=LENGTH, kv_len=LENGTH, **sizes)
    want = kinds_of(dense(MASKS[name], *found.shape[:2], LENGTH, LENGTH), 128, 64)
    np.testing.assert_array_equal(found.kinds(), want)


def test_blocks_are_looked_at_some_at_a_time(monkeypatch):
    """Of kinds that pairs do not show, and of bits."""
    monkeypatch.setattr(bits, "TOGETHER", 3 * 128 * 64)
    ids = jnp.zeros(LENGTH, jnp.int32).at[jnp.array([3, 700])].set(1)
    mask = mods.and_masks(mods.sliding_window(300), mods.documents(ids))
    sizes = dict(q_len=LENGTH, kv_len=LENGTH - 50, block_kv=64, max_partial=60)
    found = mods.block_mask(mask, **sizes)
    np.testing.assert_array_equal(found.kinds(), kinds_of(dense(mask, 1, 1, LENGTH, LENGTH - 50), 128, 64))
    monkeypatch.undo()
    jax.clear_caches()
    at_once, number = mods.block_mask(mask, **sizes).bits.words, (found.kinds() == blocks.PARTIAL).sum()
    assert number == 37
    np.testing.assert_array_equal(found.bits.words[:number], at_once[:number])


@pytest.mark.parametrize("shape", [(2, 1, 3, 70), (1, 2, 33, 1), (1, 1, 32, 64), (1, 2, 33, 33)])
def test_lists_are_in_order_of_kinds_and_places(shape):
    """Runs of one kind are as long as they can be."""
    rng = np.random.default_rng(sum(shape))
    kinds = np.where(
        rng.integers(0, 3, shape) > 0, rng.integers(0, 3, (*shape[:-1], 1)), rng.integers(0, 3, shape)
    )
    both = jax.jit(lists.of_both_sides)(jnp.asarray(kinds, jnp.int8))
    for side, found in zip((kinds, np.swapaxes(kinds, 2, 3)), both, strict=True):
        np.testing.assert_array_equal(found.order, np.argsort(side, axis=-1, kind="stable"))
        np.testing.assert_array_equal(
            found.ends, np.stack([(side <= kind).sum(-1) for kind in range(2)], axis=-1)
        )
        for place in np.ndindex(*side.shape[:-1]):
            row, order = side[place], np.asarray(found.order[place])
            ends = [next((j for j in range(i, row.size) if row[j] != row[i]), row.size) for i in order]
            np.testing.assert_array_equal(found.runs[place], ends - order)


TOKENS = 64


def _drawn(rng):
    """A mask of a few operations, which may overflow, read outside and divide by anything."""
    ids = jnp.asarray(np.sort(rng.integers(0, 5, TOKENS)), jnp.int32)
    any_ids = jnp.asarray(rng.integers(0, 5, TOKENS), jnp.int32)
    lengths = jnp.asarray(rng.integers(0, TOKENS, 2), jnp.int32)
    numbers = jnp.asarray(rng.normal(size=TOKENS), jnp.float32)
    flags = jnp.asarray(rng.integers(0, 2, TOKENS) > 0)
    table = jnp.asarray(rng.integers(-9, 9, (3, 2 * TOKENS)), jnp.int32)

    def integer(depth):
        n = int(rng.integers(1, 20))
        if depth == 0:
            return [
                lambda *a: a[2],
                lambda *a: a[3],
                lambda *a: jnp.int32(3 * n - 20),
                lambda *a: a[1],
            ][rng.integers(0, 4)]
        x, y = integer(depth - 1), integer(depth - 1)
        return [
            lambda *a: x(*a) + y(*a),
            lambda *a: x(*a) - y(*a),
            lambda *a: x(*a) * y(*a),
            lambda *a: jnp.minimum(x(*a), y(*a)),
            lambda *a: jnp.where(x(*a) > n, y(*a), a[3]),
            lambda *a: x(*a) // n,
            lambda *a: x(*a) % n,
            lambda *a: jax.lax.rem(x(*a), jnp.int32(n)),
            lambda *a: x(*a) // y(*a),
            lambda *a: ids[x(*a)],
            lambda *a: any_ids[x(*a)],
            lambda *a: lengths[a[0]] + x(*a),
            lambda *a: jnp.abs(x(*a)),
            lambda *a: table[a[1], x(*a) + TOKENS],
            lambda *a: x(*a) & (2 ** (n % 6) - 1),
            lambda *a: (x(*a) * 1.37).astype(jnp.int32),
            lambda *a: (x(*a) >> (n % 4)) << (n % 3),
            lambda *a: x(*a) * 2**26 * n,
            lambda *a: x(*a).astype(jnp.int8).astype(jnp.int32),
        ][rng.integers(0, 19)]

    def boolean(depth):
        if depth == 0 or rng.integers(0, 2):
            x, y, n = integer(rng.integers(0, 3)), integer(rng.integers(0, 3)), int(rng.integers(1, 20))
            compare = [jnp.less, jnp.less_equal, jnp.greater, jnp.equal, jnp.not_equal][rng.integers(0, 5)]
            return [
                lambda *a: compare(x(*a), y(*a)),
                lambda *a: compare(x(*a), y(*a)),
                lambda *a: flags[x(*a)],
                lambda *a: jnp.sin(numbers[x(*a)]) * numbers[y(*a)] > 0.1 * n - 1,
                lambda *a: jnp.sqrt(numbers[x(*a)]) < n / 20,
            ][rng.integers(0, 5)]
        x, y = boolean(depth - 1), boolean(depth - 1)
        return [
            lambda *a: x(*a) & y(*a),
            lambda *a: x(*a) | y(*a),
            lambda *a: ~x(*a),
            lambda *a: x(*a) ^ y(*a),
        ][rng.integers(0, 4)]

    return boolean(2)


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.sweep(seed=lambda seed: [seed % 2])
def test_intervals_of_drawn_masks_are_never_wrong(seed):
    mask = _drawn(np.random.default_rng(seed))
    sizes = dict(batch=2, heads=3, q_len=TOKENS, kv_len=TOKENS)
    want = kinds_of(dense(mask, *sizes.values()), 16, 8)
    full, empty = _open(mask, **sizes, block_q=16, block_kv=8)
    assert not (full & (want != blocks.FULL)).any()
    assert not (empty & (want != blocks.EMPTY)).any()


def test_makes_nothing_of_the_masks_size():
    length = 2**17
    made = jax.make_jaxpr(lambda ids: mods.block_mask(mods.documents(ids), q_len=length, kv_len=length))(
        jnp.zeros(length, jnp.int32)
    )

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (var.aval.size for var in equation.outvars)
            for inner in jax.tree.leaves(
                tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from sizes(inner)

    assert max(sizes(made.jaxpr)) <= 64 * (length // 128) ** 2


def test_many_closures_compile_once():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    try:
        counts = []
        for i in range(50):
            ids = jnp.asarray(np.arange(256) // (i + 1), jnp.int32)
            mods.block_mask(mods.documents(ids), q_len=256, kv_len=256)
            counts.append(compiled.count("/jax/core/compile/backend_compile_duration"))
    finally:
        jax.monitoring.clear_event_listeners()
    assert counts[0] > 0
    assert counts[-1] == counts[0]


@pytest.mark.usefixtures("as_users_have_it")
def test_refuses_sizes_in_words():
    for sizes, words in (
        (dict(q_len=0, kv_len=8), "'q_len': expected at least 1, got 0"),
        (dict(q_len=8, kv_len=8.0), "'kv_len': expected an int"),
        (dict(q_len=8, kv_len=8, block_q=48), "'block_q': expected a power of two from 16 to 1024, got 48"),
        (dict(q_len=8, kv_len=8, block_kv=8), "'block_kv': expected at least 16, got 8"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"block_mask: argument {words}"):
            mods.block_mask(mods.causal(), **sizes)


@pytest.mark.parametrize("name", ["causal in documents", "by head", "everything"])
def test_bits_say_which_pairs_meet(name):
    """By where a warpgroup's threads hold them; of partial blocks alone, as the lists have them."""
    found = mods.block_mask(
        MASKS[name], q_len=300, kv_len=200, num_heads=2, block_q=128, block_kv=64, max_partial=20
    )
    heads = found.shape[1]
    seen = np.zeros((heads, 384, 256), bool)
    seen[:, :300, :200] = dense(MASKS[name], 1, heads, 300, 200)[0]
    ends, order, first = (np.asarray(x)[0] for x in (*found.of_queries[::-2], found.bits.first))
    words = np.asarray(found.bits.words).view(np.uint32)
    thread, bit = np.arange(128)[:, None], np.arange(32)
    at_query = thread // 32 * 16 + bit // 2 % 2 * 8 + thread % 32 // 4
    at_key = bit // 4 * 8 + thread % 4 * 2 + bit % 2
    looked_at = 0
    for head, row in np.ndindex(*first.shape):
        full, partial = ends[head, row]
        for i, block in enumerate(order[head, row, full:partial]):
            for half in range(2):
                query, key = row * 128 + half * 64 + at_query, block * 64 + at_key
                got = words[first[head, row] + i, half, 0][:, None] >> bit & 1
                np.testing.assert_array_equal(got, seen[head, query, key])
                looked_at += 1
    assert looked_at > 4
    assert found.bits.words.shape[0] == min(20, found.of_queries.order.size)


def test_more_partial_blocks_than_are_to_be_kept():
    sizes = dict(q_len=400, kv_len=400, max_partial=2)
    with pytest.raises(
        ValueError, match="'max_partial': expected at least 7, the blocks that are seen in part, got 2"
    ):
        mods.block_mask(mods.causal(), **sizes)
    with pytest.raises(
        ValueError, match="'max_partial': expected None where blocks are smaller than 128 queries"
    ):
        mods.block_mask(mods.causal(), **sizes, block_q=64)
    kept = jax.jit(lambda ids: mods.block_mask(mods.documents(ids), **sizes).bits)(jnp.zeros(400, jnp.int32))
    assert kept.words.shape == (2, 2, 2, 128)
    np.testing.assert_array_equal(kept.first, [[[0, 1, 2, 3]]])
