"""The CUDA schedule kernel: its algorithm on the host, and the kernel itself on a GPU, bit for bit the plain model's
and what jnp gives."""

import ctypes
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_build import ROOT, build_library
from hypothesis import given, settings
from hypothesis import strategies as st
from references.mla_schedule_model import plain_schedule

from pallas_attn._call import ffi
from pallas_attn.ops.mla_decode import schedule as sched
from pallas_attn.ops.mla_decode import schedule_cuda

LARGEST = 2**31 - 1
Schedule = tuple[np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = build_library(tmp_path_factory.mktemp("schedule"), "tests/mla_schedule_host.cc")
    library.deal_on_host.restype = ctypes.c_bool
    return library


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    # CUDA's header is one of ours here, which runs a thread for each of a block's.
    flags = [f"-I{ROOT}/tests", f"-I{ROOT}/tests/cuda_on_host", "-pthread", "-Wno-unknown-pragmas"]
    block = build_library(tmp_path_factory.mktemp("block"), "tests/mla_schedule_block_host.cc", flags=flags)
    block.deal_on_host.restype = ctypes.c_bool
    return block


def on_host(
    library: ctypes.CDLL,
    lengths,
    num_parts: int,
    overhead: int | None,
    rows: int = 1,
    num_workers: int = 128,
) -> Schedule:
    lens = np.array(lengths, np.int32)
    metadata, num_splits = np.full((num_parts, 8), -7, np.int32), np.full(len(lens) + 1, -7, np.int32)
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (lens, metadata, num_splits)]
    within = library.deal_on_host(
        pointers[0], len(lens), num_parts, overhead or 0, rows, num_workers, pointers[1], pointers[2]
    )
    assert within, "wrote behind its working memory"
    return metadata, num_splits


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def in_jnp(lengths, num_parts: int, overhead: int | None, rows: int):
    if overhead is None:
        return sched.tile_schedule(lengths, num_parts, sched.default_overhead(lengths, num_parts, rows))
    return sched.tile_schedule(lengths, num_parts, overhead)


def assert_equal(got: Schedule, want, what) -> None:
    np.testing.assert_array_equal(np.asarray(got[1]), np.asarray(want[1]), err_msg=f"num_splits of {what}")
    np.testing.assert_array_equal(np.asarray(got[0]), np.asarray(want[0]), err_msg=f"metadata of {what}")


LENGTH = st.one_of(
    st.integers(0, 192), st.sampled_from([0, 0, 1, 64, 65, 320, 640]), st.integers(0, 20_000), st.just(4096)
)


@pytest.mark.once
@settings(max_examples=600, deadline=None)
@given(
    st.lists(LENGTH, min_size=1, max_size=300),
    st.one_of(st.sampled_from([1, 7, 66, 132, 264]), st.integers(1, 4096)),
    st.one_of(st.sampled_from([1, 2, 5]), st.integers(1, 1024)),
    st.sampled_from([128, 256, 1024]),
)
def test_equals_the_plain_model(
    library: ctypes.CDLL, lengths, num_parts: int, overhead: int, num_workers: int
) -> None:
    rows, splits, _ = plain_schedule(lengths, num_parts, overhead)
    got = on_host(library, lengths, num_parts, overhead, num_workers=num_workers)
    assert_equal(got, (rows, splits), lengths)


@pytest.mark.once
@settings(max_examples=500, deadline=None)
@given(st.integers(1, LARGEST), st.integers(0, 2**14 - 1), st.integers(-1, 1))
def test_small_quotients(library: ctypes.CDLL, divisor: int, quotient: int, beside: int) -> None:
    dividend = min(max(0, quotient * divisor + beside), LARGEST)
    assert library.small_quotient(dividend, divisor) == dividend // divisor


