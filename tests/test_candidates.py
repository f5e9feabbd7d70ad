"""What heuristics of the other ops choose among their candidates: it fits every GPU, uses what there is, lies within
blocks. (Paged decode's is test_waves.py; compiled kernels are test_budget.py's.)"""

import itertools
from typing import Any

import pytest

from pallas_attn._call.device import Device
from pallas_attn._split import latent_problem
from pallas_attn._tile.band import Band
from pallas_attn.ops.blocksparse_attention import config as blocksparse
from pallas_attn.ops.flash_attention import config as flash
from pallas_attn.ops.flash_attention.operands import Rules
from pallas_attn.ops.flash_attention.problem import Problem
from pallas_attn.ops.mla_decode import config as mla
from pallas_attn.ops.sparse_mla import config as sparse

pytestmark = pytest.mark.once  # arithmetic

SMS = (80, 86, 90, 100, 120, None)
DEVICES = {sm: Device("gpu", "one", 132, sm) for sm in SMS}
ROWS = (1, 16, 17, 32, 33, 64, 128)


@pytest.mark.parametrize("sm", SMS)
def test_tiles_of_latents_fit(sm):
    device = DEVICES[sm]
    for rows, page_size, fp8 in itertools.product(ROWS, (1, 16, 32, 64, 96, 128), (False, True)):
        about: dict[str, Any] = dict(page_size=page_size, device=device, fp8=fp8)
        config = mla.heuristic(rows=rows, **about)
        transposed = mla.is_transposed(config, **about)
        sizes = config.block_q, config.block_kv, config.num_warps, config.num_stages
        tile = latent_problem.needs(
            *sizes, fp8=fp8, transposed=transposed, looks_up=page_size % config.block_kv > 0
        )
        assert tile.fits(device), (config, about)
        mla.check_fits(config, **about)
        assert not transposed or (device.architecture.warpgroup_products and not fp8)


@pytest.mark.parametrize("sm", SMS)
def test_tiles_of_chosen_latents_fit(sm):
    for heads, fp8, num_tokens in itertools.product(ROWS, (False, True), (1, 40, 5000)):
        about: dict[str, Any] = dict(num_heads=heads, fp8=fp8, device=DEVICES[sm], topk=2048)
        config = sparse.heuristic(num_tokens=num_tokens, **about)
        sizes = config.block_q, config.block_kv, config.num_warps, config.num_stages
        assert latent_problem.needs(*sizes, fp8=fp8, looks_up=True).fits(DEVICES[sm]), config
        programs = num_tokens * -(-heads // config.block_q) * config.num_splits
        assert config.num_splits == 1 or programs <= DEVICES[sm].num_cores, "all begin at once"


def test_whole_sequences_are_short_and_begin_at_once():
    for rows, streams, max_len in itertools.product(ROWS, (1, 50, 93, 132, 133, 264), (64, 1024, 1025)):
        config = mla.heuristic(rows=rows, page_size=64, device=DEVICES[90])
        if mla.whole(config, streams=streams, rows=rows, max_len=max_len, device=DEVICES[90]):
            assert max_len <= mla.WHOLE_TOKENS
            assert streams * -(-rows // config.block_q) <= 132


def problem(dim: int, value_dim: int) -> Problem:
    return Problem(Rules("BTNH", 1.0, None, Band()), 2, 512, 512, 2, 4, dim, value_dim)


@pytest.mark.parametrize("sm", SMS)
def test_dense_tiles_fit(sm):
    dims = (40, 64, 128, 256)
    for dim, value_dim, itemsize, pair_bytes in itertools.product(dims, dims, (2, 4), (0, 1, 5)):
        about = problem(dim, value_dim), itemsize, pair_bytes
        config = flash.heuristic(*about, DEVICES[sm])
        for kernel in flash.KERNELS:
            tile = flash.needs(getattr(config, kernel), kernel, *about)
            assert tile.fits(DEVICES[sm]), (kernel, config, about)


def test_a_gpu_with_more_memory_keeps_as_much_in_flight():
    """sm_80 and sm_86 differ in nothing else."""
    for dim, itemsize in itertools.product((64, 128, 256), (2, 4)):
        less, more = (flash.heuristic(problem(dim, dim), itemsize, 0, DEVICES[sm]) for sm in (86, 80))
        for kernel in flash.KERNELS:
            small, large = getattr(less, kernel), getattr(more, kernel)
            in_flight = [one.block_q * one.block_kv * one.num_stages for one in (small, large)]
            assert in_flight[0] <= in_flight[1], (dim, kernel)


@pytest.mark.parametrize("sm", SMS)
def test_sparse_tiles_lie_within_blocks(sm):
    sides = (16, 128)
    for dim, itemsize, block, q_block, listed in itertools.product(
        (128, 256), (2, 4), sides, sides, (2.0, 90.0)
    ):
        config = blocksparse.heuristic(
            head_dim=dim, itemsize=itemsize, block_size=block, q_block_size=q_block, row_blocks=listed,
            streams=16, plain=True, limits_registers=True, device=DEVICES[sm],
        )  # fmt: skip
        tiles = (config.block_q, config.block_kv), (config.dq_block_q, config.dq_block_kv)
        for rows, tokens in (*tiles, (config.dkv_block_q, config.dkv_block_kv)):
            assert q_block % rows == block % tokens == 0
        assert block % config.decode_block_kv == 0
