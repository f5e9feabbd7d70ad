"""How the CUDA kernels of sparse MLA deal query tokens to multiprocessors; and which calls they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn._call import ffi
from pallas_attn._call.device import Device
from pallas_attn.ops.sparse_mla import cuda
from pallas_attn.ops.sparse_mla.dealing import TILE_IDS, dealt
from pallas_attn.ops.sparse_mla.operands import Ids, Operands

pytestmark = pytest.mark.once

CASES = [  # tokens, topk, parts, heads
    (1, 2048, 66, 128),
    (3, 100, 132, 8),
    (140, 2048, 132, 64),
    (256, 2048, 66, 128),
    (100, 2048, 132, 16),
    (300, 640, 132, 128),
    (1000, 2048, 66, 128),
    (2, 33, 132, 8),
    (1, 1, 1, 1),
]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("tokens", "topk", "parts", "heads"), CASES)
def test_every_tile_has_one_part(tokens: int, topk: int, parts: int, heads: int, whole: bool) -> None:
    deal = dealt(tokens, topk, parts, heads, whole=whole)
    assert 1 <= len(deal.parts) <= parts
    tiles = -(-topk // TILE_IDS)
    seen, splits, work = np.zeros((tokens, tiles), int), np.zeros(tokens, int), []
    for first, begin, last, end, first_split, *rest in deal.parts:
        assert first_split == splits[first]
        assert not any(rest)
        for token in range(first, last + 1):
            mine = slice(
                begin // TILE_IDS if token == first else 0, end // TILE_IDS if token == last else tiles
            )
            assert mine.stop > mine.start, "a split without tiles"
            seen[token, mine] += 1
            splits[token] += 1
        work.append((last - first) * tiles + (end - begin) // TILE_IDS)
    assert (seen == 1).all()
    np.testing.assert_array_equal(deal.num_splits, np.concatenate([[0], np.cumsum(splits)]))
    assert deal.cuts == bool((splits > 1).any())
    assert not (whole and deal.cuts)
    if deal.cuts:
        assert max(work) - min(work[:-1]) <= 1
    # No part has more than its share, to whole tokens.
    assert max(work) <= -(-tokens // parts) * tiles


def test_few_tokens_are_cut_and_many_are_not() -> None:
    assert len(dealt(1, 2048, 66, 128, whole=False).parts) == 32
    assert dealt(140, 2048, 132, 64, whole=False).cuts
    assert not dealt(256, 2048, 66, 128, whole=False).cuts
    assert not dealt(4096, 2048, 66, 128, whole=False).cuts


def test_refusals() -> None:
    assert cuda.unsupported(jnp.float32, 64) == "needs bfloat16 or float16, got float32"
    assert cuda.unsupported(jnp.float16, 2**31 - 1) == "takes at most 2147483391 ids, got 2147483647"


@pytest.mark.parametrize("max_logits", [False, True])
def test_lowers_to_one_call_with_python_names(max_logits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ffi, "register", lambda: None)
    monkeypatch.setattr(cuda, "current_device", lambda: Device("gpu", "NVIDIA H200", 132, 90))

    def call(query, pool, ids, lengths, tables):
        operands = Operands(
            query=query,
            latent_cache=pool,
            indices=ids,
            block_tables=tables,
            topk_length=lengths,
            ids=Ids(page_size=16, tokens_a_seq=2),
            scale=0.1,
            max_logits=max_logits,
        )
        return cuda.sparse_mla_cuda(operands)

    shapes = [(4, 128, 576), (64, 656), (4, 640), (4,), (2, 7)]
    dtypes = [jnp.bfloat16, jnp.uint8, *[jnp.int32] * 3]
    arguments = map(jax.ShapeDtypeStruct, shapes, dtypes)
    text = jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = (line for line in text.splitlines() if "pallas_attn_sparse_mla_sm90" in line)
    for attribute in ("cooperative = true", "page_size = 16 : i64", "scale = 1.000000e-01 : f32"):
        assert attribute in line
    # Largest logits and places for splits are never both there.
    assert ("tensor<4x128xf32>, tensor<4x128xf32>, tensor<0x128x512xf32>" in line) == max_logits
    assert ("tensor<4x128xf32>, tensor<0x0xf32>, tensor<80x128x512xf32>" in line) == (not max_logits)
