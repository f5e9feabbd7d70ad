"""benchmarks/costs.py against counting one by one, and the limits of benchmarks/roofline.py."""

import dataclasses
import itertools

import blocksparse_inputs
import costs
import flash_inputs
import numpy as np
import pytest
import roofline
from workloads import WORKLOADS, sparse_mla

import pallas_attn
from pallas_attn import LocalStride
from pallas_attn.testing import blocksparse, cases
from pallas_attn.testing import flash_attention as flash

PLAIN = cases.DecodeCase((37, 5, 128), 4, 2, 16, 16)


def sees(case, length: int, head: int, query: int, token: int) -> bool:
    """Written out for one head, query and token; the causal order is not subtracted."""
    position = length - case.q_len + query
    if case.sliding_window and token <= position - case.sliding_window:
        return False
    if (pattern := case.block_sparse) is None:
        return True
    kv_head = head // (case.num_heads // case.num_kv_heads)
    if pattern.head_sliding_step >= 0:
        offset = (pattern.tp_rank * case.num_heads + head) * pattern.head_sliding_step + 1
    else:
        offset = (pattern.tp_rank * case.num_kv_heads + kv_head) * -pattern.head_sliding_step + 1
    block = token // pattern.block_size
    local = block > (length - 1) // pattern.block_size - pattern.local_blocks
    return local or (block + offset) % pattern.vert_stride == 0


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(q_len=3),
        dict(cache_dtype="int8"),
        dict(dtype="float32"),
        dict(sliding_window=20),
        dict(sliding_window=20, q_len=4),
        dict(sliding_window=1000),
        dict(block_sparse=LocalStride(16, 1, 3)),
        dict(block_sparse=LocalStride(16, 2, 4, 1)),
        dict(block_sparse=LocalStride(32, 1, 3, -1, tp_rank=1), cache_dtype="float8_e4m3fn"),
        dict(block_sparse=LocalStride(16, 1, 3, 1), sliding_window=70, q_len=2),
    ],
    ids=str,
)
def test_paged_attention(options):
    case = dataclasses.replace(PLAIN, **options)
    group, pairs, read = case.num_heads // case.num_kv_heads, 0, 0
    for length in case.seq_lens:
        tokens = [set() for _ in range(case.num_kv_heads)]
        for head, query, token in itertools.product(range(case.num_heads), range(case.q_len), range(length)):
            if sees(case, length, head, query, token):
                pairs += 1
                tokens[head // group].add(token)
        read += sum(map(len, tokens))
    row_bytes = case.head_dim * {"float32": 4}.get(case.dtype, 2)
    token_bytes = case.head_dim * (1 if case.cache_dtype else row_bytes // case.head_dim)
    rows = len(case.seq_lens) * case.q_len * case.num_heads
    # Two products of head_dim multiplications and additions a pair; keys and values; query and output.
    assert costs.paged_attention(case) == (
        pairs * 2 * 2 * case.head_dim,
        2 * read * token_bytes + 2 * rows * row_bytes,
    )


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 6}, {"value_dim": 8, "cache_dtype": "int8"}], ids=str
)
def test_ragged_paged_attention(options):
    """Causal among the newest tokens, too."""
    case = cases.RaggedCase((20, 9, 12), 4, 2, 16, 16, q_lens=(7, 1, 12), padding=0, **options)
    pairs, seen = 0, set()
    for seq, (length, q_len) in enumerate(zip(case.seq_lens, case.q_lens, strict=True)):
        for position in range(length - q_len, length):
            keys = range(max(0, position + 1 - (case.sliding_window or length)), position + 1)
            pairs += 4 * len(keys)
            seen |= {(seq, key) for key in keys}
    dims = 16 + (case.value_dim or 16)
    token_bytes = dims * 2 * (1 if case.cache_dtype else 2)
    assert costs.ragged_paged_attention(case) == (
        pairs * 2 * dims,
        len(seen) * token_bytes + 20 * 4 * dims * 2,
    )


def test_mla_decode_counts_as_flash_mla_does():
    case = cases.MLADecodeCase((30, 41, 7), 6, 2, q_len=2, causal=True)
    flops = num_bytes = 0
    for length in case.seq_lens:
        for _head, _query in itertools.product(range(6), range(2)):
            flops += sum(2 * 576 + 2 * 512 for _token in range(length))
            num_bytes += 2 * (576 + 512)
        num_bytes += length * 2 * 2 * 576
    assert costs.mla_decode(case) == (flops, num_bytes)
    # The published example of the rule: 128 x 4096, 128 heads, at 244 us is 599 TFLOPS.
    published = costs.mla_decode(cases.MLADecodeCase((4096,) * 128, 128))
    assert published.flops / 244e-6 / 1e12 == pytest.approx(599, abs=1)
    assert published.num_bytes / 244e-6 / 1e9 == pytest.approx(2622, abs=15)


def test_fp8_latents_are_656_bytes():
    plain, fp8 = (cases.MLADecodeCase((30, 41), 6, cache_dtype=dtype) for dtype in (None, "float8_e4m3fn"))
    assert costs.mla_decode(plain).num_bytes - costs.mla_decode(fp8).num_bytes == (30 + 41) * (2 * 576 - 656)
    assert costs.mla_decode(plain).flops == costs.mla_decode(fp8).flops


