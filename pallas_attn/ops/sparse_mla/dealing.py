"""How query tokens, each with `topk` ids, are dealt to multiprocessors: from shapes alone, at trace time."""

import functools
from typing import NamedTuple

import numpy as np

TILE_IDS = 64
FIELDS = 8
# Cost of starting on a token (reading its query, writing its result), in tiles of ids.
START = 2
# Extra cost of a cut: partial results of this many heads are written, read and merged.
FEW_HEADS, CUT_FEW, CUT_MANY = 32, 2, 6
WORTH_IT = 1.03


class Deal(NamedTuple):
    """As `MLASchedule`: a row for each part, and the splits of all tokens before each one."""

    parts: np.ndarray
    """[num_parts, 8] int32: first token and id, last token and (exclusive) id, number of the first split, 0."""
    num_splits: np.ndarray
    """[num_tokens + 1] int32."""

    @property
    def cuts(self) -> bool:
        return int(self.num_splits[-1]) + 1 > len(self.num_splits)


@functools.lru_cache(maxsize=256)
def dealt(num_tokens: int, topk: int, num_parts: int, num_heads: int, *, whole: bool) -> Deal:
    """Deals whole tokens if that keeps the parts about as busy; otherwise equal numbers of tiles, cut anywhere.

    Tokens may have fewer ids than `topk`: splits after their end find nothing to do.
    """
    tiles = -(-topk // TILE_IDS)
    shares = -(-num_tokens // num_parts)
    cost_whole = shares * (tiles + START)
    # Each part begins and ends with a split.
    cost_cut = -(-num_tokens * (tiles + START) // num_parts) + START
    cost_cut += CUT_FEW if num_heads <= FEW_HEADS else CUT_MANY
    if whole or tiles == 1 or cost_whole <= WORTH_IT * cost_cut:
        ends = np.arange(1, num_parts + 1) * num_tokens // num_parts * tiles
    else:
        ends = np.minimum(
            np.arange(1, num_parts + 1) * max(1, -(-num_tokens * tiles // num_parts)), num_tokens * tiles
        )
    return _in_rows(np.unique(ends[ends > 0]), num_tokens, tiles)


def _in_rows(ends: np.ndarray, num_tokens: int, tiles: int) -> Deal:
    """`ends`: where parts end, in tiles of all tokens laid end to end."""
    begins = np.concatenate([[0], ends[:-1]])
    last = (ends - 1) // tiles
    first = begins // tiles
    # A split begins with its token, and wherever else a part begins.
    starts = np.unique(np.concatenate([np.arange(num_tokens) * tiles, begins]))
    num_splits = np.searchsorted(starts, np.arange(num_tokens + 1) * tiles)
    first_split = np.searchsorted(starts, begins) - num_splits[first]
    parts = np.zeros((len(ends), FIELDS), np.int32)
    parts[:, :5] = np.stack(
        [first, begins % tiles * TILE_IDS, last, (ends - last * tiles) * TILE_IDS, first_split], axis=1
    )
    return Deal(parts, num_splits.astype(np.int32))
