"""Inputs that expose faults: shuffled tables, poison where nothing may be read, needles where nothing may be lost.

Everything is drawn and prepared in numpy; the arrays handed out have the case's dtype, and references get the same
arrays, rounding included.
"""

import copy
import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from pallas_attn._tile.layout import from_nhd
from pallas_attn._tile.quantization import quantize
from pallas_attn.testing.cases import DecodeCase

GARBAGE_IDS = (2147480000, -1, -2147483648, 12345678)


@dataclasses.dataclass
class PagedInputs:
    """Arguments of one paged call, as numpy arrays (bf16 and fp8 through ml_dtypes)."""

    query: np.ndarray
    key_cache: np.ndarray
    value_cache: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    extras: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """alibi_slopes, sinks, k_scale, v_scale, as far as the case has them."""

    def arguments(self) -> tuple:
        names = ("query", "key_cache", "value_cache", "block_tables", "seq_lens")
        return tuple(jnp.asarray(getattr(self, name)) for name in names)

    def copy(self) -> "PagedInputs":
        return copy.deepcopy(self)


def block_tables(
    rng: np.random.Generator, seq_lens: tuple[int, ...], page_size: int, spare: int
) -> tuple[np.ndarray, int]:
    """(tables, num_pages): pages in random order, garbage ids in every unused entry."""
    used = [math.ceil(n / page_size) for n in seq_lens]
    num_pages = sum(used) + max(spare, 1)
    tables = rng.choice(GARBAGE_IDS, size=(len(seq_lens), max(*used, 1) + spare)).astype(np.int32)
    order = rng.permutation(num_pages).astype(np.int32)
    first = 0
    for seq, count in enumerate(used):
        tables[seq, :count] = order[first : first + count]
        first += count
    return tables, num_pages


def decode_inputs(case: DecodeCase, seed: int = 0) -> PagedInputs:
    """N(0, 1) queries, keys and values; NaN in every slot that no sequence owns, and values of 1e4 in slots that
    some sequence owns but no query sees."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)
    tables, num_pages = block_tables(rng, case.seq_lens, case.page_size, case.spare_pages)
    query = rng.standard_normal((case.num_seqs, case.q_len, case.num_heads, case.head_dim)).astype(dtype)
    extras = _extras(case, rng)
    # Drawn as [num_pages, page_size, ...]; slots start as poison and are filled where tokens are.
    pools = {}
    for which in ("key", "value"):
        pool = np.full((num_pages, case.page_size, case.num_kv_heads, case.head_dim), np.nan, np.float32)
        for seq, length in enumerate(case.seq_lens):
            page, offset = token_places(tables[seq], length, case.page_size)
            pool[page, offset] = rng.standard_normal((length, case.num_kv_heads, case.head_dim))
            if which == "value":
                unseen = ~visible(case, length).any(axis=(0, 1))
                pool[page[unseen], offset[unseen]] = 1e4
        pools[which] = _stored(pool, case, extras.get(f"{which[0]}_scale"))
        pools[which] = np.array(from_nhd(jnp.asarray(pools[which]), case.layout, which))
    if case.q_len == 1:
        query = query[:, 0]
    return PagedInputs(
        query, pools["key"], pools["value"], tables, np.asarray(case.seq_lens, np.int32), extras
    )


def _extras(case: DecodeCase, rng: np.random.Generator) -> dict[str, np.ndarray]:
    extras = {}
    if case.alibi:
        extras["alibi_slopes"] = np.exp2(-8 * np.arange(1, case.num_heads + 1) / case.num_heads).astype(
            np.float32
        )
    if case.sinks:
        extras["sinks"] = rng.standard_normal(case.num_heads).astype(np.float32) + 2
    if case.cache_dtype:
        shape = (case.num_kv_heads,) if case.scale_per_head else ()
        largest = 127 if case.cache_dtype == "int8" else 20
        for name in ("k_scale", "v_scale"):
            extras[name] = np.asarray(rng.uniform(4.0, 6.0, shape) / largest, np.float32)
    return extras


def _stored(pool: np.ndarray, case: DecodeCase, scale: np.ndarray | None) -> np.ndarray:
    if case.cache_dtype is None:
        return pool.astype(jnp.dtype(case.dtype))
    assert scale is not None
    nothing = np.isnan(pool)
    per_head = jnp.broadcast_to(jnp.asarray(scale), (case.num_kv_heads,))[:, None]
    stored = np.array(
        quantize(jnp.asarray(np.where(nothing, 0, pool)), jnp.dtype(case.cache_dtype), per_head)
    )
    # 0x7F is NaN in e4m3 and e5m2, and the largest int8.
    stored.view(np.uint8)[nothing] = 0x7F
    return stored


def visible(case: DecodeCase, length: int) -> np.ndarray:
    """[q_len, num_heads, length]: which of a sequence's tokens each query sees, by the rules as documented."""
    token = np.arange(length)
    seen = np.zeros((case.q_len, case.num_heads, length), bool)
    for q in range(case.q_len):
        at = length - case.q_len + q  # the query's position
        for head in range(case.num_heads):
            row = token <= at
            if case.sliding_window is not None:
                row &= at - token < case.sliding_window
            if case.block_sparse is not None:
                row &= _in_pattern(case, token, at, head)
            seen[q, head] = row
    return seen


def _in_pattern(case: DecodeCase, token: np.ndarray, at: int, head: int) -> np.ndarray:
    pattern = case.block_sparse
    assert pattern is not None
    step = pattern.head_sliding_step
    if step >= 0:
        offset = (pattern.tp_rank * case.num_heads + head) * step + 1
    else:
        offset = (pattern.tp_rank * case.num_kv_heads + head // case.group) * -step + 1
    block = token // pattern.block_size
    return ((block + offset) % pattern.vert_stride == 0) | (
        block > at // pattern.block_size - pattern.local_blocks
    )


def token_places(table: np.ndarray, length: int, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(page ids, offsets) of a sequence's tokens."""
    position = np.arange(length)
    return table[position // page_size], position % page_size


def plant_needles(
    case: DecodeCase, inputs: PagedInputs, positions: dict[int, int], scale: float | None = None
) -> None:
    """Makes one token of each named sequence ({seq: position}) outweigh all its others together, for every head.

    The key is chosen so that its logit is the log-sum-exp of the others plus 0.5: the token then carries 62% of the
    weight, and an output that lost it is wrong by most of its norm, however long the sequence.
    """
    scale = case.head_dim**-0.5 if scale is None else scale
    for seq, position in positions.items():
        length = case.seq_lens[seq]
        page, offset = token_places(inputs.block_tables[seq], length, case.page_size)
        others = np.arange(length) != position
        for head in range(case.num_kv_heads):
            queries = inputs.query[seq, head * case.group : (head + 1) * case.group].astype(np.float64)
            where = (page, head, offset) if case.layout == "HND" else (page, offset, head)
            logits = queries @ inputs.key_cache[where].astype(np.float64)[others].T * scale
            peak = logits.max(axis=1, initial=-30.0)
            target = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1) + 1e-30) + 0.5
            # The least key that meets every query of the group at its target.
            needle = np.linalg.lstsq(queries, np.maximum(target, 0.5) / scale, rcond=None)[0]
            spot = tuple(i if np.isscalar(i) else i[position] for i in where)
            inputs.key_cache[spot] = needle.astype(inputs.key_cache.dtype)