@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn"])
def test_sparse_mla_counts_each_token_once_and_each_pair(cache_dtype):
    case = cases.SparseMLACase((50, 9), 3, q_len=2, topk=20, cache_dtype=cache_dtype)
    workload = WORKLOADS["sparse_mla_decode"](pallas_attn, True)
    chosen, flops, num_bytes = sparse_mla._chosen(case), 0, 0
    assert chosen.shape == (2, 2, 20)
    assert (chosen[1, :, 9:] == -1).all()
    for length, of_sequence in zip(case.seq_lens, chosen.tolist(), strict=True):
        named = [[i for i in ids if i != -1] for ids in of_sequence]
        for ids in named:
            assert len(set(ids)) == len(ids) == min(length, 20)
            assert set(ids) <= set(range(length))
            flops += sum(3 * 2 * (576 + 512) for _ in ids)
            num_bytes += 3 * 2 * (576 + 512)
        num_bytes += len(set(itertools.chain(*named))) * (656 if cache_dtype else 2 * 576)
    assert workload.cost(case) == (flops, num_bytes)
    # The published example of the rule: 128 x 2 query tokens, 128 heads, 2048 ids: 0.146 TFLOP, at 410 TFLOPS 356 us.
    published = cases.SparseMLACase((4096,) * 128, 128, q_len=2, cache_dtype="float8_e4m3fn")
    assert workload.cost(published).flops / 410e12 == pytest.approx(356e-6, rel=0.01)


def test_least_time_is_that_of_the_slower_resource():
    cost = costs.Cost(flops=100, num_bytes=60)
    assert cost.seconds(flops_a_second=10, bytes_a_second=10) == 10
    assert cost.seconds(flops_a_second=100, bytes_a_second=10) == 6


def test_what_no_device_can_do_is_broken():
    assert roofline.broken("NVIDIA H100 80GB HBM3", 700, 3300) is None
    assert "3400 GB/s is more than the 3360" in roofline.broken("NVIDIA H100 80GB HBM3", 700, 3400)
    assert "1200 TFLOPS" in roofline.broken("NVIDIA H100 80GB HBM3", 1200, 100)
    assert roofline.broken("NVIDIA H200", 700, 4000) is None
    assert roofline.broken("NVIDIA H200", 700, 5000) is not None
    assert roofline.broken("NVIDIA H100 PCIe", 700, 2500) is not None
    assert roofline.broken("cpu", 1e9, 1e9) is None


def test_roof_is_the_better_of_reading_and_copying():
    rows = [("copy", None, 3030.0), ("read", None, 3100.0), ("bf16-product", 758.0, None)]
    assert roofline.of(rows) == pytest.approx((3.1e12, 758e12))
    assert roofline.of(rows[:2]) is None
    assert roofline.of([*rows[1:], ("copy", None, 3200.0)]).bytes_a_second == pytest.approx(3.2e12)


def test_roofs_do_what_they_count():
    found = roofline.measurements(roofline.Sizes(num_bytes=1 << 16, width=32))
    copy, flops, num_bytes = found["copy"]
    assert (flops, num_bytes) == (0, 2 << 16)
    words = copy.args[0]
    assert (np.asarray(copy()) == np.asarray(words) + roofline.STEPS).all()
    read, flops, num_bytes = found["read"]
    assert (flops, num_bytes) == (0, 1 << 16)
    most = 0
    for _ in range(roofline.STEPS):
        most = int((np.asarray(words) ^ most).max())
    assert int(read()) == most
    product, flops, num_bytes = found["bf16-product"]
    assert (flops, num_bytes) == (2 * 32**3, 0)
    out = np.asarray(product(), np.float32)
    assert 0.3 < out.std() < 3, "neither zeros nor infinities"


@pytest.mark.parametrize(
    "case",
    [
        flash.FlashCase(20, 20, 4, 2, 16, "bfloat16", causal=True),
        flash.FlashCase(9, 30, 2, 2, 32, value_dim=16, causal=True, q_offset=21, batch=1),
        flash.FlashCase(25, 25, 2, 1, 16, sliding_window=6),
        flash.FlashCase(25, 25, 2, 1, 16, causal=True, sliding_window=6),
        flash.FlashCase(25, 25, 2, 1, 16, causal=True, sliding_window=6, documents=(4, 11, 10)),
        flash.FlashCase(25, 25, 2, 1, 16, documents=(4, 11, 10)),
    ],
    ids=lambda case: case.id,
)
def test_flash_attention_counts_pairs(case):
    pairs = case.batch * case.num_heads * int(flash_inputs.visible(case).sum())
    dims = case.head_dim + (case.value_dim or case.head_dim)
    forward, both = costs.flash_attention(case), costs.flash_attention(case, gradients=True)
    assert forward.flops == 2 * pairs * dims
    assert both.flops == 7 * pairs * dims
    arrays = flash_inputs.make(case)
    held = [arrays[name] for name in ("query", "key", "value", "d_out")]
    assert forward.num_bytes == sum(array.nbytes for array in held)


@pytest.mark.parametrize(
    "case", [blocksparse_inputs.TEST_CASES[2], blocksparse_inputs.TEST_CASES[4]], ids=lambda case: case.id
)
def test_blocksparse_attention_counts_what_heads_see(case):
    pairs = tokens = 0
    for q_len, k_len in case.lens:
        for position in range(k_len - q_len, k_len):
            seen = [blocksparse_inputs.visible(case, head, position) for head in range(case.num_heads)]
            pairs += sum(int(one.sum()) for one in seen)
            if q_len == 1:
                groups = np.reshape(seen, (case.num_kv_heads, case.group, -1))
                tokens += int(groups.any(axis=1).sum())
        if q_len > 1:
            tokens += k_len * case.num_kv_heads
    cost = costs.blocksparse_attention(case, blocksparse.layout_of(case).to_block_mask())
    assert cost.flops == 4 * case.head_dim * pairs
    rows = sum(q_len for q_len, _ in case.lens) * case.num_heads
    assert cost.num_bytes == 4 * case.head_dim * (tokens + rows)
