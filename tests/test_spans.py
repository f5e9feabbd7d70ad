"""Which tiles a block of ragged rows walks, and which of them need no mask, against every pair of tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.ops.ragged_attention.spans import span


@pytest.mark.once
def test_tiles_against_every_pair():
    rng = np.random.default_rng(0)
    for _ in range(60):
        block_kv, end = int(rng.choice([16, 32])), int(rng.integers(0, 200))
        begin = int(rng.integers(0, end + 1)) * int(rng.integers(2))
        first = int(rng.integers(-5, 210))
        last, causal = first + int(rng.integers(0, 20)), bool(rng.integers(2))
        window = [None, 5, 40][rng.integers(3)]
        found = span(
            jnp.int32(first), jnp.int32(last), begin, jnp.int32(end),
            causal=causal, sliding_window=window, block_kv=block_kv,
        )  # fmt: skip
        query, key = np.arange(first, last + 1)[:, None], np.arange(begin, end)[None, :]
        seen = (key <= query) | (not causal)
        seen &= (window is None) | (query - key < (window or 0))
        some, whole = seen.any(0), seen.all(0)
        wanted = {int(tile) for tile in np.flatnonzero(some) // block_kv}
        tiles = range(int(found.first_tile), int(found.first_tile + found.count))
        assert wanted == set(tiles) or not wanted, "all that some row sees, none other"
        for tile in range(int(found.tiles.clear), int(found.tiles.behind)):
            at = (int(found.first_tile) + tile) * block_kv
            assert whole[at : at + block_kv].sum() == block_kv, "these need no mask"
