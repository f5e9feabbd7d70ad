"""The CUDA MLA decode kernel on a GPU, against a float32 reference over the same pages."""

import functools
import itertools
import random
import threading
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compute_on import compute_on
from references.mla_schedule_model import plain_schedule

from pallas_attn._call import ffi
from pallas_attn._call.device import current_device
from pallas_attn.ops.mla_decode.cuda import mla_decode_cuda
from pallas_attn.ops.mla_decode.schedule import num_sm_parts

pytestmark = pytest.mark.gpu

PAGE, DIM, LATENT = 64, 576, 512
SCALE = DIM**-0.5
# Twice what rounding the probabilities and the output gives (2.6e-3 in bfloat16).
TOLERANCE = {jnp.bfloat16: 8e-3, jnp.float16: 1e-3}
GARBAGE = 2147480000


@pytest.fixture(autouse=True)
def _needs_library() -> None:
    available, reason = ffi.is_available()
    if not available:
        pytest.skip(reason)


def schedule(lengths: list[int], parts: int, overhead: int = 5) -> tuple[np.ndarray, np.ndarray]:
    metadata, num_splits, _ = plain_schedule(lengths, parts, overhead)
    return np.array(metadata, np.int32), np.array(num_splits, np.int32)


@dataclass
class Inputs:
    lengths: list[int]
    query: jax.Array
    cache: jax.Array
    tables: np.ndarray

    @functools.cached_property
    def parts(self) -> int:
        num_kv_heads = self.cache.shape[2]
        rows = self.query.shape[1] * self.query.shape[2] // num_kv_heads
        return num_sm_parts(rows, num_kv_heads, current_device().num_cores)


