"""Sharded calls on eight devices: `test_sharding.py` runs this file in a process that has them."""

import functools
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import unchecked

import pallas_attn
from pallas_attn import (
    LocalStride,
    PagedKVCache,
    mla_decode,
    mla_schedule,
    paged_attention,
    write_kv,
)
from pallas_attn._call import partition
from pallas_attn._tile.layout import from_nhd

KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "interpret"])


def kinds_and_implementations(test):
    return KINDS(IMPLEMENTATIONS(test))


# What follows from `partition.plan`, whose answers every jax is given in the same two ways.
OURS_ALONE = pytest.mark.once

QUERY, WHOLE = P("seq", "head"), P()
POOL = P(None, None, "head")
# Of query, key_cache, value_cache, block_tables, seq_lens.
HEADS = (P(None, "head"), POOL, POOL, WHOLE, WHOLE)
SEQS = (P("seq"), WHOLE, WHOLE, P("seq"), P("seq"))
BOTH = (QUERY, POOL, POOL, P("seq"), P("seq"))


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("seq", "head"), axis_types=(kind, kind))


def placed(mesh, arrays, specs) -> list[jax.Array]:
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]


@functools.cache
def paged() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.standard_normal((4, 8, 32)), jnp.float32)
    key, value = (jnp.asarray(rng.standard_normal((24, 16, 4, 32)), jnp.float32) for _ in range(2))
    tables = jnp.asarray(rng.permutation(24)[:20].reshape(4, 5), jnp.int32)
    return query, key, value, tables, jnp.array([70, 0, 33, 80], jnp.int32)


@functools.cache
def attended() -> tuple[np.ndarray, ...]:
    """(out, lse) of `paged`, which many tests expect."""
    return tuple(map(np.asarray, paged_attention(*paged(), implementation="xla", return_lse=True)))


@functools.cache
def latent() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.standard_normal((4, 2, 8, 576)), jnp.float32)
    cache = jnp.asarray(rng.standard_normal((24, 16, 1, 576)), jnp.float32)
    return query, cache, *paged()[3:]


@functools.cache
def decoded() -> tuple[np.ndarray, ...]:
    """(out, lse) of `latent`."""
    options = dict(causal=True, return_lse=True, implementation="xla")
    return tuple(map(np.asarray, mla_decode(*latent(), **options)))


@functools.cache
def new_tokens() -> tuple[jax.Array, ...]:
    """Arguments of write_kv: two tokens to skip, six to write."""
    rng = np.random.default_rng(0)
    key, value = (jnp.asarray(rng.standard_normal((8, 4, 32)), jnp.float32) for _ in range(2))
    return key, value, *paged()[1:3], jnp.array([3, 77, -1, 15, 16, 383, 384, 200], jnp.int32)


def moved(compiled) -> list[int]:
    """Elements of the largest array that each collective of a compiled function brings to a device."""
    collective = (
        r" = (.*?) (?:all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)(?:-start)?\("
    )
    return [
        max(
            math.prod(map(int, filter(None, dims.split(",")))) for dims in re.findall(r"\[([\d,]*)\]", shapes)
        )
        for shapes in re.findall(collective, compiled.as_text())
    ]


def assert_equal(function, arrays, expected, *, moves: int, out: P | None = None) -> None:
    """The jitted function's results are `expected`, sharded as `out`, and no collective moves more than `moves`
    elements at once."""
    compiled = jax.jit(function).lower(*arrays).compile()
    result = compiled(*arrays)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), result, expected)
    assert max(moved(compiled), default=0) <= moves
    if out is not None:
        first = jax.tree.leaves(result)[0]
        assert first.sharding.is_equivalent_to(NamedSharding(first.sharding.mesh, out), first.ndim)


def test_what_moves_is_seen():
    mesh = mesh_of(AxisType.Auto)
    (pool,) = placed(mesh, paged()[1:2], [POOL])
    gathered = jax.jit(lambda x: x + 1, out_shardings=NamedSharding(mesh, WHOLE))
    assert moved(gathered.lower(pool).compile()) == [pool.size]


