"""Where keys and values come from: pages of a cache, or arrays of the new tokens.

Both are read tile by tile. `ahead` looks up what the tile at a position will need; `read` returns a function of a chunk
of elements for keys, the keys' scales if pages have them, and such a function for values (None where keys are values,
too). A tile without `held` is full and was looked up ahead; otherwise `held` marks its filled slots, and the others
read as 0.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call.pools import Which
from pallas_attn._call.sizes import Chunk, ceil_div
from pallas_attn._tile import masking, pages, quantization, rows, triton
from pallas_attn.ops.ragged_attention.operands import Operands
from pallas_attn.ops.ragged_attention.problem import Problem
from pallas_attn.ops.ragged_attention.spans import Span

CHECKED_IDS = 512  # page ids checked in one step, before the walk


class Pages:
    """A sequence's pages."""

    def __init__(self, problem: Problem, seq, kv_head, refs: Operands):
        self._problem, self._seq, self._kv_head, self._refs = problem, seq, kv_head, refs

    @property
    def looks_ahead(self) -> bool:
        """Whether ids are loaded into registers one tile ahead.

        Not in short launches, which are limited by memory. There a bad id is clamped instead of skipping the walk:
        Triton does not pipeline loads by ids that are looked up in a loop whose bounds depend on a reduction.
        """
        return not self._problem.is_short

    def lead_nowhere(self, span: Span, begin, end) -> jax.Array:
        """Whether tiles [begin, end) use a page id outside the pool.

        Checked once before the walk, which is cheaper than a flag in every tile.
        """
        page_size = self._problem.pool.page_size
        first = jnp.maximum(span.start(begin), span.seen_from) // page_size
        last = ceil_div(jnp.minimum(span.start(end), span.end), page_size)
        gap = None if span.left is None else span.left.gap_of(page_size)
        if gap is not None:
            first, last = gap.without(first), gap.without(last)

        def look(i, bad):
            column = first + i * CHECKED_IDS + jnp.arange(CHECKED_IDS)
            mask = column < last
            column = column if gap is None else gap.back(column)
            page = pages.look_up(self._refs.block_tables, self._seq, column, mask=mask, other=0)
            return bad | (~masking.usable_pages(page, self._problem.pool.num_pages)).astype(jnp.int32)

        steps = ceil_div(jnp.maximum(last - first, 0), CHECKED_IDS)
        return jnp.max(jax.lax.fori_loop(0, steps, look, jnp.zeros(CHECKED_IDS, jnp.int32))) > 0

    def ahead(self, start) -> tuple[jax.Array, ...]:
        """The tokens' page ids (arbitrary beyond the table's end) and offsets. Triton does not pipeline loads by ids of
        the previous step and offsets of this one, so both are carried."""
        if not self.looks_ahead:
            return ()
        column, offset = self._slots(start)
        return self._look_up(jnp.minimum(column, self._problem.max_pages - 1)), offset

    def read(self, start, position, ready, held):
        if held is None and self.looks_ahead:
            page, offset = ready
        else:
            column, offset = self._slots(start)
            page = self._look_up(column, **({} if held is None else {"mask": held, "other": 0}))

        def tile(which: Which, ref: Any, dim: int, chunk: Chunk):
            layout = self._problem.layout
            read = pages.gather(ref, layout, which, page, offset, self._kv_head, chunk, held, head_dim=dim)
            if which == "key" or (scale := self._scale(self._refs.v_scale, page, held)) is None:
                return read
            return read.astype(jnp.float32) * scale[:, None]

        of_keys = functools.partial(tile, "key", self._refs.key_cache, self._problem.pool.head_dim)
        of_values = functools.partial(tile, "value", self._refs.value_cache, self._problem.value_dim)
        return (
            of_keys,
            self._scale(self._refs.k_scale, page, held),
            None if self._refs.value_cache is None else of_values,
        )

    def _scale(self, scale: Any, page: jax.Array, held) -> jax.Array | None:
        """[block_kv] scales, where each page has its own."""
        return pages.scale(scale, page, self._kv_head, held) if quantization.is_by_page(scale) else None

    def _slots(self, start):
        return pages.slots(start, self._problem.config.block_kv, self._problem.pool.page_size)

    def _look_up(self, column: jax.Array, **mask: Any) -> jax.Array:
        page = pages.look_up(self._refs.block_tables, self._seq, column, **mask)
        return page if self.looks_ahead else jnp.clip(page, 0, self._problem.pool.num_pages - 1)


class NewKeys:
    """The new tokens of a sequence whose position 0 is token `begin` of all."""

    def __init__(self, begin, kv_head, refs: Operands):
        self._begin, self._kv_head, self._refs = begin, kv_head, refs

    def ahead(self, start) -> tuple:
        return ()

    def read(self, start, position, ready, held):
        held = jnp.ones(position.shape, bool) if held is None else held

        def tile(ref: Any, chunk: Chunk):
            place, mask = rows.elements(ref, (self._begin + position, self._kv_head), held, chunk)
            return triton.load(place, mask=mask, other=0.0)

        keys, values = (functools.partial(tile, ref) for ref in (self._refs.key, self._refs.value))
        return keys, None, values
