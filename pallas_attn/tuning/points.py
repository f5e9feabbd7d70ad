"""Timing configs of `paged_attention` on the present GPU, each checked against the reference before its time counts."""

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call.device import current_device
from pallas_attn._tile.quantization import is_quantized
from pallas_attn.ops.paged_attention.api import paged_attention
from pallas_attn.ops.paged_attention.config import PagedAttentionConfig, heuristic
from pallas_attn.testing.compare import row_errors
from pallas_attn.tuning import timing
from pallas_attn.tuning.timing import device_seconds, tiled, warm_up

# Calls rotate through sets of pages of this many bytes together, so that no cache (an H100's L2 holds 50 MB) is timed:
# the smallest call worth timing, of half a megabyte, needs more than 100 sets.
ROTATE_BYTES = 1 << 30
MOST_SETS = 128
LEAST_CALLS = 4  # in a round, which costs some microseconds of its own
BURST_SECONDS = 0.02
REPEATS = 3  # enough to rank configs
BLOCK = 1 << 22  # random elements of which a pool is made
# Worst row's ||out - reference|| / ||reference||; a right bf16 kernel scores 2.6e-3, a lost page at least 9e-3.
LARGEST_ERROR = {"bfloat16": 8e-3, "float16": 8e-3, "float32": 1e-4}


