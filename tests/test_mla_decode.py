"""Numerics of `mla_decode` against float64 torch, on the CPU: xla, and the kernel in interpret mode."""

import dataclasses
import functools
from typing import Any

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import op_cases
import pytest
import torch
from references.mla_decode_torch import mla_decode as reference
from support import COMPILED, ON_GPU, unchecked

import pallas_attn
from pallas_attn._call import ffi
from pallas_attn.ops.mla_decode import MLADecodeConfig, MLASchedule
from pallas_attn.testing import cases, compare

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
ANY_PAGE_SIZE = ["xla", "interpret", *ON_GPU]
IMPLEMENTATIONS = [*ANY_PAGE_SIZE, CUDA]


def served_cases():
    for case in op_cases.of("mla_decode"):
        # The newest jax has those that touch everything once: all cases are lowered on both.
        marks = [] if case.fast else [pytest.mark.once]
        yield from (
            pytest.param(case, name, id=f"{case.id}-{name}", marks=marks) for name in ("xla", "interpret")
        )
        on_gpu = [] if case.dtype == "float32" else [*COMPILED]
        if on_gpu and case.page_size == 64:
            on_gpu.append("cuda")
        yield from (
            pytest.param(case, name, id=f"{case.id}-{name}", marks=pytest.mark.gpu) for name in on_gpu
        )


def require(implementation: str) -> None:
    available, reason = ffi.is_available()
    if implementation == "cuda" and not available:
        pytest.skip(str(reason))


def schedule_of(case: cases.MLADecodeCase, seq_lens) -> MLASchedule | None:
    if case.num_parts is None:
        return None
    return pallas_attn.mla_schedule(
        seq_lens,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        q_len=case.q_len,
        num_parts=case.num_parts,
        overhead_blocks=1,
    )


def run(case: cases.MLADecodeCase, data: inputs.LatentInputs, implementation: str, **options):
    return compiled(case, implementation, **options)(*data.arguments())


@functools.cache
def compiled(case: cases.MLADecodeCase, implementation: str, **options):
    require(implementation)
    config = None
    if implementation not in ("xla", "cuda") and case.config:
        block_q = 16 if case.q_len * case.group <= 16 else 64
        defaults: dict[str, Any] = {"block_q": block_q, "block_kv": 32, "num_splits": 1, "num_warps": 4}
        config = MLADecodeConfig(**{**defaults, **dict(case.config)})

    @jax.jit
    def call(query, cache, tables, lens):
        return pallas_attn.mla_decode(
            *(query, cache, tables, lens),
            schedule=schedule_of(case, lens),
            causal=case.causal,
            return_lse=True,
            implementation=implementation,
            config=config,
            **options,
        )

    return call


def check(case: cases.MLADecodeCase, data: inputs.LatentInputs, out, lse, **options) -> None:
    expected, expected_lse = reference(data, causal=case.causal, **options)
    rounded, _ = reference(data, causal=case.causal, rounding=getattr(torch, case.dtype), **options)
    about = dict(dtype=case.dtype, case_id=case.id)
    compare.assert_rows_close(
        out,
        expected,
        rounded_reference=rounded,
        lengths=case.seq_lens,
        page_size=case.page_size,
        **about,
    )
    compare.assert_lse_close(lse, expected_lse, **about)


@pytest.mark.parametrize(("case", "implementation"), list(served_cases()))
def test_matches_reference(case, implementation):
    data = inputs.make(case)
    out, lse = run(case, data, implementation)
    assert out.dtype == jnp.dtype(case.dtype)
    assert lse.dtype == jnp.float32
    check(case, data, out, lse)