@kinds_and_implementations
def test_paged_attention(kind, implementation):
    attend = functools.partial(paged_attention, implementation=implementation, return_lse=True)
    arrays = placed(mesh_of(kind), paged(), BOTH)
    # Plain jnp agrees on a loop's bounds; a kernel needs nothing from elsewhere.
    assert_equal(attend, arrays, attended(), moves=1 if implementation == "xla" else 0, out=QUERY)


@OURS_ALONE
@pytest.mark.parametrize(
    ("kind", "implementation"),
    [(AxisType.Auto, "interpret"), (AxisType.Explicit, "interpret"), (AxisType.Explicit, "xla")],
)
def test_score_and_mask_functions(kind, implementation):
    """Heads and sequences are numbered through the whole call; what is captured is whole on every device."""

    def attend(arrays, slopes, firsts, implementation=implementation):
        def score(s, batch, head, query, key):
            return s - slopes[head] * (query - key) + firsts[batch] * 0.1 * key

        def mask(batch, head, query, key):
            return (query - key < 9 * (head + 1)) & (key >= firsts[batch])

        options = dict(score_mod=score, mask_mod=mask, return_lse=True, implementation=implementation)
        return paged_attention(*arrays, **options)

    captured = jnp.linspace(0.0, 0.3, 8), jnp.array([40, 0, 3, 20], jnp.int32)
    expected = attend(paged(), *captured, implementation="xla")
    assert np.abs(expected[0] - attended()[0]).max() > 0.1
    result = jax.jit(attend)(placed(mesh_of(kind), paged(), BOTH), *captured)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), result, expected)


@KINDS
def test_heads_alone(kind):
    """Called without a jit of one's own."""
    out = paged_attention(*placed(mesh_of(kind), paged(), HEADS), implementation="interpret")
    assert {shard.data.shape for shard in out.addressable_shards} == {(4, 2, 32)}
    np.testing.assert_allclose(out, attended()[0], atol=2e-5)


@OURS_ALONE
@pytest.mark.parametrize(
    ("kind", "layout"), [(AxisType.Auto, "PACKED"), (AxisType.Explicit, "HND")], ids=["auto", "explicit"]
)
def test_optional_arrays_and_layouts(kind, layout):
    query, key, value, *rest = paged()
    per_head = jnp.linspace(0.1, 1, 8)
    options = dict(
        alibi_slopes=per_head, sinks=per_head, k_scale=per_head[:4] / 40, v_scale=per_head[4:] / 40
    )
    stored = [jnp.round(pool * 30).astype(jnp.int8) for pool in (key, value)]
    stored = [from_nhd(pool, layout, which) for pool, which in zip(stored, ("key", "value"), strict=True)]
    arguments = (query, *stored, *rest)
    expected = paged_attention(*arguments, **options, layout=layout, implementation="xla")
    pool = P(None, "head")
    specs = (QUERY, pool, pool, P("seq"), P("seq"))
    attend = functools.partial(paged_attention, layout=layout, implementation="interpret")
    options = dict(zip(options, placed(mesh_of(kind), options.values(), [P("head")] * 4), strict=True))
    arrays = placed(mesh_of(kind), arguments, specs)
    assert_equal(lambda o, *a: attend(*a, **o), (options, *arrays), expected, moves=0, out=QUERY)


@kinds_and_implementations
def test_mla_decode_and_its_schedule(kind, implementation):
    """The latents are whole on every device, the query's heads are not; a schedule is made for each one's share."""

    def attend(query, cache, tables, lens):
        schedule = mla_schedule(lens, num_heads=8, q_len=2, num_parts=6)
        options = dict(schedule=schedule, causal=True, return_lse=True, implementation=implementation)
        return mla_decode(query, cache, tables, lens, **options)

    out = P("seq", None, "head")
    arrays = placed(mesh_of(kind), latent(), (out, WHOLE, P("seq"), P("seq")))
    # Lengths come together for the schedule of the whole batch; plain jnp may bring rows of queries together.
    moves = latent()[0].size if implementation == "xla" else len(latent()[3])
    assert moves < latent()[1].size
    left_to_xla = implementation == "xla" and kind == AxisType.Auto
    assert_equal(attend, arrays, decoded(), moves=moves, out=None if left_to_xla else out)


