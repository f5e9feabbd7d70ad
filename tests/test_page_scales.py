"""Scales of each page: who sets them, what a write makes of them, and that attention uses the right page's."""

import functools

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references.paged_attention_torch import paged_attention as reference
from support import ON_GPU, unchecked

import pallas_attn
from pallas_attn import PagedKVCache, page_scales, write_kv
from pallas_attn._tile import layout, quantization
from pallas_attn.testing import cases, compare

IMPLEMENTATIONS = ["xla", "interpret", *ON_GPU]
SIZES = dict(page_size=4, dtype=jnp.int8, margin=1.0)


def test_a_page_that_is_begun_gets_the_scale_of_its_tokens():
    k_scale = jnp.full((5, 2), jnp.nan).at[1].set(3.0)
    v_scale = jnp.ones((5, 2))
    # The end of page 1, all of page 3 but for its last slot, one that is skipped, the first slot of page 2.
    slots = jnp.array([7, 12, 13, 14, -1, 8, 99], jnp.int32)
    key = (
        jnp.ones((7, 2, 4))
        .at[2, 0, 1]
        .set(-254.0)
        .at[0]
        .set(1e6)
        .at[4]
        .set(1e6)
        .at[5]
        .set(0.0)
        .at[6]
        .set(1e6)
    )
    value = jnp.ones((7, 2, 8)).at[5].set(12.7)
    k_new, v_new = jax.jit(functools.partial(page_scales, **SIZES))(key, value, k_scale, v_scale, slots)
    expected = np.full((5, 2), np.nan)
    expected[1] = 3.0  # begun earlier: what is larger saturates
    expected[3] = 2.0, 1 / 127
    expected[2] = 1.0  # nothing but zeros
    np.testing.assert_allclose(k_new, expected, rtol=1e-6)
    np.testing.assert_allclose(v_new, [[1, 1], [1, 1], [0.1, 0.1], [1 / 127] * 2, [1, 1]], rtol=1e-6)


def test_the_margin_leaves_room_and_tiny_values_have_a_scale():
    key = jnp.full((1, 1, 2), 1e-37)
    value = jnp.full((1, 1, 2), 224.0)
    ones = jnp.ones((1, 1))
    k_scale, v_scale = page_scales(
        key, value, ones, ones, jnp.zeros(1, jnp.int32), page_size=4, dtype=jnp.float8_e4m3fn, margin=4.0
    )
    assert float(v_scale[0, 0]) == 2.0
    assert 0 < float(k_scale[0, 0]) < 1e-37


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("grows", [False, True])
def test_what_is_no_number_leaves_the_tokens_beside_it_alone(implementation, grows):
    """NaN comes back to those who read it; Inf saturates."""
    new = np.random.default_rng(0).uniform(1, 2, (1, 4, 2, 16)).astype(np.float32)
    dtype = jnp.float8_e4m3fn

    @jax.jit
    def written(new):
        if grows:
            cache = small(page_size=4, dtype=dtype)
            both, positions = jnp.concatenate([new, new]), jnp.array([[0, 1, 2, 3], [-1] * 4], jnp.int32)
            cache = cache.write(1, both, both, positions, implementation=implementation)
            return cache.key_cache, cache.k_scale
        pools, scales, slots = [jnp.zeros((3, 4, 2, 16), dtype)] * 2, [jnp.ones((3, 2))] * 2, jnp.arange(4, 8)
        scales = page_scales(new[0], new[0], *scales, slots, page_size=4, dtype=dtype)
        k_scale, v_scale = scales
        options = dict(k_scale=k_scale, v_scale=v_scale, implementation=implementation)
        return write_kv(new[0], new[0], *pools, slots, **options)[0], k_scale

    new[0, 1, 0, 3] = new[0, 2, 1, 5] = 1.0
    pool, scales = (np.asarray(x, np.float32) for x in written(new))
    [page] = np.flatnonzero((pool != 0).any(axis=(1, 2, 3)))
    pool[page, 1, 0, 3], pool[page, 2, 1, 5] = np.nan, 448
    new[0, 1, 0, 3], new[0, 2, 1, 5] = np.nan, np.inf
    for got, wanted in zip(written(new), (pool, scales), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), wanted)


