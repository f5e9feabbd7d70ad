"""`flash_attention` and its gradients over eight devices: test_sharding.py runs this in a process that has them."""

import contextlib
import functools
import re

import hopper_on_cpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flash_inputs import SMALL_TILES
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_attn import FlashAttentionCudaConfig, dot_product_attention, flash_attention, mods

pytestmark = pytest.mark.once  # the other ops are sharded on both jax
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "interpret"])
TOKENS = P("data", None, "model")
FULL = {"bias": P(None, "model"), "sinks": P("model"), "segment_ids": P("data")}


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))


@functools.cache
def arguments() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {"query": (4, 40, 8, 16), "key": (4, 40, 4, 16), "value": (4, 40, 4, 16), "bias": (1, 8, 40, 40)}
    arrays = {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (4, 40)), axis=1), jnp.int32)
    return arrays | {"sinks": jnp.linspace(0.0, 1.0, 8), "segment_ids": ids}


def gradients(implementation: str):
    """(value, gradients) of all that has any."""

    def loss(floats, segment_ids):
        config = SMALL_TILES if implementation == "interpret" else None
        out, lse = flash_attention(**floats, segment_ids=segment_ids, causal=True, return_lse=True,
                                   implementation=implementation, config=config)  # fmt: skip
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, lse))

    return jax.jit(jax.value_and_grad(loss))


@functools.cache
def expected():
    floats = dict(arguments())
    return gradients("xla")(floats, floats.pop("segment_ids"))


def check(got) -> None:
    assert min(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected())) > 1e-3
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-5), got, expected())


@KINDS
@IMPLEMENTATIONS
def test_batch_and_heads(kind, implementation):
    """Each device has its own sequences and heads; what they share, bias and sinks, has the sum of their gradients."""
    specs = dict.fromkeys(("query", "key", "value"), TOKENS) | FULL
    mesh = mesh_of(kind)
    floats = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in arguments().items()}
    value, got = gradients(implementation)(floats, floats.pop("segment_ids"))
    check((value, got))
    for name in ("query", "key", "value"):
        assert got[name].sharding.is_equivalent_to(NamedSharding(mesh, TOKENS), 4)


@pytest.mark.slow
@KINDS
def test_what_is_sharded_otherwise_is_brought_together(kind):
    mesh = mesh_of(kind)
    specs = {"query": P(None, "data"), "key": P(None, None, "model"), "value": P("data")}
    floats = {n: jax.device_put(x, NamedSharding(mesh, specs.get(n, P()))) for n, x in arguments().items()}
    check(gradients("interpret")(floats, floats.pop("segment_ids")))


@pytest.mark.parametrize("ids", [P("data"), P()], ids=["sharded", "whole"])
@pytest.mark.parametrize("form", ["segment_ids", "pair", "lengths", "of keys"])
@pytest.mark.sweep(form=None)
def test_documents_in_a_mesh_that_is_set(form, ids):
    """Ids and lengths are looked into before a kernel runs, by each device where they lie."""
    of_tokens, lengths = arguments()["segment_ids"], jnp.array([40, 3, 0, 17], jnp.int32)
    given = lengths if form in ("lengths", "of keys") else of_tokens

    def loss(dense, given):
        match form:
            case "segment_ids":
                out = flash_attention(*dense, segment_ids=given)
            case "pair":
                out = flash_attention(*dense, segment_ids=(given, given[:, ::-1]))
            case "lengths":
                out = dot_product_attention(*dense, query_seq_lengths=given, key_value_seq_lengths=given)
            case "of keys":
                out = dot_product_attention(*dense, key_value_seq_lengths=given)
        return jnp.sum(jnp.sin(out))

    dense = [arguments()[name] for name in ("query", "key", "value")]
    expected = jax.jit(jax.grad(loss))(dense, given)
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, TOKENS)) for x in dense]
        got = jax.grad(loss)(placed, jax.device_put(given, NamedSharding(mesh, ids)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-5), got, expected)


def test_shard_map():
    """The caller's own division: gradients of what is the same everywhere are summed over the axes."""
    mesh = mesh_of(AxisType.Explicit)
    floats = dict(arguments())
    ids = floats.pop("segment_ids")
    specs = {
        n: spec
        for n, spec in (dict.fromkeys(("query", "key", "value"), TOKENS) | FULL).items()
        if n in floats
    }

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs, P("data")), out_specs=P())
    def loss(floats, ids):
        out, lse = flash_attention(
            **floats, segment_ids=ids, causal=True, return_lse=True, implementation="xla"
        )
        mine = jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, lse))
        return jax.lax.psum(mine, ("data", "model"))

    placed = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in floats.items()}
    check(jax.jit(jax.value_and_grad(loss))(placed, jax.device_put(ids, NamedSharding(mesh, P("data")))))