@KINDS
@IMPLEMENTATIONS
@pytest.mark.parametrize("tokens", [None, "seq"], ids=["whole", "sharded"])
def test_write_kv(kind, implementation, tokens):
    """New tokens are brought to every device that has their heads."""
    write = functools.partial(write_kv, implementation=implementation)
    specs = (P(tokens, "head"), P(tokens), POOL, POOL, P(tokens))
    arrays = placed(mesh_of(kind), new_tokens(), specs)
    most = 0 if tokens is None else new_tokens()[0].size
    assert_equal(write, arrays, write_kv(*new_tokens(), implementation="xla"), moves=most, out=POOL)


@kinds_and_implementations
def test_pages_whose_scales_grow(kind, implementation):
    """Each device has the scales of its heads: what it must know of the others' is which pages grow."""
    empty = PagedKVCache.create(
        num_layers=1, num_pages=24, page_size=16, num_kv_heads=4, head_dim=32,
        block_tables=jnp.arange(8, dtype=jnp.int32).reshape(4, 2), dtype=jnp.int8, scale_per_page=True,
    )  # fmt: skip
    token = new_tokens()[0].reshape(4, 2, 4, 32)
    positions = jnp.array([[0, 1], [14, 15], [15, 16], [-1, 3]], jnp.int32)
    cache = empty.write(
        0, token, token, jnp.tile(jnp.arange(2, dtype=jnp.int32), (4, 1)), implementation="xla"
    )

    def write(pools, scales, tokens):
        names = ("key_cache", "value_cache", "k_scale", "v_scale")
        grown = cache.replace(**dict(zip(names, (*pools, *scales), strict=True)))
        grown = grown.write(0, tokens, tokens, positions, implementation=implementation)
        return tuple(getattr(grown, name) for name in names)

    arrays = (cache.key_cache, cache.value_cache), (cache.k_scale, cache.v_scale), 50 * token
    expected = cache.write(0, arrays[2], arrays[2], positions, implementation="xla")
    assert float(jnp.max(expected.k_scale / cache.k_scale)) > 16
    heads = P(None, "head")
    sharded = placed(
        mesh_of(kind), (*arrays[0], *arrays[1], arrays[2]), (POOL, POOL, heads, heads, P(None, None, "head"))
    )
    result = jax.jit(lambda a, b, c, d, new: write((a, b), (c, d), new)).lower(*sharded).compile()
    assert max(moved(result), default=0) <= 8
    for array, name in zip(result(*sharded), ("key_cache", "value_cache", "k_scale", "v_scale"), strict=True):
        np.testing.assert_array_equal(array, getattr(expected, name))


@OURS_ALONE
@KINDS
def test_the_small_comes_to_the_pools(kind):
    """The query is sharded where the pools' heads are, and along a dimension that no device can serve alone."""
    attend = functools.partial(paged_attention, implementation="interpret")
    query = P("head", None, "seq")
    arrays = placed(mesh_of(kind), paged(), (query, POOL, POOL, WHOLE, WHOLE))
    assert_equal(attend, arrays, attended()[0], moves=paged()[0].size)


REFUSED = {
    "pages": ((WHOLE, P("seq"), P("seq"), WHOLE, WHOLE), "'key_cache': expected all pages on every device"),
    "slot": ((WHOLE, P(None, "seq"), WHOLE, WHOLE, WHOLE), r"'key_cache': expected slot \(16\) whole"),
    "dim": (
        (WHOLE, WHOLE, P(None, None, None, "seq"), WHOLE, WHOLE),
        r"'value_cache': expected dim \(32\) whole",
    ),
    "unlike": ((WHOLE, POOL, WHOLE, WHOLE, WHOLE), "'value_cache': expected kv_heads as the other pool's"),
    "query": ((P(None, "head"), WHOLE, WHOLE, WHOLE, WHOLE), "'key_cache': expected its 4 KV heads sharded"),
}


