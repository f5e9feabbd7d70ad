"""Writing into pages, the cache pytree and the page allocator."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ON_GPU, of_any_bits, small_cache, unchecked

import pallas_attn
from pallas_attn import OutOfPagesError, PageAllocator, PagedKVCache, convert_layout, write_kv
from pallas_attn._call.pools import PoolShape, array_shape, pool_shape
from pallas_attn._tile.layout import to_nhd

IMPLEMENTATIONS = ["xla", "interpret", *ON_GPU]


def pools(rng, layout: str, dtype, pages=7, page=16, heads=3, dim=80):
    shape = (pages, page, heads, dim) if layout == "NHD" else (pages, heads, page, dim)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("new", "stored"), [("float32", "float32"), ("float32", "bfloat16"), ("float16", "float16")]
)
def test_write_kv(implementation, layout, new, stored):
    rng = np.random.default_rng(0)
    caches = pools(rng, layout, stored)
    slots = np.array([5, 111, -1, 0, 16, 112, -2147483648, 2147483647, 47], np.int32)
    key, value = (jnp.asarray(rng.standard_normal((len(slots), 3, 80)), new) for _ in range(2))
    got = write_kv(key, value, *caches, jnp.asarray(slots), layout=layout, implementation=implementation)
    for cache, written, after in zip(caches, (key, value), got, strict=True):
        expected = np.array(cache)
        for token, slot in enumerate(slots):
            if 0 <= slot < 7 * 16:
                where = (slot // 16, slot % 16) if layout == "NHD" else (slot // 16, slice(None), slot % 16)
                expected[where] = np.asarray(written[token].astype(stored))
        np.testing.assert_array_equal(np.asarray(after), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", ["NHD", "HND", "PACKED"])
@pytest.mark.parametrize("stored", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("per_head", [False, True])
def test_write_kv_quantises(implementation, layout, stored, per_head):
    rng = np.random.default_rng(0)
    pool = PoolShape(4, 16, 3, 80)
    caches = tuple(jnp.zeros(array_shape(pool, layout, w, stored), stored) for w in ("key", "value"))
    key, value = (jnp.asarray(rng.standard_normal((20, 3, 80)) * 3, jnp.bfloat16) for _ in range(2))
    key = key.at[0, 0, 0].set(1e6).at[1, 0, 0].set(-1e6)  # beyond every format: saturates
    slots = jnp.asarray(rng.permutation(64)[:20], jnp.int32)
    # Powers of two divide exactly, so that every rounding is decided and the bits can be compared.
    scales = [np.float32([1 / 16, 1 / 8, 1 / 4]), np.float32([1 / 32, 1 / 16, 1 / 2])]
    if not per_head:
        scales = [np.float32(1 / 8), np.float32(1 / 16)]
    got = write_kv(
        key,
        value,
        *caches,
        slots,
        k_scale=scales[0],
        v_scale=scales[1],
        layout=layout,
        implementation=implementation,
    )
    limit = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}[stored]
    for new, cache, scale, which in zip((key, value), got, scales, ("key", "value"), strict=True):
        nhd = np.asarray(to_nhd(cache, layout, which)).reshape(64, 3, 80)[np.asarray(slots)]
        exact = np.clip(np.float32(new) / np.broadcast_to(scale, (3,))[:, None], -limit, limit)
        expected = np.rint(exact).astype(np.int8) if stored == "int8" else exact.astype(nhd.dtype)
        np.testing.assert_array_equal(nhd.view(np.uint8), expected.view(np.uint8))
        assert np.isfinite(np.float32(nhd)).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e5m2", "int8"])
@pytest.mark.parametrize("layouts", list(itertools.permutations(["NHD", "HND", "PACKED"], 2)), ids="-".join)
def test_layouts_convert_bit_for_bit(layouts, dtype):
    source, target = layouts
    pool, rng = PoolShape(5, 8, 3, 48), np.random.default_rng(0)
    size = np.dtype(jnp.dtype(dtype)).itemsize
    pools = []
    for which in ("key", "value"):
        shape = array_shape(pool, source, which, dtype)
        raw = rng.integers(0, 256, (*shape, size), np.uint8)
        pools.append(jnp.asarray(raw.view(jnp.dtype(dtype)).reshape(shape)))
    there = convert_layout(*pools, source=source, target=target)
    assert [c.shape for c in there] == [array_shape(pool, target, w, dtype) for w in ("key", "value")]
    back = convert_layout(*there, source=target, target=source)
    for before, after in zip(pools, back, strict=True):
        assert np.asarray(before).tobytes() == np.asarray(after).tobytes()


def test_packed_is_vllms_layout():
    """Element d of a token at `offset`: key [page, head, d // x, offset, d % x], value [page, head, d, offset]."""
    pool = PoolShape(2, 8, 3, 48)
    nhd = jnp.arange(2 * 8 * 3 * 48, dtype=jnp.float32).reshape(2, 8, 3, 48)
    key, value = convert_layout(nhd, nhd, source="NHD", target="PACKED")
    assert key.shape == (2, 3, 12, 8, 4)
    assert key[1, 2, 37 // 4, 5, 37 % 4] == nhd[1, 5, 2, 37]
    assert value[1, 2, 37, 5] == nhd[1, 5, 2, 37]
    assert pool_shape(value, "PACKED") == pool


def test_convert_layout_refuses():
    odd = jnp.zeros((2, 8, 3, 12), jnp.bfloat16)
    with pytest.raises(
        ValueError, match=r"convert_layout: argument 'key_cache': expected head_dim a multiple of x=8"
    ):
        convert_layout(odd, odd, source="NHD", target="PACKED")
    with pytest.raises(
        ValueError, match=r"argument 'target': expected one of 'NHD', 'HND', 'PACKED', got 'DHN'"
    ):
        unchecked(convert_layout)(odd, odd, source="NHD", target="DHN")


@pytest.mark.parametrize("implementation", ["xla", *ON_GPU])
def test_donated_pool_is_aliased_not_copied(implementation):
    rng = np.random.default_rng(0)
    caches = pools(rng, "NHD", "float32", pages=64)
    new = jnp.ones((4, 3, 80))
    write = jax.jit(functools.partial(write_kv, implementation=implementation), donate_argnums=(2, 3))
    compiled = write.lower(new, new, *caches, jnp.arange(4, dtype=jnp.int32)).compile()
    hlo = compiled.as_text()
    header = hlo.splitlines()[0]
    assert re.search(r"input_output_alias=\{ \{0\}: \(2, \{\}, (may|must)-alias\), \{1\}: \(3,", header), (
        header
    )
    copies = [line for line in hlo.splitlines() if re.search(r"= f32\[64,16,3,80\]\S* copy\(", line)]
    assert not copies, copies
    assert compiled.memory_analysis().temp_size_in_bytes < caches[0].nbytes // 4
    pointers = [c.unsafe_buffer_pointer() for c in caches]
    after = write(new, new, *caches, jnp.arange(4, dtype=jnp.int32))
    assert [c.unsafe_buffer_pointer() for c in after] == pointers


def test_pallas_kernel_aliases_its_pools():
    """What the GPU gets: a custom call whose outputs are its pool operands."""
    import lowering

    pool = jax.ShapeDtypeStruct((64, 16, 3, 80), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((4, 3, 80), jnp.bfloat16)
    lowered = lowering.lower_for_gpu(write_kv, new, new, pool, pool, jax.ShapeDtypeStruct((4,), jnp.int32))
    (call,) = [line for line in lowered.as_text().splitlines() if "custom_call" in line]
    aliases = re.findall(r"output_tuple_indices = \[(\d)\],\s*operand_index = (\d)", call)
    assert aliases == [("0", "0"), ("1", "1")], call


def test_no_tokens_is_no_work():
    caches = pools(np.random.default_rng(0), "NHD", "float32")
    empty = jnp.zeros((0, 3, 80))
    got = write_kv(empty, empty, *caches, jnp.zeros((0,), jnp.int32))
    np.testing.assert_array_equal(got[0], caches[0])


class TestPagedKVCache:
    def test_layers_have_pages_of_their_own(self):
        cache = small_cache()
        assert cache.num_pages == 4
        assert cache.page_size == 8
        assert cache.max_seq_len == 24
        np.testing.assert_array_equal(cache.layer_tables(0), [[2, 0, -1], [1, -1, 3]])
        np.testing.assert_array_equal(cache.layer_tables(1), [[6, 4, -1], [5, -1, 7]])

    def test_slots_skip_what_the_table_does_not_hold(self):
        positions = jnp.array([[0, 9, 17, -1], [7, 8, 23, 24]], jnp.int32)
        slots = small_cache().slots(1, positions)
        np.testing.assert_array_equal(slots, [48, 33, -1, -1, 47, -1, 63, -1])

    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    def test_write_and_attend_in_a_scan_over_layers(self, layout):
        """The pattern models use: the pool is the scan's carry, the layer index its input."""
        rng = np.random.default_rng(1)
        cache = small_cache(layout=layout, block_tables=jnp.array([[2, 0], [1, 3]], jnp.int32))
        lens = jnp.array([13, 6], jnp.int32)
        key, value = (jnp.asarray(rng.standard_normal((2, 2, 13, 2, 16)), jnp.float32) for _ in range(2))
        query = jnp.asarray(rng.standard_normal((2, 2, 4, 16)), jnp.float32)
        positions = jnp.where(jnp.arange(13) < lens[:, None], jnp.arange(13), -1)

        @jax.jit
        def run(cache):
            def layer(cache, inputs):
                index, k, v, q = inputs
                cache = cache.write(index, k, v, positions)
                out = pallas_attn.paged_attention(
                    q, cache.key_cache, cache.value_cache, cache.layer_tables(index), lens, layout=layout
                )
                return cache, out

            return jax.lax.scan(layer, cache, (jnp.arange(2), key, value, query))

        _, outs = run(cache)
        for index in range(2):
            for seq, length in enumerate((13, 6)):
                k = np.repeat(key[index, seq, :length], 2, axis=1)
                v = np.repeat(value[index, seq, :length], 2, axis=1)
                logits = np.einsum("hd,khd->hk", query[index, seq], k) / 4
                weights = np.exp(logits - logits.max(axis=1, keepdims=True))
                expected = np.einsum("hk,khd->hd", weights / weights.sum(axis=1, keepdims=True), v)
                np.testing.assert_allclose(outs[index, seq], expected, rtol=1e-5, atol=1e-6)

    def test_is_a_pytree(self):
        cache = small_cache()
        again = jax.tree.map(lambda x: x, cache)
        assert isinstance(again, PagedKVCache)
        assert again.num_layers == 2
        assert len(jax.tree.leaves(cache)) == 4

    def test_errors(self):
        with pytest.raises(
            ValueError, match=r"PagedKVCache.create: argument 'num_pages': expected at least 1, got 0"
        ):
            small_cache(num_pages=0)
        # Past the shape checks that jaxtyping adds in tests, as users have it.
        create = getattr(PagedKVCache.create, "__wrapped__", PagedKVCache.create.__func__)
        sizes = dict.fromkeys(["num_layers", "num_pages", "page_size", "num_kv_heads", "head_dim"], 1)
        with pytest.raises(TypeError, match=r"argument 'page_size': expected an int, got 2\.5 of type float"):
            create(PagedKVCache, **sizes | dict(page_size=2.5), block_tables=jnp.zeros((1, 1), jnp.int32))
        with pytest.raises(TypeError, match=r"argument 'block_tables': expected dtype int32, got float32"):
            create(PagedKVCache, **sizes, block_tables=jnp.zeros((2, 3)))


class TestPageAllocator:
    def test_allocate_and_free(self):
        pages = PageAllocator(4)
        first = pages.allocate(3)
        assert len(set(first)) == 3
        assert pages.num_free == 1
        pages.free(first[:2])
        assert pages.num_free == 3
        assert not set(pages.allocate(3)) & {first[2]}

    def test_out_of_pages_allocates_nothing(self):
        pages = PageAllocator(4)
        pages.allocate(2)
        with pytest.raises(OutOfPagesError, match=r"expected at most 2 pages \(free, of 4\), got 3"):
            pages.allocate(3)
        assert pages.num_free == 2

    def test_shared_pages_live_until_the_last_owner_frees_them(self):
        pages = PageAllocator(2)
        (page,) = pages.allocate(1)
        pages.share([page])
        assert pages.references(page) == 2
        pages.free([page])
        assert pages.num_free == 1
        pages.free([page])
        assert pages.num_free == 2

    def test_a_refused_free_changes_nothing(self):
        pages = PageAllocator(4)
        held = pages.allocate(2)
        with pytest.raises(ValueError, match="with 1 reference"):
            pages.free([held[0], held[1], held[1]])
        assert [pages.references(p) for p in held] == [1, 1]
        with pytest.raises(ValueError, match=r"expected pages in use, got page \d 1 time"):
            pages.free([p for p in range(4) if p not in held])
        with pytest.raises(ValueError, match=r"expected ids in \[0, 4\), got 4"):
            pages.share([4])

    def test_bad_sizes(self):
        with pytest.raises(ValueError, match="argument 'num_pages': expected at least 1, got 0"):
            PageAllocator(0)
        with pytest.raises(ValueError, match="argument 'n': expected at least 0, got -1"):
            PageAllocator(1).allocate(-1)

    @settings(deadline=None, max_examples=50)
    @given(
        st.lists(st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(0, 5)), max_size=40)
    )
    def test_against_a_plain_model(self, steps):
        pages, owners = PageAllocator(8), []  # owners: lists of pages, as sequences would hold them
        for action, number in steps:
            if action == "allocate":
                try:
                    owners.append(pages.allocate(number))
                except OutOfPagesError:
                    assert number > pages.num_free
            elif owners:
                chosen = owners[number % len(owners)]
                if action == "share":
                    owners.append(list(pages.share(chosen)))
                else:
                    owners.remove(chosen)
                    pages.free(chosen)
            held = [page for pages_of_one in owners for page in pages_of_one]
            assert pages.num_free == 8 - len(set(held))
            assert all(pages.references(page) == held.count(page) for page in range(8))


@pytest.mark.parametrize("where", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layout", ["NHD", "HND", "PACKED"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_copying_pages(where, layout, dtype):
    del where  # the process has one or the other
    pool = PoolShape(6, 16, 2, 32)
    rng = np.random.default_rng(0)
    for which in ("key", "value"):
        cache = of_any_bits(rng, array_shape(pool, layout, which, dtype), dtype)
        source = jnp.asarray([0, 3, 5, -1, 2, 6, 4], jnp.int32)
        target = jnp.asarray(
            [3, 1, 5, 0, -1, 2, 2147480000], jnp.int32
        )  # page 3 is copied before it is overwritten
        copied = jax.jit(pallas_attn.copy_pages, donate_argnums=0)(jnp.copy(cache), source, target)
        expected = np.array(cache)
        expected[[3, 1, 5]] = np.array(cache)[[0, 3, 5]]
        assert np.asarray(copied).tobytes() == expected.tobytes()


def test_sequences_that_part_ways():
    """A shared page is copied, in every layer, before one of its owners writes on."""
    tables = jnp.asarray([[2, 0], [2, 1]], jnp.int32)
    create = functools.partial(
        PagedKVCache.create, num_layers=3, num_pages=4, page_size=2, block_tables=tables
    )
    cache = create(num_kv_heads=1, head_dim=8)
    pages = jnp.arange(12.0)[:, None, None, None]
    cache = cache.replace(key_cache=cache.key_cache + pages, value_cache=cache.value_cache - pages)
    cache = cache.copy_pages(jnp.asarray([2, 4], jnp.int32), jnp.asarray([3, 0], jnp.int32))
    held = [0, 1, 2, 2, 4, 5, 6, 6, 8, 9, 10, 10]
    np.testing.assert_array_equal(cache.key_cache[:, 0, 0, 0], held)
    np.testing.assert_array_equal(cache.value_cache[:, 0, 0, 0], np.negative(held))

    latents = pallas_attn.PagedLatentCache.create(num_layers=2, num_pages=2, page_size=1, block_tables=tables)
    with pytest.raises(
        ValueError, match=r"PagedLatentCache.create: argument 'num_layers': expected at least 1, got 0"
    ):
        pallas_attn.PagedLatentCache.create(num_layers=0, num_pages=2, page_size=1, block_tables=tables)
    latents = latents.replace(latent_cache=latents.latent_cache + jnp.arange(4.0)[:, None, None, None])
    latents = latents.copy_pages(jnp.asarray([0], jnp.int32), jnp.asarray([1], jnp.int32))
    np.testing.assert_array_equal(latents.latent_cache[:, 0, 0, 0], [0, 0, 2, 2])


def test_what_cannot_be_copied_or_created_is_refused():
    def refused(error, message):
        return pytest.raises(error, match=re.escape(message))

    pages, tables = jnp.zeros(2, jnp.int32), jnp.zeros((1, 1), jnp.int32)
    cache = jnp.zeros((4, 16, 1, 8))
    with refused(ValueError, "copy_pages: argument 'target_pages': expected shape [num_copies=2"):
        pallas_attn.copy_pages(cache, pages, pages[:1])
    with refused(
        TypeError, "copy_pages: argument 'source_pages': expected integers, got an array of dtype float32"
    ):
        pallas_attn.copy_pages(cache, pages.astype(jnp.float32), pages)
    create = functools.partial(
        PagedKVCache.create, num_layers=1, num_pages=1, page_size=1, block_tables=tables
    )
    with refused(
        ValueError, "PagedKVCache.create: argument 'head_dim': expected a multiple of x=8 for 'PACKED'"
    ):
        create(num_kv_heads=1, head_dim=33, layout="PACKED")
    with refused(ValueError, "PagedKVCache.create: argument 'dtype': expected one of"):
        create(num_kv_heads=1, head_dim=32, dtype=jnp.int32)
    with refused(ValueError, "convert_layout: argument 'source': expected one of"):
        unchecked(convert_layout)(cache, cache, source="X", target="NHD")
    quantised = [jnp.zeros((1, 16, 1, 8), jnp.int8)] * 2
    new = jnp.zeros((1, 1, 8))
    for scale in (0.0, np.zeros(1, np.float32), np.array([np.inf], np.float32)):
        with refused(ValueError, "write_kv: argument 'k_scale': expected finite numbers above 0, got"):
            write_kv(new, new, *quantised, jnp.zeros(1, jnp.int32), k_scale=scale)
    with refused(
        TypeError, "write_kv: argument 'k_scale': expected a number or an array of numbers, or None, got True"
    ):
        write_kv(new, new, *quantised, jnp.zeros(1, jnp.int32), k_scale=True)
    cache = small_cache(dtype="int8")
    with refused(ValueError, "PagedKVCache.calibrate: argument 'margin': expected a finite number above 0"):
        cache.calibrate(
            0, jnp.ones((2, 1, 2, 16)), jnp.ones((2, 1, 2, 16)), jnp.zeros((2, 1), jnp.int32), margin=0.0
        )


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_numpy_arrays_are_welcome(implementation):
    rng = np.random.default_rng(0)
    new = rng.standard_normal((3, 2, 16), np.float32)
    pool, slots = np.zeros((4, 8, 2, 16), np.float32), np.array([0, -1, 9], np.int32)
    # Past the shape checks that jaxtyping adds in tests, as users have it.
    write_kv, copy_pages = (
        getattr(f, "__wrapped__", f) for f in (pallas_attn.write_kv, pallas_attn.copy_pages)
    )
    keys, _ = write_kv(new, new, pool, pool, slots, implementation=implementation)
    np.testing.assert_array_equal(keys[0, 0], new[0])
    np.testing.assert_array_equal(keys[1, 1], new[2])
    pages = copy_pages(np.asarray(keys), np.array([0], np.int32), np.array([3], np.int32))
    np.testing.assert_array_equal(pages[3], keys[0])


def test_donating_a_cache_leaves_the_callers_tables():
    tables, lens = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    paged = small_cache(block_tables=tables, seq_lens=lens)
    latents = pallas_attn.PagedLatentCache.create(num_layers=1, num_pages=2, page_size=1, block_tables=tables)
    for cache in (paged, latents):
        jax.block_until_ready(jax.jit(lambda c: jax.tree.map(lambda x: x + 1, c), donate_argnums=0)(cache))
    assert tables.sum() == 0
    assert lens.sum() == 1


def test_caches_travel_in_an_exported_function():
    cache = small_cache(dtype="int8")
    new, positions = jnp.ones((2, 1, 2, 16)), jnp.zeros((2, 1), jnp.int32)
    write = jax.jit(lambda c, x: c.write(0, x, x, positions, implementation="xla"))
    data = jax.export.export(write)(cache, new).serialize()
    again = jax.export.deserialize(data).call(cache, new)
    assert isinstance(again, PagedKVCache)
    jax.tree.map(np.testing.assert_array_equal, again, write(cache, new))

    tables, lens = jnp.zeros((1, 2), jnp.int32), jnp.full(1, 20, jnp.int32)
    latents = pallas_attn.PagedLatentCache.create(
        num_layers=1, num_pages=2, page_size=64, block_tables=tables, dtype=jnp.float32
    )

    @jax.jit
    def attend(cache, schedule, query):
        return pallas_attn.mla_decode(query, cache.latent_cache, cache.block_tables, lens, schedule=schedule)

    arguments = latents, pallas_attn.mla_schedule(lens, num_heads=4, num_parts=2), jnp.ones((1, 1, 4, 576))
    data = jax.export.export(attend)(*arguments).serialize()
    np.testing.assert_array_equal(jax.export.deserialize(data).call(*arguments), attend(*arguments))