@dataclasses.dataclass(frozen=True)
class Point:
    """One kind of call: every sequence as long as the block table allows."""

    num_seqs: int
    max_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    cache_dtype: str
    tokens_read: int | None = None
    """Of each sequence, where a window or a sparse pattern leaves out others; None: all."""

    @property
    def streams(self) -> int:
        """Walks over keys and values: one for each sequence and KV head."""
        return self.num_seqs * self.num_kv_heads

    @property
    def rows(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def max_pages(self) -> int:
        return math.ceil(self.max_len / self.page_size)

    @property
    def kv_bytes(self) -> int:
        """Of keys and values that one call reads."""
        tokens = self.num_seqs * (self.tokens_read or self.max_pages * self.page_size)
        return 2 * tokens * self.num_kv_heads * self.head_dim * jnp.dtype(self.cache_dtype).itemsize

    def config(self, **fields: int) -> PagedAttentionConfig:
        """The heuristic's, but for `fields`."""
        return heuristic(
            num_seqs=self.num_seqs,
            num_kv_heads=self.num_kv_heads,
            rows=self.rows,
            head_dim=self.head_dim,
            itemsize=jnp.dtype(self.cache_dtype).itemsize,
            query_itemsize=jnp.dtype(self.dtype).itemsize,
            max_len=self.max_pages * self.page_size,
            device=current_device(),
            **fields,
        )


class Timing(NamedTuple):
    """What became of a config. `problem` says why its time does not count."""

    fields: dict[str, int]
    microseconds: float
    error: float
    problem: str | None


def candidates(point: Point) -> list[dict[str, int]]:
    """Fields of configs worth trying, the heuristic's (none) first: what came out best somewhere in wider sweeps."""
    cores = current_device().num_cores
    if point.streams < 2 * cores:
        # (block_kv, num_warps, num_stages) and programs a multiprocessor. What does not fit there at once makes a
        # second wave, and a second wave of some costs up to 15%: so numbers on either side of what may fit.
        tiles = {(128, 4, 3): (1, 2), (128, 8, 3): (2,), (128, 8, 5): (1, 2)}
        tiles |= {(64, 4, 3): (2, 3), (64, 4, 4): (3,), (32, 4, 5): (2, 4, 5)}
    else:
        tiles = dict.fromkeys([(128, 4, 3), (128, 8, 5), (64, 4, 3), (32, 4, 5), (64, 4, 7)], (4,))
    least = [256]
    if point.max_len < 4096:
        least = [64]
    elif point.streams * point.max_len < 128 * cores:
        least = [64, 128]  # pieces of 256 tokens would leave half the device without work
    elif point.streams * point.max_len < 256 * cores:
        least = [128, 256]
    found = [{}]
    for (block_kv, num_warps, num_stages), programs in tiles.items():
        for count, tokens in itertools.product(programs, least):
            fields = dict(block_kv=block_kv, num_warps=num_warps, num_stages=num_stages)
            found.append(fields | dict(target_programs=count * cores, min_split_tokens=tokens))
    distinct: dict[PagedAttentionConfig, dict[str, int]] = {}
    for fields in found:
        distinct.setdefault(point.config(**fields), fields)
    return list(distinct.values())


def measure(
    point: Point, choices: Sequence[dict[str, int]], implementation: str = "pallas"
) -> Iterator[Timing]:
    """Times each choice of fields, in the order of `choices`; all are compiled before the first is timed, because
    compiling beside a measurement disturbs it."""
    rounds = rounds_of(point) if implementation == "pallas" else 1
    shapes = input_shapes(point)

    def build(fields: dict[str, int]) -> Any:
        call = attend(shapes, implementation=implementation, config=point.config(**fields))
        return jax.jit(functools.partial(looped, call, rounds)).lower(shapes).compile()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        builds = [pool.submit(build, fields) for fields in choices]
        inputs = inputs_of(point)
        reference = first_and_last(reference_of(shapes), inputs)
    warm = implementation != "pallas"
    for fields, built in zip(choices, builds, strict=True):
        try:
            run = built.result()
            outs = run(inputs)
            if not warm:
                warm_up(functools.partial(run, inputs))
                warm = True
            error = max(worst_error(*pair) for pair in zip((outs[0], outs[-1]), reference, strict=True))
            if error <= LARGEST_ERROR[point.dtype]:
                seconds = device_seconds(functools.partial(run, inputs), REPEATS)
                yield Timing(fields, seconds / timing.num_calls(rounds, len(inputs.tables)) * 1e6, error, None)
            else:
                yield Timing(fields, math.inf, error, f"wrong: error {error:.1e}")
        except Exception as error:  # whatever the compiler or the driver has against this config
            problem = " ".join(str(error).split())[:200]
            yield Timing(fields, math.inf, math.nan, f"{type(error).__name__}: {problem}")


class Inputs(NamedTuple):
    query: Any
    key_cache: Any
    value_cache: Any
    tables: tuple[Any, ...]
    """Block tables, one for each of the calls that take turns; of disjoint pages where those are few."""
    seq_lens: Any


def rounds_of(point: Point) -> int:
    """Rounds of calls that take about BURST_SECONDS."""
    return max(
        1, round(BURST_SECONDS / (max(_num_sets(point), LEAST_CALLS) * max(point.kv_bytes / 2.5e12, 8e-6)))
    )


def _num_sets(point: Point) -> int:
    return max(1, min(MOST_SETS, math.ceil(ROTATE_BYTES / point.kv_bytes)))


def input_shapes(point: Point) -> Inputs:
    """`inputs_of(point)` as shapes, to compile for."""
    shape = jax.ShapeDtypeStruct
    num_sets, pages = _num_sets(point), point.num_seqs * point.max_pages
    pool = shape(
        (num_sets * pages, point.page_size, point.num_kv_heads, point.head_dim), jnp.dtype(point.cache_dtype)
    )
    tables = (shape((point.num_seqs, point.max_pages), jnp.int32),) * max(num_sets, LEAST_CALLS)
    query = shape((point.num_seqs, point.num_heads, point.head_dim), jnp.dtype(point.dtype))
    return Inputs(query, pool, pool, tables, shape((point.num_seqs,), jnp.int32))


def inputs_of(point: Point) -> Inputs:
    num_sets = _num_sets(point)
    pages = np.random.default_rng(0).permutation(num_sets * point.num_seqs * point.max_pages)
    tables = pages.astype(np.int32).reshape(num_sets, point.num_seqs, point.max_pages)
    calls = [np.roll(tables[i % num_sets], i // num_sets, axis=0) for i in range(max(num_sets, LEAST_CALLS))]
    shape = (len(pages), point.page_size, point.num_kv_heads, point.head_dim)
    # A seed of its own: a query that equals a key would see that token only, and no check would miss the others.
    query = np.random.default_rng(3).standard_normal(
        (point.num_seqs, point.num_heads, point.head_dim), np.float32
    )
    return Inputs(
        jnp.asarray(query, point.dtype),
        tiled(_random_block(point.cache_dtype, 1), shape),
        tiled(_random_block(point.cache_dtype, 2), shape),
        tuple(map(jnp.asarray, calls)),
        jnp.full((point.num_seqs,), point.max_len, jnp.int32),
    )


def _random_block(dtype: str, seed: int) -> jax.Array:
    """[BLOCK] normal values."""
    block = np.random.default_rng(seed).standard_normal(BLOCK, np.float32)
    return jnp.asarray(block * 40 if dtype == "int8" else block).astype(dtype)


def attend(inputs: Inputs, **options: Any) -> Callable[..., Any]:
    scale = 1 / 40 if inputs.key_cache.dtype == jnp.int8 else 1.0
    if is_quantized(inputs.key_cache.dtype):
        options |= dict(k_scale=scale, v_scale=scale)
    return functools.partial(paged_attention, **options)


def looped(attend: Callable[..., jax.Array], rounds: int, inputs: Inputs) -> tuple[jax.Array, ...]:
    def call(table, seq_lens):
        out = attend(*inputs[:3], table, seq_lens)
        return out, out

    return timing.looped(call, rounds, inputs.tables, inputs.seq_lens)


def reference_of(shapes: Inputs, **options: Any) -> Callable[..., jax.Array]:
    """The call in plain jnp, compiled."""
    call = jax.jit(attend(shapes, implementation="xla", **options))
    return call.lower(*shapes[:3], shapes.tables[0], shapes.seq_lens).compile()


def first_and_last(attend: Callable[..., jax.Array], inputs: Inputs) -> list[jax.Array]:
    tables = (inputs.tables[0], inputs.tables[-1])
    return [attend(*inputs[:3], table, inputs.seq_lens) for table in tables]


def worst_error(out: jax.Array, reference: jax.Array) -> float:
    return float(row_errors(np.asarray(out), np.asarray(reference)).max())