@KINDS
@pytest.mark.parametrize("case", REFUSED)
def test_refusals(kind, case):
    specs, message = REFUSED[case]
    arrays = placed(mesh_of(kind), paged(), specs)
    # Under Auto axes XLA's partitioner is told, and JAX wraps what it hears.
    error = jax.errors.JaxRuntimeError if kind == AxisType.Auto else ValueError
    with pytest.raises(error, match=f"paged_attention: argument {message}"):
        jax.jit(functools.partial(paged_attention, implementation="interpret"))(*arrays)


SLIDES = LocalStride(16, 1, 2, head_sliding_step=1)


@functools.cache
def slid() -> np.ndarray:
    return np.asarray(paged_attention(*paged(), block_sparse=SLIDES, implementation="xla"))


@OURS_ALONE
@KINDS
def test_patterns_that_differ_by_head(kind):
    """Refused where heads are sharded, served where sequences alone are."""
    attend = functools.partial(paged_attention, implementation="interpret")
    arrays = placed(mesh_of(kind), paged(), BOTH)
    slides = SLIDES
    error = jax.errors.JaxRuntimeError if kind == AxisType.Auto else ValueError
    with pytest.raises(error, match="'block_sparse': expected head_sliding_step 0 where heads are sharded"):
        jax.jit(functools.partial(attend, block_sparse=slides))(*arrays)
    arrays = placed(mesh_of(kind), paged(), SEQS)
    assert_equal(functools.partial(attend, block_sparse=slides), arrays, slid(), moves=0, out=P("seq"))


@KINDS
def test_vmap_twice(kind):
    query, *rest = placed(mesh_of(kind), paged(), BOTH)
    attend = functools.partial(paged_attention, implementation="interpret")
    for _ in range(2):
        attend = jax.vmap(attend, in_axes=(0, None, None, None, None))

    def stacked(query, *rest):
        return attend(jnp.stack([query, 2 * query])[None], *rest)

    twice = paged_attention(2 * paged()[0], *paged()[1:], implementation="xla")
    assert_equal(stacked, (query, *rest), np.stack([attended()[0], twice])[None], moves=0)


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.sweep(scheduled=None)
def test_vmap_of_every_operand_without_a_mesh(scheduled):
    """Several devices are enough for a call to be asked how it is cut; `vmap` hands it a dict in another order."""
    rng = np.random.default_rng(1)
    query = jnp.asarray(rng.standard_normal((3, 2, 4, 576)), jnp.bfloat16)
    cache = jnp.asarray(rng.standard_normal((6, 16, 1, 576)), jnp.bfloat16)
    tables, lens = jnp.arange(6, dtype=jnp.int32).reshape(3, 2), jnp.array([0, 5, 32], jnp.int32)

    def attend(query, tables, lens, implementation="interpret"):
        made = mla_schedule(lens, num_heads=4, q_len=2) if scheduled else None
        return mla_decode(query, cache, tables, lens, schedule=made, implementation=implementation)

    of_each = jax.vmap(attend)(query[:, None], tables[:, None], lens[:, None])
    whole = attend(query, tables, lens, "xla")
    np.testing.assert_allclose(of_each[:, 0].astype(float), whole.astype(float), atol=2e-2)


@KINDS
def test_gradients_are_refused_in_words(kind):
    query, *rest = placed(mesh_of(kind), paged(), BOTH)
    with pytest.raises(NotImplementedError, match="implementation 'xla' has"):
        jax.grad(lambda q: paged_attention(q, *rest, implementation="interpret").sum())(query)


@kinds_and_implementations
def test_shard_map_over_one_axis_of_two(kind, implementation):
    mesh = mesh_of(kind)
    attend = jax.shard_map(
        functools.partial(paged_attention, implementation=implementation),
        mesh=mesh,
        in_specs=SEQS,
        out_specs=P("seq"),
        axis_names={"seq"},
        check_vma=implementation != "interpret",
    )
    arrays = placed(mesh, paged(), BOTH)
    if kind == AxisType.Auto and implementation == "interpret":
        with pytest.raises(ValueError, match="expected a mesh without axes over which XLA would gather"):
            jax.jit(attend)(*arrays)
    else:
        assert_equal(attend, arrays, attended()[0], moves=1)


