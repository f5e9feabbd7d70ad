"""Numerics of `blocksparse_attention` against float64 torch, on the CPU: xla, and the kernels in interpret mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from references.blocksparse_torch import blocksparse_attention as reference

import pallas_attn
from pallas_attn.ops.blocksparse_attention import BlockSparseConfig
from pallas_attn.ops.blocksparse_attention.config import heuristic
from pallas_attn._call.device import current_device
from pallas_attn.testing import compare
from pallas_attn.testing.blocksparse import TEST_CASES, layout_of, make

GPU = pytest.param("pallas", marks=pytest.mark.gpu)
IMPLEMENTATIONS = ["xla", "interpret", GPU]


def run(case, data, implementation, layout=None, **options):
    layout = layout_of(case) if layout is None else layout
    config = None
    if implementation != "xla" and case.config:
        sizes = dict(block_q=min(128, layout.q_block_size), block_kv=layout.block_size)
        sizes |= dict(decode_block_kv=min(32, layout.block_size), num_warps=4)
        config = BlockSparseConfig(**{**sizes, **dict(case.config)})
    lengths = data.lengths()
    call = functools.partial(
        pallas_attn.blocksparse_attention,
        softcap=case.softcap,
        cache_layout=case.cache_layout,
        return_lse=True,
        implementation=implementation,
        config=config,
        **options,
    )
    return jax.jit(lambda q, k, v, lengths: call(q, k, v, layout, **lengths))(*data.arguments(), lengths)


def check(case, data, out, lse):
    expected, expected_lse = reference(case, data)
    rounded, _ = reference(case, data, rounding=getattr(torch, case.dtype))
    compare.assert_rows_close(out, expected, dtype=case.dtype, case_id=case.id, rounded_reference=rounded)
    compare.assert_lse_close(lse, expected_lse, dtype=case.dtype, case_id=case.id)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", TEST_CASES, ids=lambda case: case.id)
def test_matches_reference(case, implementation):
    data = make(case)
    out, lse = run(case, data, implementation)
    assert out.dtype == jnp.dtype(case.dtype)
    check(case, data, out, lse)


@pytest.mark.parametrize("case", [c for c in TEST_CASES if c.pattern != "dense"], ids=lambda case: case.id)
def test_a_forgotten_pattern_is_caught(case):
    data = make(case)
    with pytest.raises(AssertionError):
        check(case, data, *reference(case, data, dense=True))
