"""The walk of `mla_decode` with both products transposed: what its masks, references and addresses could get wrong."""

import dataclasses
import functools

import inputs
import numpy as np
import pytest
from support import ON_GPU
from test_mla_decode import check, compiled

from pallas_attn._call.device import Device
from pallas_attn._split import latent_problem
from pallas_attn.ops.mla_decode import MLADecodeConfig
from pallas_attn.ops.mla_decode.config import heuristic, is_transposed
from pallas_attn.testing import cases

IMPLEMENTATIONS = ["interpret", *ON_GPU]
BOTH = pytest.mark.parametrize("rows", [32, 64])


def transposed_case(seq_lens, rows, splits=(), q_len=1, **options) -> cases.MLADecodeCase:
    transposed = (("block_q", rows), ("block_kv", 64), ("num_warps", rows // 8), ("num_stages", 2))
    heads = rows // q_len
    return cases.MLADecodeCase(
        seq_lens, heads, q_len=q_len, page_size=64, config=(*transposed, *splits), **options
    )


@BOTH
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_boundary_token_is_lost(implementation, rows):
    """Each sequence hides most of its weight in one token at the end of a tile, of a split and of itself."""
    case = transposed_case((192, 130, 65), rows, q_len=2, causal=True, num_parts=3)
    call = compiled(case, implementation)
    for place in (63, 64, None):
        data = inputs.make(case)
        positions = {s: n - 1 if place is None else place for s, n in enumerate(case.seq_lens)}
        inputs.plant_needles(case, data, positions)
        check(case, data, *call(*data.arguments()))


@pytest.mark.once
@BOTH
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_whose_logits_leap_and_a_row_of_nan_leave_others_alone(implementation, rows):
    case = transposed_case((500, 260), rows, num_parts=3)
    call, data = compiled(case, implementation), inputs.make(case)
    query = np.array(data.query)
    query[:, :, ::3] *= 40
    out, lse = call(*data.copy(query=query).arguments())
    check(case, data.copy(query=query), out, lse)
    query[0, 0, 5] = np.nan
    spoiled, spoiled_lse = call(*data.copy(query=query).arguments())
    assert np.isnan(np.float32(spoiled[0, 0, 5])).all()
    assert np.isnan(spoiled_lse[0, 0, 5])
    others = [row for row in range(rows) if row != 5]
    for got, was in ((spoiled, out), (spoiled_lse, lse)):
        # Not bit by bit: all rows of a tile follow their maxima where one does.
        close = functools.partial(np.testing.assert_allclose, rtol=1e-2, atol=2e-3)
        close(np.float32(got[:, :, others]), np.float32(was[:, :, others]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("rows", "num_parts"), [(32, None), (32, 5), (64, 5)])
def test_bad_pages_and_lengths_poison_only_their_rows(rows, num_parts, implementation):
    case = transposed_case((256,) * 7, rows, spare_pages=0, num_parts=num_parts, splits=(("num_splits", 3),))
    call, data = compiled(case, implementation), inputs.make(case)
    good = np.asarray(call(*data.arguments())[0], np.float32)
    data.block_tables[1, 0] = -1
    data.block_tables[2, 3] = data.latent_cache.shape[0]
    data.block_tables[3, 1] = 2147480000
    data.seq_lens[4] = 257
    data.seq_lens[5] = -1
    out, lse = (np.asarray(x, np.float32) for x in call(*data.arguments()))
    for seq in range(7):
        if seq in (0, 6):
            np.testing.assert_allclose(out[seq], good[seq], atol=2e-2)
        else:
            assert np.isnan(out[seq]).all()
            assert np.isnan(lse[seq]).all()


@pytest.mark.once
def test_who_gets_it():
    """The heuristic's 32 rows and more on sm_90; a caller's config may ask for it, or with warps or tiles of other
    numbers for the other walk."""

    def device(sm: int) -> Device:
        return Device("gpu", "one", 132, sm)

    def transposed(config: MLADecodeConfig, page_size: int = 64, sm: int = 90, fp8: bool = False) -> bool:
        return is_transposed(config, page_size=page_size, device=device(sm), fp8=fp8)

    def chosen(rows: int = 32, page_size: int = 64, sm: int = 90, fp8: bool = False) -> bool:
        config = heuristic(rows=rows, page_size=page_size, device=device(sm), fp8=fp8)
        return transposed(config, page_size, sm, fp8)

    config = heuristic(rows=32, page_size=64, device=device(90))
    assert config == MLADecodeConfig(
        32, 64, min_split_tokens=64, target_programs=132, num_warps=4, num_stages=2
    )
    assert latent_problem.needs(32, 64, 4, 2, fp8=False, transposed=True).shared_bytes(device(90)) == 188416
    assert transposed(config)
    assert chosen(rows=17, page_size=128)
    assert not transposed(dataclasses.replace(config, block_q=16))
    assert not transposed(dataclasses.replace(config, block_kv=32))
    assert not transposed(dataclasses.replace(config, num_warps=8))
    assert not chosen(rows=16)
    wide = heuristic(rows=33, page_size=64, device=device(90))
    assert (wide.block_q, wide.block_kv, wide.num_warps, wide.num_stages) == (64, 64, 8, 2)
    assert (
        latent_problem.needs(64, 64, 8, 2, fp8=False, transposed=True).shared_bytes(device(90)) == 229376
    )  # of 232448
    assert transposed(wide)
    assert chosen(rows=256)
    assert not transposed(dataclasses.replace(wide, num_warps=4))
    assert not transposed(dataclasses.replace(wide, block_kv=32))
    for page_size in (32, 96):
        assert not transposed(config, page_size)
        assert not chosen(page_size=page_size)
        assert not chosen(rows=64, page_size=page_size)
    for sm in (80, 100, 120):
        assert not transposed(config, sm=sm)
        assert not chosen(sm=sm)
        assert not chosen(rows=64, sm=sm)
    assert not transposed(config, fp8=True)
    assert not chosen(fp8=True)
    assert not chosen(rows=64, fp8=True)