def make_inputs(
    lengths: list[int], h_q: int, q_len: int = 1, dtype=jnp.bfloat16, seed: int = 0, h_kv: int = 1
) -> Inputs:
    """Shuffled pages; NaN in every slot no request owns, garbage in every table entry none uses."""
    rng = np.random.default_rng(seed)
    pages = [-(-n // PAGE) for n in lengths]
    num_pages = sum(pages) + 3
    tables = np.full((len(lengths), max(*pages, 1) + 2), GARBAGE, np.int32)
    order = rng.permutation(num_pages)
    owned = np.zeros((num_pages, PAGE), bool)
    used = 0
    for i, n in enumerate(lengths):
        mine = order[used : used + pages[i]]
        used += pages[i]
        tables[i, : pages[i]] = mine
        for j, page in enumerate(mine):
            owned[page, : n - j * PAGE] = True
    keys = jax.random.split(jax.random.key(seed), 2)
    cache = jax.random.normal(keys[0], (num_pages, PAGE, h_kv, DIM), dtype)
    cache = jnp.where(jnp.asarray(owned)[:, :, None, None], cache, jnp.nan).astype(dtype)
    query = jax.random.normal(keys[1], (len(lengths), q_len, h_q, DIM), dtype)
    return Inputs(lengths, query, cache, tables)


@functools.cache
def _compiled(causal: bool, cooperative: bool):
    return jax.jit(functools.partial(mla_decode_cuda, scale=SCALE, causal=causal, cooperative=cooperative))


def run(inputs: Inputs, causal: bool, tables=None, seq_lens=None, overhead=5, parts=None, cooperative=True):
    metadata, splits = schedule(inputs.lengths, parts or inputs.parts, overhead)
    tables = jnp.asarray(inputs.tables if tables is None else tables)
    seq_lens = jnp.asarray(inputs.lengths if seq_lens is None else seq_lens, jnp.int32)
    metadata, splits = jnp.asarray(metadata), jnp.asarray(splits)
    return _compiled(causal, cooperative)(inputs.query, inputs.cache, tables, seq_lens, metadata, splits)


def reference(inputs: Inputs, causal: bool):
    """float32, one request after the other on the host: nothing to compile, and other arithmetic."""
    query, cache = np.asarray(inputs.query.astype(jnp.float32)), np.asarray(inputs.cache)
    batch, q_len, h_q, _ = query.shape
    h_kv = cache.shape[2]
    out = np.zeros((batch, q_len, h_q, LATENT), np.float32)
    lse = np.full((batch, q_len, h_q), -np.inf, np.float32)
    for i, n in enumerate(inputs.lengths):
        keys = cache[inputs.tables[i, : -(-n // PAGE)]].reshape(-1, h_kv, DIM)[:n].astype(np.float32)
        for j, kv_head in itertools.product(range(q_len), range(h_kv)):
            visible = max(n - q_len + 1 + j, 0) if causal else n
            if visible == 0:
                continue
            heads, seen = slice(kv_head * h_q // h_kv, (kv_head + 1) * h_q // h_kv), keys[:visible, kv_head]
            scores = query[i, j, heads] @ seen.T * np.float32(SCALE)
            top = scores.max(-1, keepdims=True)
            weights = np.exp(scores - top)
            total = weights.sum(-1, keepdims=True)
            out[i, j, heads] = weights / total @ seen[:, :LATENT]
            lse[i, j, heads] = (top + np.log(total))[:, 0]
    return out, lse


def check(inputs: Inputs, causal: bool, out, lse, skip: tuple[int, ...] = ()) -> None:
    want, want_lse = reference(inputs, causal)
    got, got_lse = np.asarray(out.astype(jnp.float32)), np.asarray(lse)
    for i in skip:
        assert np.isnan(got[i]).all()
        assert np.isnan(got_lse[i]).all()
    keep = np.array([i for i in range(len(inputs.lengths)) if i not in skip])
    got, want, got_lse, want_lse = got[keep], want[keep], got_lse[keep], want_lse[keep]
    assert np.isfinite(got).all()
    size = np.linalg.norm(want, axis=-1)
    assert (got[size == 0] == 0).all()
    error = np.linalg.norm(got - want, axis=-1)[size > 0] / size[size > 0]
    assert error.max(initial=0) < TOLERANCE[inputs.query.dtype.type]
    # In float64: a float32 sum over a million products is itself off by as much as is asked for here.
    got, want = got.astype(np.float64), want.astype(np.float64)
    product, squares = np.vdot(got, want), np.vdot(got, got) + np.vdot(want, want)
    assert 1 - 2 * product / max(squares, 1e-12) < 1e-5
    assert (np.isneginf(got_lse) == np.isneginf(want_lse)).all()
    finite = np.isfinite(want_lse)
    assert np.abs(got_lse[finite] - want_lse[finite]).max(initial=0) < 1e-3


LENGTHS = [0, 1, 63, 64, 65, 127, 128, 129, 509, 3000, 0, 640]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("h_q", "q_len"), [(1, 1), (3, 1), (9, 3), (63, 1), (126, 2), (128, 1), (16, 4)])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_odd_shapes(h_q: int, q_len: int, causal: bool, dtype) -> None:
    """Lengths around every boundary, zero lengths, heads that fill no tile, queries that see no key."""
    inputs = make_inputs(LENGTHS, h_q, q_len, dtype, seed=h_q)
    check(inputs, causal, *run(inputs, causal))


@pytest.mark.parametrize(("h_q", "h_kv", "q_len"), [(2, 2, 1), (6, 2, 3), (256, 2, 1), (96, 4, 4)])
def test_several_kv_heads(h_q: int, h_kv: int, q_len: int) -> None:
    """Query head h attends with KV head h // (h_q / h_kv); the last case has tiles of two tokens' heads."""
    inputs = make_inputs(LENGTHS, h_q, q_len, seed=h_q, h_kv=h_kv)
    check(inputs, True, *run(inputs, True))


@pytest.mark.parametrize("overhead", [1, 2, 5])
@pytest.mark.parametrize("length", [1000, 8192, 32768])
@pytest.mark.parametrize("h_q", [16, 128])
def test_one_long_request(length: int, h_q: int, overhead: int) -> None:
    """Up to a split for every multiprocessor."""
    inputs = make_inputs([length], h_q)
    check(inputs, False, *run(inputs, False, overhead=overhead))


def test_needle_at_every_page_edge() -> None:
    """Keys at the edges dominate: losing one would change everything."""
    inputs = make_inputs([1000], 16)
    for token in (0, 63, 64, 127, 128, 511, 512, 959, 960, 999):
        page, slot = inputs.tables[0, token // PAGE], token % PAGE
        direction = inputs.query[0, 0, 0].astype(jnp.float32)
        needle = (direction * 12 / SCALE / jnp.sum(direction**2)).astype(jnp.bfloat16)
        changed = Inputs(
            inputs.lengths, inputs.query, inputs.cache.at[page, slot, 0].set(needle), inputs.tables
        )
        check(changed, False, *run(changed, False, overhead=1))


@pytest.mark.parametrize("h_q", [16, 128])
@pytest.mark.parametrize("bad", [-1, GARBAGE, -GARBAGE, "num_pages"])
def test_bad_pages_give_nan_in_their_request_only(bad: int | str, h_q: int) -> None:
    inputs = make_inputs([1000, 700, 64, 3000, 900], h_q, seed=5)
    tables = inputs.tables.copy()
    tables[1, 3] = tables[3, 40] = inputs.cache.shape[0] if bad == "num_pages" else bad
    check(inputs, False, *run(inputs, False, tables=tables), skip=(1, 3))


@pytest.mark.parametrize("length", [-1, "one too many", 2**31 - 1])
def test_lengths_that_cannot_be_give_nan(length: int | str) -> None:
    inputs = make_inputs([200, 700, 64], 16, seed=6)
    too_long = inputs.tables.shape[1] * PAGE + 1 if length == "one too many" else length
    check(inputs, False, *run(inputs, False, seq_lens=[200, too_long, 64]), skip=(1,))


def test_same_bits_every_time() -> None:
    rng = random.Random(1)
    inputs = make_inputs([rng.randint(0, 3000) for _ in range(60)], 128, 2)
    first = [np.asarray(x.astype(jnp.float32)) for x in run(inputs, True)]
    for _ in range(5):
        again = [np.asarray(x.astype(jnp.float32)) for x in run(inputs, True)]
        assert all((a == b).all() for a, b in zip(first, again, strict=True))


def assert_same_bits(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize(
    "lengths",
    [[8192], [4096] * 8, [30_000, 100, 5, 700, 64], [1000, 3000] * 50, [64] * 300],
    ids=["one", "eight", "uneven", "hundred", "uncut"],
)
def test_merging_in_the_kernel_and_behind_it(lengths: list[int], q_len: int) -> None:
    """Cooperative launches can be declined; what a driver refuses goes the same way."""
    inputs = make_inputs(lengths, 128, q_len, seed=len(lengths))
    check(inputs, True, *run(inputs, True, cooperative=True))
    check(inputs, True, *run(inputs, True, cooperative=False))


@pytest.mark.parametrize("parts", [1, 2, 3, 33, 131, 133, 264, 1000])
def test_any_number_of_parts(parts: int) -> None:
    """Scratch has two slots a part: with few parts over many sequences, and with more than fit on the device."""
    inputs = make_inputs([700, 0, 3000, 64, 65, 1, 5000, 640, 128, 900], 64, seed=parts)
    for overhead in (1, 5):
        check(inputs, False, *run(inputs, False, overhead=overhead, parts=parts))


def test_a_pool_above_2_to_the_31_elements() -> None:
    """4.3 GB of pages; a small pool with the same pages gives the bits."""
    small = make_inputs([3000, 0, 64, 700, 5000], 64, seed=11)
    pages = small.cache.shape[0]
    half = pages // 2
    num_pages = 2**31 // (PAGE * DIM) + 100
    filler = jnp.full((num_pages - pages, PAGE, 1, DIM), jnp.nan, jnp.bfloat16)
    large = jnp.concatenate([small.cache[:half], filler, small.cache[half:]])
    assert large.size > 2**31
    owned = (small.tables >= 0) & (small.tables < pages)
    moved = np.where(owned & (small.tables >= half), small.tables + num_pages - pages, small.tables)
    assert (moved[owned].astype(np.int64) * PAGE * DIM > 2**31).any()
    want = run(small, False)
    check(small, False, *want)
    assert_same_bits(run(Inputs(small.lengths, small.query, large, moved), False), want)


def test_on_two_gpus() -> None:
    """Calls on each, in turns, from one thread: the handler makes its GPU the current one."""
    if len(jax.devices()) < 2:
        pytest.skip("there is one GPU")
    inputs = make_inputs(LENGTHS, 128, 2, seed=12)
    want = run(inputs, True)
    check(inputs, True, *want)
    elsewhere = jax.device_put((inputs.query, inputs.cache), jax.devices()[1])
    for _ in range(3):
        with jax.default_device(jax.devices()[1]):
            got = run(Inputs(inputs.lengths, *elsewhere, inputs.tables), True)
        assert got[0].devices() == {jax.devices()[1]}
        assert_same_bits(got, want)
        assert_same_bits(run(inputs, True), want)


def test_from_two_host_threads() -> None:
    """Different shapes and ways of merging, at the same time."""
    both = [make_inputs([4096] * 16, 128, seed=13), make_inputs([20_000, 50], 16, seed=14)]
    wanted = [run(inputs, False) for inputs in both]
    for inputs, want in zip(both, wanted, strict=True):
        check(inputs, False, *want)
    results: list[list] = [[], []]
    start = threading.Barrier(2)

    def work(i: int) -> None:
        start.wait()
        results[i].extend(jax.block_until_ready([run(both[i], False) for _ in range(50)]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, want in zip(results, wanted, strict=True):
        assert len(got) == 50
        for each in got:
            assert_same_bits(each, want)


def test_on_two_streams() -> None:
    """Two calls of one program that do not depend on each other, each on a stream of its own, many times."""
    first, second = make_inputs([4096] * 16, 128, seed=15), make_inputs([20_000, 50], 16, seed=16)

    def arguments(inputs: Inputs) -> tuple:
        made = schedule(inputs.lengths, inputs.parts)
        lengths = jnp.asarray(inputs.lengths, jnp.int32)
        return (inputs.query, inputs.cache, jnp.asarray(inputs.tables), lengths, *map(jnp.asarray, made))

    call = functools.partial(mla_decode_cuda, scale=SCALE, causal=False)
    on_its_own = [
        compute_on(call, compute_type=f"gpu_stream:{i}", out_memory_spaces=jax.memory.Space.Device)
        for i in (1, 2)
    ]

    @jax.jit
    def together(a, b):
        return on_its_own[0](*a), on_its_own[1](*b)

    both = arguments(first), arguments(second)
    text = together.lower(*both).compile().as_text()
    assert '_xla_stream_annotation="1"' in text
    assert '_xla_stream_annotation="2"' in text
    wanted = run(first, False), run(second, False)
    check(first, False, *wanted[0])
    check(second, False, *wanted[1])
    for _ in range(20):
        for got, want in zip(together(*both), wanted, strict=True):
            assert_same_bits(got, want)


def test_in_scan_and_while_loop() -> None:
    """As layers are: many calls in one compiled loop, each feeding the next."""
    inputs = make_inputs([300, 1000], 16, seed=9)
    metadata, splits = map(jnp.asarray, schedule(inputs.lengths, inputs.parts))
    lengths, tables = jnp.asarray(inputs.lengths, jnp.int32), jnp.asarray(inputs.tables)

    def step(query):
        out, _ = mla_decode_cuda(
            query, inputs.cache, tables, lengths, metadata, splits, scale=SCALE, causal=False
        )
        return query.at[..., :LATENT].set(out)

    eager = inputs.query
    for _ in range(4):
        eager = step(eager)
    scanned = jax.jit(lambda q: jax.lax.scan(lambda c, _: (step(c), None), q, length=4)[0])(inputs.query)
    looped = jax.jit(lambda q: jax.lax.fori_loop(0, 4, lambda _, c: step(c), q))(inputs.query)
    assert (np.asarray(eager) == np.asarray(scanned)).all()
    assert (np.asarray(eager) == np.asarray(looped)).all()


def test_vmap() -> None:
    """A loop of calls: each gives the bits that it gives alone."""
    inputs = make_inputs([300, 0, 1000], 16, seed=9)
    metadata, splits = map(jnp.asarray, schedule(inputs.lengths, inputs.parts))
    lengths, tables = jnp.asarray(inputs.lengths, jnp.int32), jnp.asarray(inputs.tables)

    def attend(query):
        return mla_decode_cuda(
            query, inputs.cache, tables, lengths, metadata, splits, scale=SCALE, causal=False
        )

    queries = jnp.stack([inputs.query, -inputs.query])
    batched = jax.jit(jax.vmap(attend))(queries)
    for i, query in enumerate(queries):
        assert_same_bits([together[i] for together in batched], attend(query))


def test_handler_refuses_what_python_lets_through() -> None:
    inputs = make_inputs([100], 16)
    metadata, splits = map(jnp.asarray, schedule(inputs.lengths, inputs.parts))
    lengths, tables = jnp.asarray(inputs.lengths, jnp.int32), jnp.asarray(inputs.tables)

    def message(*arguments, scale=SCALE) -> str:
        with pytest.raises(Exception, match="pallas_attn_mla_decode_sm90: argument") as error:
            jax.block_until_ready(mla_decode_cuda(*arguments, scale=scale, causal=False))
        return str(error.value)

    good = [inputs.query, inputs.cache, tables, lengths, metadata, splits]
    assert "'latent_cache': expected dtype bfloat16, got float16" in message(
        good[0], good[1].astype(jnp.float16), *good[2:]
    )
    assert "'query': expected shape [any, any, any, any, 576], got [1, 1, 1, 16, 512]" in message(
        good[0][..., :512], *good[1:]
    )
    assert "'num_splits': expected shape [2], got [1]" in message(*good[:5], splits[:1])
    assert "'scale': expected a positive, finite number" in message(*good, scale=-1.0)