@KINDS
def test_interpreted_kernels_cannot_be_checked(kind):
    attend = jax.shard_map(
        functools.partial(paged_attention, implementation="interpret"),
        mesh=mesh_of(kind),
        in_specs=BOTH,
        out_specs=QUERY,
    )
    with pytest.raises(
        ValueError, match="'implementation': expected another than 'interpret' in a shard_map"
    ):
        attend(*placed(mesh_of(kind), paged(), BOTH))


@pytest.mark.parametrize("function", [paged_attention, mla_decode])
def test_a_config_that_is_none_is_named(function):
    """Though here the call is a static argument of a jit."""
    arguments = paged() if function is paged_attention else latent()
    with pytest.raises(TypeError, match=r"argument 'config': expected \w+Config, got list"):
        unchecked(function)(*arguments, implementation="interpret", config=[])


@KINDS
def test_a_mesh_over_which_nothing_is_sharded(kind):
    attend = functools.partial(paged_attention, implementation="interpret")
    with jax.set_mesh(mesh_of(kind)):
        assert_equal(attend, paged(), attended()[0], moves=0)


def test_shardings_that_name_no_mesh_are_refused():
    """What XLA would hand over if shardings were not NamedShardings: nothing says what an axis is."""
    unnamed = SimpleNamespace(is_fully_replicated=False)
    operands = (SimpleNamespace(shape=(4, 2), sharding=unnamed),)
    call = partition.Call("op", lambda operands: (), (("cache", "pages dim"),), ("pages dim",), (), None)
    empty = SimpleNamespace(empty=True)
    with pytest.raises(
        ValueError, match=r"^op: argument 'cache': expected a jax\.sharding\.NamedSharding, got"
    ):
        partition._answer(call, empty, operands, ())


def test_on_one_device_nothing_changes():
    """Though the process has eight."""
    attend = jax.jit(functools.partial(paged_attention, implementation="interpret"))
    arrays = jax.device_put(paged(), jax.devices()[3])
    assert "SPMD" not in attend.lower(*arrays).as_text()
    assert attend(*arrays).devices() == {jax.devices()[3]}


def test_the_page_on_sharding():
    page = Path(__file__).parents[1] / "docs/pages/devices.md"
    # As here, on the devices that the page tells to ask for.
    (flags,) = re.findall(r"^XLA_FLAGS=(\S+) JAX_PLATFORMS=cpu python", page.read_text(), re.MULTILINE)
    assert flags in os.environ["XLA_FLAGS"].split()
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)):
        exec(compile(code, f"{page}[{number}]", "exec"), {})


@kinds_and_implementations
def test_ragged_attention(kind, implementation):
    """Over heads; tokens, which belong to sequences of any length, stay whole."""
    heads = P(None, "head")
    forms = {"ragged_paged_attention": (heads, POOL, POOL)}
    if implementation == "xla":
        forms["prefix_prefill"] = (heads, heads, heads, POOL, POOL)
    for form, specs in forms.items():
        arrays, expected = ragged(form)
        given = placed(mesh_of(kind), arrays, (*specs, WHOLE, WHOLE, WHOLE))
        call = functools.partial(
            unchecked(getattr(pallas_attn, form)), implementation=implementation, return_lse=True
        )
        assert_equal(call, given, expected, moves=0, out=heads)


@functools.cache
def ragged(form: str) -> tuple[tuple[jax.Array, ...], tuple[np.ndarray, ...]]:
    """Arguments of a form, and (out, lse)."""
    query, *pools, tables, lens = paged()
    query = jnp.concatenate([query] * 3)
    bounds, lens = jnp.array([0, 9, 9, 10, 12], jnp.int32), lens.at[1].set(0)
    beside = (query[:, ::2] + 1, query[:, ::2] - 1) if form == "prefix_prefill" else ()
    arrays = (query, *beside, *pools, tables, lens, bounds)
    call = unchecked(getattr(pallas_attn, form))
    return arrays, tuple(map(np.asarray, call(*arrays, implementation="xla", return_lse=True)))