@pytest.mark.once
def test_nan_stays_nan_where_a_maximum_leaves_it_out(monkeypatch):
    """As Pallas' does on a GPU: a row that cannot be right must not look right in an 8-bit output."""
    monkeypatch.setattr(jnp, "clip", lambda x, least, most: jnp.fmin(jnp.fmax(x, least), most))
    for rounded in (
        quantization.saturated(jnp.array([np.nan, 1e9]), jnp.float8_e4m3fn),
        quantization.quantize(jnp.array([np.nan, 1e9]), jnp.float8_e5m2, jnp.float32(1)),
        quantization.query_as(jnp.array([np.nan, 1e9], jnp.bfloat16), jnp.float16),
    ):
        largest = float(jnp.finfo(rounded.dtype).max)
        np.testing.assert_array_equal(np.asarray(rounded, np.float32), [np.nan, largest])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("order", ["NHD", "PACKED"])
def test_writes_take_the_scale_of_the_slots_page(order, implementation):
    rng = np.random.default_rng(0)
    scales = np.full((3, 2), np.nan, np.float32)
    scales[0], scales[2] = (1.0, 0.5), (1e-3, 64.0)
    slots = np.array([0, 9, 11, -1], np.int32)
    new = jnp.asarray(rng.uniform(-60, 60, (4, 2, 16)), jnp.float32)
    shape = (3, 4, 2, 16) if order == "NHD" else (3, 2, 1, 4, 16)
    pools = jnp.zeros(shape, jnp.int8), jnp.zeros(shape if order == "NHD" else (3, 2, 16, 4), jnp.int8)
    options = dict(layout=order, implementation=implementation)
    keys, values = write_kv(new, new, *pools, jnp.asarray(slots), k_scale=scales, v_scale=scales, **options)
    expected = np.zeros((3, 4, 2, 16))
    for token, slot in enumerate(slots[:3]):
        stored = np.asarray(new[token]) / scales[slot // 4][:, None]
        expected[slot // 4, slot % 4] = np.clip(np.round(stored), -127, 127)
    if order == "PACKED":
        keys, values = jnp.moveaxis(keys[:, :, 0], 1, 2), jnp.moveaxis(values, -1, 1)
    np.testing.assert_array_equal(keys, expected)
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", ["paged", "ragged"])
def test_a_needle_in_a_page_of_small_values(op, implementation):
    """All weight on one token, in a page whose scale is a thousandth of its neighbours': its value comes back."""
    scales = np.full((6, 1), np.nan, np.float32)
    scales[[4, 1, 3], 0] = 1.0, 1e-3, 16.0
    keys, values = (np.full((6, 16, 1, 32), 0x7F, np.uint8).view(jnp.float8_e4m3fn) for _ in range(2))
    rng = np.random.default_rng(0)
    for page in (4, 1, 3):
        keys[page] = rng.uniform(-1, 1, (16, 1, 32))
        values[page] = rng.uniform(-8, 8, (16, 1, 32))
    query = rng.standard_normal((1, 1, 32)).astype(np.float32)
    # By the key's own scale its logit is 40; by another page's it would be 40000, or 0.04.
    k_scale = np.where(np.isnan(scales), np.nan, 1.0).astype(np.float32)
    k_scale[1] = 1e-3
    wanted = query[0, 0] * 40 / np.vdot(query, query) * 32**0.5
    keys[1, 5, 0] = wanted / 1e-3 / np.abs(wanted / 1e-3).max() * 400
    k_scale[1] = np.abs(wanted).max() / 400
    arrays = (query, keys, values, np.array([[4, 1, 3]], np.int32), np.array([48], np.int32))
    more = [] if op == "paged" else [np.array([0, 1], np.int32)]
    attention = pallas_attn.paged_attention if op == "paged" else pallas_attn.ragged_paged_attention
    options = dict(k_scale=k_scale, v_scale=scales, implementation=implementation)
    out = unchecked(attention)(*map(jnp.asarray, [*arrays, *more]), **options)
    np.testing.assert_allclose(out[0, 0], values[1, 5, 0].astype(np.float32) * 1e-3, rtol=2e-2, atol=1e-6)


@pytest.mark.once
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.control
def test_an_ignored_page_scale_is_caught(name):
    case = cases.DecodeCase((77, 40), 4, 2, 32, 16, cache_dtype="int8", scale_per_page=True)
    data = inputs.make(case)
    expected, _ = reference(case, data)
    one = np.broadcast_to(np.nanmedian(data.extras[name], axis=0), data.extras[name].shape)
    out, _ = reference(case, data.copy(extras=data.extras | {name: np.array(one)}))
    with pytest.raises(AssertionError):
        compare.assert_rows_close(out, expected, dtype=case.dtype, case_id=case.id)


def small(**options) -> PagedKVCache:
    tables = jnp.array([[0, 1], [2, 3]], jnp.int32)
    sizes = dict(num_layers=2, num_pages=5, page_size=4, num_kv_heads=2, head_dim=16, dtype=jnp.int8)
    return PagedKVCache.create(**{**sizes, **options}, block_tables=tables, scale_per_page=True)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_a_cache_whose_pages_have_scales(implementation):
    """A later prompt, a thousand times as large, keeps its precision, and so does the one before."""
    rng = np.random.default_rng(0)
    new = rng.standard_normal((2, 6, 2, 16)).astype(np.float32)
    new[1] *= 1000
    counted = np.arange(6, dtype=np.int32)
    cache = small()
    for seq in range(2):
        positions = jnp.asarray(np.where(np.arange(2)[:, None] == seq, counted, -1).astype(np.int32))
        cache = cache.write(1, jnp.asarray(new), jnp.asarray(-new), positions, implementation=implementation)
    assert cache.k_scale.shape == (10, 2)
    np.testing.assert_array_equal(cache.k_scale[:5], 1)  # the other layer's
    calls = dict(implementation="xla", **cache.scales(1))
    for seq in range(2):
        tables = cache.layer_tables(1)[seq : seq + 1]
        # A query of zeros gives the values' mean.
        out = pallas_attn.paged_attention(
            jnp.zeros((1, 4, 16)),
            cache.key_cache,
            cache.value_cache,
            tables,
            jnp.array([6], jnp.int32),
            **calls,
        )
        mean = -new[seq].mean(axis=0).repeat(2, axis=0)
        np.testing.assert_allclose(out[0], mean, atol=0.02 * np.abs(new[seq]).max())
    copied = cache.copy_pages([2, 3], [4, -1])
    np.testing.assert_array_equal(copied.k_scale[9], cache.k_scale[7])
    np.testing.assert_array_equal(copied.v_scale[4], cache.v_scale[2])
    assert cache.calibrate(1, jnp.asarray(new), jnp.asarray(new), jnp.zeros((2, 6), jnp.int32)) is cache


def stored(cache: PagedKVCache, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [slots, 2, 16] of the first page of layer 1, as attention takes them."""
    page = cache.num_pages
    pools = (
        (layout.to_nhd(pool[page], cache.layout, which), scale[page])
        for which, pool, scale in (
            ("key", cache.key_cache, cache.k_scale),
            ("value", cache.value_cache, cache.v_scale),
        )
    )
    keys, values = (np.asarray(x, np.float32)[:slots] * np.asarray(scale)[:, None] for x, scale in pools)
    return keys, values


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("order", "dtype"), [("NHD", jnp.int8), ("PACKED", jnp.int8), ("HND", jnp.float8_e4m3fn)]
)
def test_a_page_grows_with_its_tokens_and_keeps_them(order, dtype, implementation):
    """Fed one by one, each larger than the one before: no token is off by more than a step of the last scale, which is
    not twice what it must be. Heads grow by themselves; the second has but a 0 at first."""
    rng = np.random.default_rng(0)
    size = np.array([[1, 0], [1.5, 1e-3], [50, 400], [49, 1e3], [1000, 10]], np.float32)
    new = (
        rng.uniform(0.5, 1, (5, 2, 16)).astype(np.float32) * rng.choice([-1, 1], (5, 2, 16)) * size[..., None]
    )
    cache = small(layout=order, page_size=5, dtype=dtype)
    nobody = cache.replace(key_cache=jnp.full_like(cache.key_cache, jnp.nan if dtype != jnp.int8 else 99))
    cache = nobody.replace(k_scale=cache.k_scale.at[8:].set(jnp.nan))
    write = jax.jit(functools.partial(PagedKVCache.write, layer=1, implementation=implementation))
    for at, token in enumerate(new):
        both = jnp.stack([jnp.asarray(token)] * 2)[:, None]
        cache = write(cache, key=both, value=-3 * both, positions=jnp.array([[at], [-1]], jnp.int32))
        # int8: a step. fp8: of three bits behind the point, or its least number.
        for values, scale, factor in zip(
            stored(cache, at + 1), (cache.k_scale, cache.v_scale), (1, -3), strict=True
        ):
            right, step = factor * new[: at + 1], np.asarray(scale)[5][:, None]
            off = np.abs(values - right)
            assert (off <= (step if dtype == jnp.int8 else np.maximum(np.abs(right) / 16, step / 256))).all()
            peak = np.abs(right).max(axis=(0, 2)) / (127 if dtype == jnp.int8 else 448)
            assert (np.asarray(scale)[5] <= np.maximum(2 * peak, 1e-19)).all()
            assert (np.asarray(scale)[5] >= peak * (1 - 1e-6)).all()
    others = np.delete(np.arange(10), 5)
    bits, were = (np.asarray(one.key_cache)[others].view(np.uint8) for one in (cache, nobody))
    np.testing.assert_array_equal(bits, were)
    np.testing.assert_array_equal(cache.k_scale[:5], 1)
    assert np.isnan(cache.k_scale[8:]).all(), "of pages without tokens they are left alone"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pages_grow_side_by_side(implementation):
    """A chunk that goes on in one page and begins the next, beside a sequence whose page need not grow."""
    rng = np.random.default_rng(0)
    first, then = rng.standard_normal((2, 2, 4, 2, 16)).astype(np.float32)
    then[0] *= 50
    cache = small().write(1, *map(jnp.asarray, (first, first)), jnp.array([[0, 1, -1, -1], [0, 1, 2, -1]]))
    before = cache
    at = jnp.array([[2, 3, 4, 5], [3, -1, -1, -1]], jnp.int32)
    cache = cache.write(1, *map(jnp.asarray, (then, then / 100)), at, implementation=implementation)
    grew = np.asarray(cache.k_scale / before.k_scale)
    assert (grew[5] >= 16).all()
    assert (np.log2(grew[5]) % 1 == 0).all()
    np.testing.assert_array_equal(cache.v_scale[5:8:2], before.v_scale[5:8:2])
    np.testing.assert_array_equal(cache.value_cache[5, :2], before.value_cache[5, :2])
    keys, _ = stored(cache, 4)
    np.testing.assert_allclose(keys[:2], first[0, :2], atol=float(cache.k_scale[5].max()))
    np.testing.assert_allclose(keys[2:], then[0, :2], atol=float(cache.k_scale[5].max()) / 2 * 1.001)
    expected = np.abs(then[0, 2:]).max(axis=(0, 2)) / 127
    np.testing.assert_allclose(
        cache.k_scale[6], expected, rtol=1e-6, err_msg="begun: no margin, since it may grow"
    )
    assert cache.saturation(1, jnp.asarray(1e6 * then), jnp.asarray(then), at) == (0, 0), "it would grow"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_tokens_of_a_page_may_stand_anywhere(implementation):
    """Far apart, in any order, with others and padding between: the page has one scale, of all of them. In pages of
    two sequences, of which some are begun and some go on, with the largest token first, in the middle or last."""
    rng = np.random.default_rng(0)
    positions = np.full((2, 600), -1, np.int32)
    positions[0, [1, 70, 300, 598, 599]] = 7, 2, 5, 3, 4
    positions[1, [0, 64, 65, 590, 599]] = 5, 9, 3, 2, 4  # no page for the second
    new = rng.standard_normal((2, 600, 2, 16)).astype(np.float32) * rng.choice([1, 50], (2, 600, 1, 1))
    new[1, [590, 599]] *= 100
    first = jnp.asarray(new[:, 100:102] / 1000)
    cache = small().write(1, first, first, jnp.array([[0, 1], [0, 1]], jnp.int32))
    arguments = jnp.asarray(new), jnp.asarray(new[::-1]), jnp.asarray(positions)
    write = jax.jit(functools.partial(PagedKVCache.write, layer=1), static_argnames="implementation")
    names = ("key", "value", "positions")
    expected, found = (
        write(cache, **dict(zip(names, arguments, strict=True)), implementation=each)
        for each in ("xla", implementation)
    )
    for page, tokens in enumerate(([70, 598], [1, 300, 599], [665, 1190], [600, 1199]), 5):
        needed = np.abs(new.reshape(-1, 2, 16)[tokens]).max(axis=(0, 2)) / 127
        within = np.asarray(expected.k_scale)[page] / needed
        assert ((within >= 1 - 1e-6) & (within < (2 if page % 2 else 1 + 1e-6))).all(), "odd ones go on"
    for name in ("k_scale", "v_scale"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-6)
    for name in ("key_cache", "value_cache"):
        off = np.abs(np.asarray(getattr(found, name), int) - np.asarray(getattr(expected, name), int))
        assert off.max() <= 1, "where scales are off by rounding, so are a few values"
        assert (off > 0).mean() < 0.02


REFUSED = {
    "scales": (dict(k_scale=jnp.ones((5, 3))), ValueError, "'k_scale': expected shape"),
    "pages": (dict(v_scale=jnp.ones((4, 2))), ValueError, "'v_scale': expected shape"),
    "scale's dtype": (dict(k_scale=jnp.ones((5, 2), jnp.bfloat16)), TypeError, "'k_scale': expected dtype float32"),
    "slots": (dict(slot_mapping=jnp.zeros(3, jnp.float32)), TypeError, "'slot_mapping': expected dtype int32"),
    "key": (dict(key=jnp.ones((3, 2), jnp.float32)), ValueError, "'key': expected shape"),
    "value": (dict(value=jnp.ones((3, 2, 4), jnp.bfloat16)), TypeError, "'value': expected dtype float32"),
    "page_size": (dict(page_size=0), ValueError, "'page_size': expected at least 1, got 0"),
    "dtype": (dict(dtype=jnp.bfloat16), ValueError, "'dtype': expected one of float8_e4m3fn, float8_e5m2, int8"),
    "margin": (dict(margin=0.0), ValueError, "'margin': expected a finite number above 0, got 0"),
}  # fmt: skip


@pytest.mark.once
@pytest.mark.parametrize(("changes", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(changes, error, message):
    given = dict(
        key=jnp.ones((3, 2, 4)), value=jnp.ones((3, 2, 4)), k_scale=jnp.ones((5, 2)), v_scale=jnp.ones((5, 2)),
        slot_mapping=jnp.zeros(3, jnp.int32), page_size=4, dtype=jnp.int8,
    )  # fmt: skip
    with pytest.raises(error, match=f"^page_scales: argument {message}"):
        unchecked(page_scales)(**given | changes)


@pytest.mark.once
def test_a_cache_without_quantisation_has_no_scales():
    tables = jnp.zeros((1, 1), jnp.int32)
    sizes = dict(num_layers=1, num_pages=1, page_size=4, num_kv_heads=1, head_dim=16, block_tables=tables)
    with pytest.raises(
        ValueError, match="'scale_per_page': expected False for a cache of bfloat16, got True"
    ):
        PagedKVCache.create(**sizes, scale_per_page=True)