def cut_case(num_parts: int | None) -> cases.MLADecodeCase:
    """Every sequence in several splits, by a schedule or by `num_splits`."""
    splits = (("num_splits", 4), ("min_split_tokens", 256))
    return cases.MLADecodeCase((700, 1027, 769), 4, page_size=64, num_parts=num_parts, config=splits)


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_parts", [None, 5])
def test_no_boundary_token_is_lost(num_parts, implementation):
    """Each sequence hides most of its weight in one token at a boundary, at one boundary after another."""
    case = cut_case(num_parts)
    call = compiled(case, implementation)
    cut = 320 if num_parts is None else split_end(case)
    places = {
        "first": 0,
        "last": None,
        "page end": 191,
        "page start": 192,
        "split end": cut - 1,
        "split start": cut,
    }
    for place in places.values():
        data = inputs.make(case)
        positions = {s: n - 1 if place is None else place for s, n in enumerate(case.seq_lens)}
        inputs.plant_needles(case, data, positions)
        check(case, data, *call(*data.arguments()))


def split_end(case: cases.MLADecodeCase) -> int:
    schedule = schedule_of(case, jnp.asarray(case.seq_lens, jnp.int32))
    assert schedule is not None
    return int(schedule.tile_scheduler_metadata[0, 3])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_causal_boundary(implementation):
    """Each of the newest four tokens, made to swamp all others, is seen by its own query token and later ones."""
    case = cases.MLADecodeCase((130, 3, 64, 1), 4, q_len=4, causal=True, num_parts=2)
    data = inputs.make(case)
    call = compiled(case, implementation)
    out, lse = call(*data.arguments())
    check(case, data, out, lse)
    # Sequence 1 has 3 tokens for 4 query tokens, sequence 3 has one: the first ones see nothing.
    assert np.isneginf(lse[1, 0]).all()
    assert np.isneginf(lse[3, :3]).all()
    assert (np.float32(out[3, :3]) == 0).all()
    for position, row in ((129, 3), (128, 2), (127, 1), (126, 0)):
        bent = inputs.LatentInputs(*(x.copy() for x in vars(data).values()))
        place = inputs.token_places(bent.block_tables[0], 130, case.page_size)
        bent.latent_cache[place[0][position], place[1][position]] = 30
        changed, _ = call(*bent.arguments())
        same = [(np.float32(changed[0, i]) == np.float32(out[0, i])).all() for i in range(4)]
        assert same == [i < row for i in range(4)]


@pytest.mark.parametrize("implementation", ANY_PAGE_SIZE)
@pytest.mark.parametrize("num_parts", [None, 5])
def test_bad_pages_and_lengths_poison_only_their_rows(num_parts, implementation):
    splits = (("num_splits", 3),)
    # No column is spare: every entry of sequence 4 is a good page, and only its length can tell.
    case = cases.MLADecodeCase((608,) * 8, 4, page_size=16, spare_pages=0, num_parts=num_parts, config=splits)
    data = inputs.make(case)
    call = compiled(case, implementation)
    good, good_lse = (np.array(x) for x in call(*data.arguments()))
    data.block_tables[1, 0] = -1
    data.block_tables[2, 37] = data.latent_cache.shape[0]  # the last page in use
    data.block_tables[3, 20] = 2147480000
    data.seq_lens[4] = data.block_tables.shape[1] * case.page_size + 1
    data.seq_lens[5] = -1
    data.seq_lens[6] = 100_000
    out, lse = call(*data.arguments())
    for seq in range(8):
        if seq in (0, 7):
            # The other lengths decide how sequences are cut, so bits may differ, values may not.
            np.testing.assert_allclose(np.float32(out[seq]), np.float32(good[seq]), atol=2e-2)
            np.testing.assert_allclose(lse[seq], good_lse[seq], atol=1e-4)
        else:
            assert np.isnan(np.float32(out[seq])).all(), f"sequence {seq} must be NaN"
            assert np.isnan(lse[seq]).all(), f"lse of sequence {seq} must be NaN"