@pytest.mark.once
@pytest.mark.parametrize("stride", [2**14, 2**15, 2**18])
def test_long_strides(library: ctypes.CDLL, stride: int) -> None:
    """Every part snaps to the start but one, as far ahead as it can: together they go twice round the circle."""
    overhead = 1024
    pairs = 2 * stride // overhead
    for beside in (0, 1):
        lengths = [64 * (stride // 2 - overhead), 64 * (stride // 2 - beside)] * pairs
        rows, splits, _ = plain_schedule(lengths, pairs + 2, overhead)
        got = on_host(library, lengths, pairs + 2, overhead)
        assert_equal(got, (rows, splits), beside)


@pytest.mark.once
@pytest.mark.parametrize("num_threads", [128, 256])
@pytest.mark.parametrize("num_seqs", [1, 3, 31, 32, 33, 100, 128, 129, 300])
def test_the_block_equals_the_plain_model(block: ctypes.CDLL, num_seqs: int, num_threads: int) -> None:
    """Its scans, shuffles and barriers too, which only the kernel has."""
    rng = np.random.default_rng(num_seqs)
    varying = rng.integers(0, 6000, num_seqs) * rng.integers(0, 2, num_seqs)
    for lengths, num_parts, overhead in (([4096] * num_seqs, 132, 2), (varying.tolist(), 66, 5)):
        rows, splits, _ = plain_schedule(lengths, num_parts, overhead)
        got = on_host(block, lengths, num_parts, overhead, num_workers=num_threads)
        assert_equal(got, (rows, splits), lengths)


def batches(num_seqs: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Lengths that are alike, that are not, and that no sequence has."""
    shortest = rng.integers(1, 8000)
    wild = rng.choice([-5, -(2**31), 0, 1, 4096, LARGEST, LARGEST - 63], num_seqs)
    return [
        shortest + rng.integers(0, 100, num_seqs),
        shortest + 2 * np.arange(num_seqs),
        rng.normal(4096, 2048, num_seqs).clip(1).astype(np.int64),
        rng.integers(0, 300, num_seqs) * rng.integers(0, 2, num_seqs),
        wild,
        np.full(num_seqs, LARGEST),
        np.full(num_seqs, -1),
        # Around each limit of the default overhead's rule.
        *(np.full(num_seqs, length) for length in range(512, 65536, 512)),
    ]


# (num_seqs, num_parts, rows, overhead). The default overhead depends on lengths where parts are a few more than
# sequences, or than a share of them.
CALLS = [
    (1, 132, 64, None),
    (8, 132, 64, None),
    (128, 132, 16, None),
    (128, 132, 64, None),
    (130, 66, 128, None),
    (128, 66, 256, None),
    (128, 128, 64, None),
    (60, 66, 128, None),
    (1, 132, 64, 5),
    (130, 66, 64, 5),
]


@pytest.mark.once
@pytest.mark.parametrize(("num_seqs", "num_parts", "rows", "overhead"), CALLS)
def test_equals_jnp(
    library: ctypes.CDLL, num_seqs: int, num_parts: int, rows: int, overhead: int | None
) -> None:
    for lengths in batches(num_seqs, np.random.default_rng(num_seqs)):
        want = in_jnp(jnp.asarray(lengths, jnp.int32), num_parts, overhead, rows)
        assert_equal(on_host(library, lengths, num_parts, overhead, rows), want, lengths[:8])


def test_the_default_overhead_is_asked_for() -> None:
    """Or the comparison above would pass without its rule."""
    chosen = {
        int(sched.default_overhead(jnp.asarray(lengths, jnp.int32), 132, 64))
        for lengths in batches(128, np.random.default_rng(128))
    }
    assert len(chosen) > 2


def test_the_most_there_may_be(library: ctypes.CDLL) -> None:
    lengths = np.random.default_rng(0).integers(0, 3000, schedule_cuda.MOST_SEQS).tolist()
    for num_parts, overhead in ((4096, 1024), (4096, 1), (132, 5)):
        rows, splits, _ = plain_schedule(lengths, num_parts, overhead)
        assert_equal(on_host(library, lengths, num_parts, overhead), (rows, splits), num_parts)
    on_host(library, [LARGEST] * schedule_cuda.MOST_SEQS, 4096, 1024)  # no overflow
    for num_parts in (1, 2, 3):
        rows, splits, _ = plain_schedule([LARGEST] * 32, num_parts, 1024)
        assert_equal(on_host(library, [LARGEST] * 32, num_parts, 1024), (rows, splits), num_parts)


def test_the_limits_are_pythons() -> None:
    text = (ROOT / "csrc/mla/schedule/dealing.h").read_text()
    limits = dict(re.findall(r"constexpr int (kMost\w+) = (.+);", text))
    assert int(limits["kMostRequests"]) == schedule_cuda.MOST_SEQS
    assert int(limits["kMostParts"]) == sched.MOST_PARTS
    assert int(limits["kMostOverheadPages"]) == sched.MOST_OVERHEAD_BLOCKS
    assert limits["kMostPages"] == "1 << 30"
    assert sched.MOST_BLOCKS == 1 << 30


# ---- on a GPU


@pytest.fixture
def _needs_library() -> None:
    available, reason = ffi.is_available()
    if not available:
        pytest.skip(str(reason))


def on_gpu(lengths, num_parts: int, overhead: int | None, rows: int = 1):
    return schedule_cuda.mla_schedule_cuda(jnp.asarray(lengths, jnp.int32), num_parts, overhead, rows)


@pytest.mark.gpu
@pytest.mark.usefixtures("_needs_library")
@pytest.mark.parametrize("overhead", [1, 5, 1024])
@pytest.mark.parametrize("num_parts", [1, 7, 66, 132, 264, 4096])
def test_kernel_equals_the_plain_model(num_parts: int, overhead: int) -> None:
    rng = np.random.default_rng(num_parts)
    cases = [[0], [1], [32768], [0, 0, 0], [4096] * 128, [64 * 5] * 8, [100_000] + [1] * 32]
    cases += [rng.integers(0, most, n).tolist() for n in (2, 31, 200, 1500, 4096) for most in (200, 9000)]
    for lengths in cases:
        rows, splits, _ = plain_schedule(lengths, num_parts, overhead)
        assert_equal(on_gpu(lengths, num_parts, overhead), (rows, splits), lengths[:8])


@pytest.mark.gpu
@pytest.mark.usefixtures("_needs_library")
@pytest.mark.parametrize(("num_seqs", "num_parts", "rows", "overhead"), [*CALLS, (1000, 132, 64, None)])
def test_kernel_equals_jnp(num_seqs: int, num_parts: int, rows: int, overhead: int | None) -> None:
    for lengths in batches(num_seqs, np.random.default_rng(num_seqs)):
        want = in_jnp(jnp.asarray(lengths, jnp.int32), num_parts, overhead, rows)
        assert_equal(on_gpu(lengths, num_parts, overhead, rows), want, lengths[:8])


@pytest.mark.gpu
@pytest.mark.usefixtures("_needs_library")
def test_kernel_under_vmap_and_in_a_loop() -> None:
    lengths = jnp.asarray(np.random.default_rng(0).integers(0, 5000, (3, 40)), jnp.int32)
    batched = jax.jit(jax.vmap(lambda lens: on_gpu(lens, 132, None, 64)))(lengths)
    scanned = jax.jit(lambda: jax.lax.map(lambda lens: on_gpu(lens, 132, None, 64), lengths))()
    for i, lens in enumerate(lengths):
        want = in_jnp(lens, 132, None, 64)
        assert_equal((batched[0][i], batched[1][i]), want, i)
        assert_equal((scanned[0][i], scanned[1][i]), want, i)


@pytest.mark.gpu
@pytest.mark.usefixtures("_needs_library")
def test_mla_schedule_is_the_kernels_on_hopper() -> None:
    lengths = jnp.asarray([700, 0, 5000], jnp.int32)
    text = jax.jit(functools.partial(sched.mla_schedule, num_heads=128)).lower(lengths).as_text()
    assert "pallas_attn_mla_schedule_sm90" in text
    want = in_jnp(lengths, sched.num_sm_parts(128, 1, jax.devices()[0].core_count), None, 128)
    assert_equal(sched.mla_schedule(lengths, num_heads=128), want, "mla_schedule")


@pytest.mark.gpu
@pytest.mark.usefixtures("_needs_library")
@pytest.mark.parametrize(
    ("num_seqs", "num_parts", "overhead", "rows", "message"),
    [
        (4097, 132, 5, 1, "'seq_lens': expected between 1 and 4096, got 4097"),
        (0, 132, 5, 1, "'seq_lens': expected between 1 and 4096, got 0"),
        (3, 0, 5, 1, "'schedule_metadata': expected between 1 and 4096, got 0"),
        (3, 4097, 5, 1, "'schedule_metadata': expected between 1 and 4096, got 4097"),
        (3, 132, 1025, 1, "'overhead_blocks': expected between 0 and 1024, got 1025"),
        (3, 132, None, 0, "'rows': expected between 1 and 2147483647, got 0"),
    ],
)
def test_handler_refuses(
    num_seqs: int, num_parts: int, overhead: int | None, rows: int, message: str
) -> None:
    with pytest.raises(Exception, match="pallas_attn_mla_schedule_sm90: argument") as error:
        jax.block_until_ready(on_gpu(np.ones(num_seqs), num_parts, overhead, rows))
    assert message in str(error.value)
