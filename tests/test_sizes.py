"""head_dim in tiles: one rule for every kernel."""

import pytest

from pallas_attn._call import sizes

pytestmark = pytest.mark.once


def test_chunks_cover_head_dim():
    for head_dim in range(1, 2 * sizes.MAX_HEAD_DIM + 1):
        chunks, side = sizes.chunks(head_dim), sizes.tile_side(head_dim)
        assert [first for first, _ in chunks] == [0, *(size for _, size in chunks)][: len(chunks)]
        assert all(size == sizes.tile_side(size) for _, size in chunks)
        width = sum(size for _, size in chunks)
        assert head_dim <= width <= side
        # A second product has to save a quarter of the work, and only the last chunk is padded.
        assert len(chunks) == 1 or 4 * width <= 3 * side
        assert not any(sizes.reaches_beyond(chunk, head_dim) for chunk in chunks[:-1])


def test_chunks_of_common_heads():
    assert [len(sizes.chunks(dim)) for dim in (64, 112, 120, 128, 224, 256)] == [1] * 6
    assert sizes.chunks(80) == ((0, 64), (64, 16))
    assert sizes.chunks(192) == ((0, 128), (128, 64))


def test_heads_that_are_too_wide():
    assert sizes.too_wide({"head_dim": 256, "value_dim": 256}) is None
    assert sizes.too_wide({"head_dim": 64, "value_dim": 257}) == "value_dim is at most 256, got 257"
    assert sizes.too_wide({"head_dim": 512}, most=512) is None