@pytest.mark.parametrize("kind", list(AxisType), ids=str)
def test_gradients_by_cuda_on_a_device_are_of_what_it_holds(monkeypatch, kind):
    """Its kernels stood in for by jnp; Manual is shard_map's, whose check of what varies they pass."""
    hopper_on_cpu.stand_in(monkeypatch)
    ids, sinks = arguments()["segment_ids"], arguments()["sinks"]
    dense = [arguments()[name].astype(jnp.bfloat16) for name in ("query", "key", "value")]
    seen = []
    stood_in = hopper_on_cpu.backward
    monkeypatch.setattr(
        "pallas_attn._call.hopper_backward.backward",
        lambda query, *rest, **options: seen.append(query.shape) or stood_in(query, *rest, **options),
    )

    def loss(floats, ids, **options):
        out = flash_attention(*floats[:3], sinks=floats[3], segment_ids=ids, causal=True, **options)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    own = dict(implementation="cuda", config=FlashAttentionCudaConfig("cuda"))
    manual = kind == AxisType.Manual
    mesh = mesh_of(AxisType.Explicit if manual else kind)
    specs = (*[TOKENS] * 3, P("model")), P("data")
    call = functools.partial(loss, **own)
    if manual:
        part = call

        @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=P())
        def call(floats, ids):
            return jax.lax.psum(part(floats, ids), ("data", "model"))

    place = functools.partial(jax.tree.map, lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)))
    got = jax.jit(jax.grad(call))(*place(((*dense, sinks), ids), specs))
    assert (2, 40, 2, 16) in seen
    want = jax.jit(jax.grad(functools.partial(loss, implementation="xla")))(
        (*(x.astype(jnp.float32) for x in dense), sinks), ids
    )
    for one, right in zip(got, want, strict=True):
        assert jnp.linalg.norm(one.astype(jnp.float32) - right) < 8e-3 * jnp.linalg.norm(right)


def test_what_devices_of_a_shard_map_share_has_gradients_summed_in_float32():
    """Keys and values of a single head beside sharded query heads, a bias, sinks, and what a score_mod reads."""
    mesh = mesh_of(AxisType.Explicit)
    heads, whole = P(None, None, ("data", "model")), P()

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(heads, *[whole] * 5), out_specs=whole)
    def loss(query, key, value, bias, sink, slope):
        out = flash_attention(
            query, key, value, bias=bias, sinks=sink, implementation="xla",
            score_mod=lambda score, batch, head, q, k: score + slope[head] * (k - q),
        )  # fmt: skip
        return jax.lax.psum(jnp.sum(jnp.sin(out.astype(jnp.float32))), ("data", "model"))

    shapes = ((1, 32, 8, 16), (1, 32, 1, 16), (1, 32, 1, 16), (1, 1, 32, 32), (1,), (1,))
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, heads if i == 0 else whole))
        for i, shape in enumerate(shapes)
    ]
    text = jax.jit(jax.grad(loss, tuple(range(1, 6)))).lower(*arrays).as_text()
    sums = re.findall(r'"stablehlo.all_reduce".*?\}\) : \(tensor<(.*?)>\)', text, re.DOTALL)
    assert len(sums) >= 5
    assert all(one.endswith("f32") for one in sums), sums


@KINDS
def test_a_shared_bias_has_a_gradient_that_is_rounded_once(kind):
    """Devices have parts of it, which are added up in float32; and none makes it for each sequence and head."""
    mesh = mesh_of(kind)
    rng = np.random.default_rng(2)
    query, key, value = (
        jax.device_put(
            jnp.asarray(rng.standard_normal((4, 128, 8, 16)), jnp.float32), NamedSharding(mesh, TOKENS)
        )
        for _ in range(3)
    )

    def gradient(implementation):
        def loss(bias, query, key, value):
            config = SMALL_TILES if implementation == "interpret" else None
            out = flash_attention(query, key, value, bias=bias, implementation=implementation, config=config)
            return jnp.sum(jnp.sin(3 * out))

        return jax.jit(jax.grad(loss))

    bias = jax.device_put(jnp.zeros((1, 1, 128, 128)), NamedSharding(mesh, P()))
    expected = gradient("xla")(bias, query, key, value)
    got = gradient("interpret")(bias.astype(jnp.bfloat16), query, key, value)
    assert got.dtype == jnp.bfloat16
    assert got.shape == bias.shape
    np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=2**-8, atol=1e-6)


@IMPLEMENTATIONS
@KINDS
def test_functions_of_the_callers_count_heads_and_sequences_of_all_devices(kind, implementation):
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(4, 48, 8, 16)), jnp.float32) for _ in range(3))
    slopes, prefixes = jnp.arange(8.0) / 8, jnp.array([3, 10, 20, 40], jnp.int32)

    def loss(slopes, tokens, implementation):
        mask = mods.and_masks(mods.prefix_lm(prefixes), lambda b, h, q, k: q - k < 6 * (h + 1))
        options = dict(score_mod=mods.alibi(slopes), mask_mod=mask, implementation=implementation)
        return (flash_attention(*tokens, **options) * value).sum()

    gradients = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)
    want = gradients(slopes, (query, key, value), "xla")
    placed = NamedSharding(mesh_of(kind), TOKENS)
    tokens = tuple(jax.device_put(x, placed) for x in (query, key, value))
    with jax.set_mesh(placed.mesh) if kind == AxisType.Explicit else contextlib.nullcontext():
        got = gradients(slopes, tokens, implementation)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