@pytest.mark.parametrize("implementation", ANY_PAGE_SIZE)
def test_pages_shared_between_sequences(implementation):
    case = cases.MLADecodeCase((100, 100, 100), 4, page_size=16)
    data = inputs.make(case)
    data.block_tables[1] = data.block_tables[0]
    data.block_tables[2, :3] = data.block_tables[0, :3]
    check(case, data, *run(case, data, implementation))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scale(implementation):
    case = cases.MLADecodeCase((5, 77), 4, dtype="float16")
    data = inputs.make(case)
    check(case, data, *run(case, data, implementation, scale=192**-0.5), scale=192**-0.5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_parts", [None, 5])
def test_same_inputs_same_bits(num_parts, implementation):
    case = cut_case(num_parts)
    data = inputs.make(case)
    call = compiled(case, implementation)
    first, second = (call(*data.arguments()) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_schedule_for_other_lengths_stays_inside_memory(implementation):
    """Wrong results are the caller's; a fault or a read of foreign pages would be ours."""
    require(implementation)
    case = cases.MLADecodeCase((600, 64, 0), 4)
    data = inputs.make(case)
    stale = pallas_attn.mla_schedule(jnp.asarray([50_000, 7, 9_000], jnp.int32), num_heads=4, num_parts=6)
    wild = MLASchedule(stale.tile_scheduler_metadata * -977, stale.num_splits * 1_000_003)
    # Differences of such numbers overflow.
    least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    wilder = MLASchedule(
        stale.tile_scheduler_metadata.at[:, 1].set(most).at[:, 3].set(least),
        jnp.asarray([7, least, most, least], jnp.int32),
    )
    right = schedule_of(dataclasses.replace(case, num_parts=6), jnp.asarray(case.seq_lens, jnp.int32))
    arguments = data.arguments()
    # Outside jit a schedule for other lengths is refused.
    call = jax.jit(functools.partial(pallas_attn.mla_decode, return_lse=True, implementation=implementation))
    for schedule in (stale, wild, wilder):
        out, lse = call(*arguments, schedule=schedule)
        assert (out.shape, lse.shape) == ((3, 1, 4, 512), (3, 1, 4))
        for before, after in zip(data.arguments(), arguments, strict=True):
            assert np.asarray(before).tobytes() == np.asarray(after).tobytes()
        check(case, data, *call(*arguments, schedule=right))
    # The first sequence is shorter than the schedule says: all of its tokens were dealt, and nothing else was seen.
    out, lse = call(*arguments, schedule=stale)
    expected, expected_lse = reference(data, causal=False)
    compare.assert_rows_close(out[:1], expected[:1], dtype=case.dtype, case_id="stale")
    compare.assert_lse_close(lse[:1], expected_lse[:1], dtype=case.dtype, case_id="stale")


@pytest.mark.once
@pytest.mark.parametrize("num_seqs", [3, 130])
def test_a_length_beyond_all_memory_spoils_no_other_sequence(num_seqs):
    """Of the schedule too, whose sums would overflow."""
    case = cases.MLADecodeCase((65, 1, 64), 4)
    data = inputs.make(case)
    query, cache, tables, lens = data.arguments()
    many = [jnp.repeat(x[1:2], num_seqs - 3, axis=0) for x in (query, tables)]
    query, tables = jnp.concatenate([query, many[0]]), jnp.concatenate([tables, many[1]])
    expected, _ = reference(data, causal=False)

    @jax.jit
    def call(lens):
        schedule = MLASchedule(*pallas_attn.get_mla_metadata(lens, 4, 1))
        return pallas_attn.mla_decode(
            query, cache, tables, lens, schedule=schedule, implementation="interpret"
        )

    for length in (2**31 - 1, 2**31 - 64, 2**30):
        many_lens = jnp.full(num_seqs - 3, length, jnp.int32)
        out: Any = call(jnp.concatenate([lens.at[1].set(length), many_lens]))
        for seq in (0, 2):
            np.testing.assert_allclose(np.float32(out[seq]), np.float32(expected[seq]), atol=3e-2)
        assert np.isnan(np.float32(out[1])).all()


def test_numpy_arrays_will_do():
    data = inputs.make(cases.MLADecodeCase((20, 3), 4))
    arrays = tuple(vars(data).values())
    # Without the type checks that jaxtyping adds in tests.
    out = unchecked(pallas_attn.mla_decode)(*arrays, implementation="xla")
    np.testing.assert_array_equal(out, pallas_attn.mla_decode(*data.arguments(), implementation="xla"))


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("num_parts", [None, 3])
def test_with_64_bit_types_enabled(num_parts, implementation):
    """Users may compute in float64 beside it."""
    case = cases.MLADecodeCase((0, 100, 70), 4, q_len=2, causal=True, page_size=16, num_parts=num_parts)
    data = inputs.make(case)
    with jax.enable_x64(True):
        out, lse = run(case, data, implementation)
    check(case, data, out, lse)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("num_parts", [None, 3])
def test_vmap(num_parts, implementation):
    case = cases.MLADecodeCase((3, 100, 70), 4, dtype="float32", page_size=16, num_parts=num_parts)
    query, *rest = inputs.make(case).arguments()
    call = compiled(case, implementation)
    outs, lses = jax.vmap(call, in_axes=(0, None, None, None))(jnp.stack([query, 2 * query]), *rest)
    for out, lse, q in zip(outs, lses, (query, 2 * query), strict=True):
        expected, expected_lse = call(q, *rest)
        np.testing.assert_allclose(out, expected, atol=1e-5)
        np.testing.assert_allclose(lse, expected_lse, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_flash_mla_names(implementation):
    """The seed's two functions: its shapes, natural lse, +inf for rows that see nothing."""
    require(implementation)
    case = cases.MLADecodeCase((0, 100, 1, 700), 4, q_len=2, causal=True)
    data = inputs.make(case)

    @jax.jit
    def step(q, k_cache, block_table, cache_seqlens):
        metadata, num_splits = pallas_attn.get_mla_metadata(cache_seqlens, 2 * 4 // 1, 1)
        return pallas_attn.flash_mla_with_kvcache(
            *(q, k_cache, block_table, cache_seqlens, 512, metadata, num_splits),
            causal=True,
            implementation=implementation,
        )

    out, lse = step(*data.arguments())
    expected, expected_lse = reference(data, causal=True)
    expected_lse = np.where(np.isneginf(expected_lse), np.inf, expected_lse).swapaxes(1, 2)
    assert np.isposinf(lse[0]).all()
    compare.assert_rows_close(out, expected, dtype=case.dtype, case_id=case.id)
    compare.assert_lse_close(lse, expected_lse, dtype=case.dtype, case_id=case.id)


def test_flash_mla_without_metadata_deals_the_work_itself():
    data = inputs.make(cases.MLADecodeCase((100, 1), 4, dtype="float32"))
    query, cache, tables, lens = data.arguments()
    out, _ = pallas_attn.flash_mla_with_kvcache(query, cache, tables, lens, 512, implementation="xla")
    np.testing.assert_array_equal(
        out, pallas_attn.mla_decode(query, cache, tables, lens, implementation="xla")
    )
    metadata, _ = pallas_attn.get_mla_metadata(lens, 4, 1)
    with pytest.raises(TypeError, match="argument 'num_splits'"):
        pallas_attn.flash_mla_with_kvcache(query, cache, tables, lens, 512, metadata)


def test_schedule_is_computed_once_for_all_layers():
    case = cases.MLADecodeCase((20, 333), 4, dtype="float32")
    data = inputs.make(case)

    @functools.partial(jax.jit, static_argnums=0)
    def layers(scheduled, query, cache, tables, lens):
        schedule = pallas_attn.mla_schedule(lens, num_heads=4, num_parts=3) if scheduled else None

        def layer(query, _):
            out = pallas_attn.mla_decode(query, cache, tables, lens, schedule=schedule)
            return query.at[..., :512].add(out), None

        return jax.lax.scan(layer, query, None, length=3)[0]

    np.testing.assert_array_equal(layers(True, *data.arguments()), layers(False, *data.arguments()))
