"""From a call's score_mod, mask_mod and block_mask to what its operands hold."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._call import symbolic
from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._call.pools import table_tokens
from pallas_attn._tile.band import Band
from pallas_attn.mods import blocks
from pallas_attn.mods.bits import Bits
from pallas_attn.mods.blocks import BlockMask, Lists
from pallas_attn.mods.diagonal import band_of, mod_of
from pallas_attn.mods.evaluate import stored
from pallas_attn.mods.operands import Mods, is_float
from pallas_attn.mods.program import BATCH, HEAD, KEY, QUERY, Program
from pallas_attn.mods.ready import and_masks
from pallas_attn.mods.simplify import within
from pallas_attn.mods.trace import trace

BLOCK = 128


class Sizes(NamedTuple):
    batch: int
    num_kv_heads: int
    group: int
    q_len: int
    kv_len: int

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        return (BATCH, self.batch), (HEAD, self.num_heads), (QUERY, self.q_len), (KEY, self.kv_len)


def of_call(
    check: ArgumentChecker,
    sizes: Sizes,
    score_mod: Any,
    mask_mod: Any,
    block_mask: Any,
    band: Band,
) -> tuple[Mods | None, tuple[jax.Array, ...] | None, Band]:
    """What is static or has no gradients, and the floating-point arrays that the score_mod captures. `band` is a rule
    of the call's own, which becomes part of a mask, whose blocks then know of it, unless the mask is but a band, too:
    then that is what is left of both."""
    given = {"score_mod": score_mod, "mask_mod": mask_mod, "block_mask": block_mask}
    if not _are_given(check, sizes, **given):
        return None, None, band
    found = _mask(check, sizes, mask_mod, block_mask, band)
    if 0 in sizes:
        return None, None, band
    if isinstance(found, Band):
        found, band = None, found
    elif found is not None:
        band = Band()  # which is in the mask
    if found is None and score_mod is None:
        return None, None, band
    score, fixed, captured = _score(check, sizes.lengths, score_mod)
    used = _used(score, None if found is None else found.program)
    heads = jnp.arange(sizes.num_heads, dtype=jnp.int32).reshape(sizes.num_kv_heads, sizes.group)
    mods = Mods(
        fixed=fixed,
        of_mask=() if found is None else stored(found.arrays),
        heads=heads if HEAD in used else None,
        sequences=jnp.arange(sizes.batch, dtype=jnp.int32) if BATCH in used else None,
        of_queries=None if found is None else _by_group(found.of_queries, sizes),
        of_keys=None if found is None else _by_group(found.of_keys, sizes),
        bits=None if found is None else _bits(found, sizes),
        score=score,
        mask=None if found is None else found.program,
        block=(BLOCK, BLOCK) if found is None else (found.block_q, found.block_kv),
    )
    return mods, captured, band


class PagedSizes(NamedTuple):
    num_seqs: int
    num_heads: int
    max_pages: int
    page_size: int

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        tokens = table_tokens(self.max_pages, self.page_size)
        return (BATCH, self.num_seqs), (HEAD, self.num_heads), (QUERY, tokens), (KEY, tokens)


def over_pages(
    check: ArgumentChecker,
    sizes: PagedSizes,
    score_mod: Any,
    mask_mod: Any,
    query_positions: Any = None,
    *,
    shared_seqs: bool,
) -> tuple[Mods | None, tuple[jax.Array, ...] | None]:
    """As `of_call`, of queries over pages. `shared_seqs`: whether a device may have some of the sequences."""
    if not _are_given(check, sizes, score_mod=score_mod, mask_mod=mask_mod):
        return None, None
    if query_positions is not None:
        expected = "None beside a score_mod or mask_mod, which know of slots alone"
        check.fail("query_positions", expected, "an array")
    mask, of_mask = None, ()
    if mask_mod is not None:
        traced = trace(check.function, "mask_mod", mask_mod)
        mask, of_mask = within(traced.program, sizes.lengths), traced.arrays
    score, fixed, captured = _score(check, sizes.lengths, score_mod)
    used = _used(score, mask)
    numbers = {
        which: jnp.arange(size, dtype=jnp.int32) if which in used and shared else None
        for which, size, shared in ((HEAD, sizes.num_heads, True), (BATCH, sizes.num_seqs, shared_seqs))
    }
    mods = Mods(
        fixed=fixed,
        of_mask=stored(of_mask),
        heads=numbers[HEAD],
        sequences=numbers[BATCH],
        of_queries=None,
        of_keys=None,
        score=score,
        mask=mask,
        block=(BLOCK, BLOCK),
    )
    return mods, captured


def as_window(mods: Mods | None, window: int | None) -> tuple[Mods | None, int | None]:
    """What is left of mods of causal queries over pages, and their window, where a mask_mod is no more than one."""
    band = None if mods is None or mods.mask is None else band_of(mods.mask)
    if mods is None or band is None or (band.right is not None and band.offset + band.right < 0):
        return mods, window
    if band.left is not None:
        own = band.left - band.offset + 1
        if own < 1:
            return mods, window
        window = own if window is None else min(own, window)
    return dataclasses.replace(mods, mask=None, of_mask=()) if mods.score is not None else None, window


def _are_given(check: ArgumentChecker, sizes: tuple[int, ...], **mods: Any) -> bool:
    given = [name for name, mod in mods.items() if mod is not None]
    if given and symbolic.is_open(*sizes):
        check.fail(given[0], "None where sizes are symbolic", "one")
    return bool(given)


def _score(
    check: ArgumentChecker, lengths: tuple[tuple[int, int], ...], score_mod: Any
) -> tuple[Program | None, tuple[jax.Array, ...], tuple[jax.Array, ...] | None]:
    """The score_mod, what it captures that has no gradients, and what has."""
    if score_mod is None:
        return None, (), None
    traced = trace(check.function, "score_mod", score_mod)
    arrays = stored(traced.arrays)
    floats = tuple(array for array in arrays if is_float(array.dtype)) or None
    fixed = tuple(array for array in arrays if not is_float(array.dtype))
    return within(traced.program, lengths), fixed, floats


def _used(*programs: Program | None) -> frozenset[int]:
    """The arguments that any of them hangs on."""
    return frozenset[int]().union(*(one.used for one in programs if one is not None))


def _mask(
    check: ArgumentChecker, sizes: Sizes, mask_mod: Any, block_mask: Any, band: Band
) -> BlockMask | Band | None:
    if block_mask is None and mask_mod is None:
        return None
    bounded = band.left is not None or band.right is not None
    if block_mask is None:
        traced = trace(check.function, "mask_mod", mask_mod)  # its words, were it no such function
        if 0 in sizes:
            return None
        if bounded:
            traced = trace(check.function, "mask_mod", and_masks(mask_mod, mod_of(band)))
        if (whole := band_of(within(traced.program, sizes.lengths))) is not None:
            return whole
        of_blocks = blocks.Sizes(sizes.batch, sizes.num_heads, sizes.q_len, sizes.kv_len, BLOCK, BLOCK)
        return blocks.of_program(traced.program, traced.arrays, of_blocks, exact=False)
    check.instance("block_mask", block_mask, BlockMask)
    if mask_mod is not None:
        check.fail("block_mask", "None where there is a mask_mod", "both")
    if bounded:
        check.fail(
            "block_mask", "neither causal nor sliding_window beside it (they may be part of it)", "both"
        )
    made, own = (block_mask.q_len, block_mask.kv_len), (sizes.q_len, sizes.kv_len)
    if made != own:
        check.fail("block_mask", f"one of q_len {own[0]} and kv_len {own[1]}", f"of {made[0]} and {made[1]}")
    for what, size, wanted in (
        ("sequences", block_mask.batch, sizes.batch),
        ("heads", block_mask.num_heads, sizes.num_heads),
    ):
        if size not in (None, wanted):
            check.fail("block_mask", f"one of {wanted} {what}, which its mask_mod tells apart", f"of {size}")
    return band_of(block_mask.program) or block_mask


def _by_group(lists: Lists, sizes: Sizes) -> Lists:
    return Lists(*(_in_groups(array, sizes) for array in lists))


def _bits(found: BlockMask, sizes: Sizes) -> Bits | None:
    if found.bits is None:
        return None
    return Bits(found.bits.words, _in_groups(found.bits.first, sizes))


def _in_groups(array: jax.Array, sizes: Sizes) -> jax.Array:
    """With heads as two dimensions."""
    batch, heads = array.shape[:2]
    split = (1, 1) if heads == 1 else (sizes.num_kv_heads, sizes.group)
    return array.reshape(batch, *split, *array.shape[2:])
