"""`flash_attention` under jax's transformations, and in the place of `jax.nn.dot_product_attention`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flash_inputs import SMALL_TILES
from support import unchecked

import pallas_attn
from pallas_attn import flash_attention

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "interpret"])


def arrays(*lead: int, q_len: int = 24, heads: int = 4) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = ((q_len, heads, 16), (24, 2, 16), (24, 2, 16))
    return [jnp.asarray(rng.standard_normal((*lead, *shape)), jnp.float32) for shape in shapes]


def loss(query, key, value, implementation, **options) -> jax.Array:
    config = SMALL_TILES if implementation == "interpret" else None
    call = functools.partial(
        flash_attention, implementation=implementation, config=config, causal=True, **options
    )
    return jnp.sum(jnp.sin(call(query, key, value)))


def assert_close(got, expected) -> None:
    assert all(jnp.abs(x).max() > 1e-3 for x in jax.tree.leaves(expected))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-6, rtol=1e-5), got, expected)


@IMPLEMENTATIONS
def test_scan_over_checkpointed_layers(implementation):
    """Each layer's query is the one before's output; with and without recomputing."""
    query, key, value = arrays(3, 1)

    def layers(query, key, value, remat):
        def layer(x, kv):
            return x + flash_attention(x, *kv, causal=True, implementation=implementation), None

        out, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, query, (key, value))
        return jnp.sum(jnp.sin(out))

    def unrolled(query, key, value):
        for k, v in zip(key, value, strict=True):
            k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
            query = query + jax.nn.dot_product_attention(query, k, v, is_causal=True)
        return jnp.sum(jnp.sin(query))

    grad = functools.partial(jax.grad, argnums=(0, 1, 2))
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(grad(unrolled))(query[0], key, value)
    for remat in (True, False):
        got = jax.jit(grad(layers), static_argnums=3)(query[0], key, value, remat)
        assert_close(got, expected)


@IMPLEMENTATIONS
def test_vmap_of_gradients(implementation):
    """Over what is mapped and what is not: the keys are the same for all, and their gradients are not."""
    query, key, value = arrays(3, 1)
    grad = jax.grad(functools.partial(loss, implementation=implementation), argnums=(0, 1, 2))
    got = jax.jit(jax.vmap(grad, in_axes=(0, None, 0)))(query, key[0], value)
    each = [jax.jit(grad)(query[i], key[0], value[i]) for i in range(3)]
    assert_close(got, jax.tree.map(lambda *x: jnp.stack(x), *each))


@pytest.mark.once
@IMPLEMENTATIONS
def test_only_what_is_asked_for_is_worked_out(implementation):
    """Gradients of sinks and bias alone, and of arguments that are not the first."""
    query, key, value = arrays(1)
    sinks, bias = jnp.arange(4.0), jnp.ones((1, 1, 1, 24))

    def call(sinks, bias, value):
        return loss(query, key, value, implementation, sinks=sinks, bias=bias)

    every = jax.jit(jax.grad(call, argnums=(0, 1, 2)))(sinks, bias, value)
    assert_close(jax.grad(call)(sinks, bias, value), every[0])
    assert_close(jax.grad(call, argnums=1)(sinks, bias, value), every[1])
    assert_close(jax.grad(call, argnums=2)(sinks, bias, value), every[2])


@pytest.mark.once
def test_a_sink_that_is_none_has_no_gradient():
    """-inf takes part in no softmax, not in that of a query that sees nothing either."""
    query, key, value = arrays(1)
    mask = (jnp.arange(24) != 5)[None, None, :, None]
    sinks = jnp.array([-jnp.inf, 0.0, -jnp.inf, 1.0])
    (gradient,) = jax.grad(lambda sinks: loss(query, key, value, "xla", sinks=sinks, mask=mask), (0,))(sinks)
    assert (gradient[::2] == 0).all()
    assert (jnp.abs(gradient[1::2]) > 1e-3).all()


@pytest.mark.once
def test_gradient_of_a_bias_of_a_single_key():
    query, key, value = arrays(1)
    bias = jnp.arange(4.0)[None, :, None, None]

    def call(bias, implementation):
        return loss(query, key[:, :1], value[:, :1], implementation, bias=bias, sinks=jnp.zeros(4))

    got, expected = (jax.jit(jax.grad(call), static_argnums=1)(bias, name) for name in ("interpret", "xla"))
    assert_close(got, expected)


@pytest.mark.once
def test_nothing_grows_with_the_square_of_the_length():
    """The reference's largest array, forward and backward, at twice the length: twice as large at most."""

    def largest(length: int) -> int:
        shapes = [jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for heads in (16, 4, 4)]
        grad = jax.grad(functools.partial(loss, implementation="xla"), argnums=(0, 1, 2))
        return jax.jit(grad).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    short, long = largest(16384), largest(32768)
    assert long < 2.2 * short
    assert long < 16 * 32768**2 * 4 / 50  # of what one array of all logits would take


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "window": {"local_window_size": (5, 3)},
    "window of one number": {"local_window_size": 4},
    "bias": {"bias": (1, 4, 24, 24)},
    "mask": {"mask": (2, 1, 24, 24), "is_causal": True},
    "lengths": {"query_seq_lengths": [24, 7], "key_value_seq_lengths": [13, 24]},
}


def test_what_is_no_window_hears_of_both_its_forms():
    query, key, value = arrays(2)
    for function, name in (
        (flash_attention, "sliding_window"),
        (pallas_attn.dot_product_attention, "local_window_size"),
    ):
        expected = f"'{name}': expected an int or a tuple \\(left, right\\), got \\[5, 3\\] of type list"
        with pytest.raises(TypeError, match=expected):
            unchecked(function)(query, key, value, **{name: [5, 3]})


@pytest.mark.parametrize(
    "option", [name if name == "lengths" else pytest.param(name, marks=pytest.mark.once) for name in OPTIONS]
)
def test_dot_product_attention_is_that_of_jax_nn(option):
    query, key, value = arrays(2)
    rng = np.random.default_rng(1)
    options = dict(OPTIONS[option])
    if "bias" in options:
        options["bias"] = jnp.asarray(rng.standard_normal(options["bias"]), jnp.float32)
    if "mask" in options:
        # Every query sees itself: for one that sees nothing, jax.nn returns the mean of all values.
        options["mask"] = jnp.asarray(rng.random(options["mask"]) < 0.5) | jnp.eye(24, dtype=bool)
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        if name in options:
            options[name] = jnp.array(options[name], jnp.int32)

    def results(function, query, key, value):
        out, lse = function(query, key, value, **options, return_residual=True)
        real = jnp.arange(24) < options.get("query_seq_lengths", jnp.array([24]))[:, None]
        lse = jnp.where(real[..., None], lse, 0.0)
        return jnp.sum(jnp.sin(out)), (out, lse)

    for kv_heads in (2, 1):
        with jax.default_matmul_precision("highest"):
            expected, got = (
                jax.jit(jax.value_and_grad(functools.partial(results, f), argnums=(0, 1, 2), has_aux=True))(
                    query, key[:, :, :kv_heads], value[:, :, :kv_heads]
                )
                for f in (jax.nn.dot_product_attention, pallas_attn.dot_product_attention)
            )
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=5e-6, rtol=2e-6), got, expected)


def weighed(function, query, key, value, **options):
    """Of which gradients are taken, and what is compared besides."""
    out, lse = function(query, key, value, **options, return_residual=True)
    return jnp.sum(jnp.sin(out.astype(jnp.float32))), (out, lse)


def by_both(implementation, given, *, argnums=(0, 1, 2), traced=(), **options):
    """What jax.nn's makes of a call, gradients included, and what ours does."""

    def gradients(function):
        def of(query, key, value, *rest):
            return weighed(function, query, key, value, **dict(zip(traced, rest, strict=True)), **options)

        (_, results), gradients = jax.jit(jax.value_and_grad(of, argnums, has_aux=True))(*given)
        return results, gradients

    ours = functools.partial(unchecked(pallas_attn.dot_product_attention), implementation=implementation)
    with jax.default_matmul_precision("highest"):
        return gradients(jax.nn.dot_product_attention), gradients(ours)


SCALES = {
    "numpy": np.array(0.3),
    "jax": np.float32(0.3),
    "bf16": jnp.bfloat16(0.3),
    "integer": np.array(1),
    "negative": -0.3,
    "negative, an array": np.array(-0.3),
    "zero": 0.0,
    "less than float32 has": -1e-60,
}
PAIRWISE = {
    "float64 bias": {"bias": np.linspace(-1, 1, 24 * 24).reshape(1, 1, 24, 24)},
    "integer bias": {"bias": np.arange(24)[None, None, None] % 3},
    "int8 bias": {"bias": np.arange(24, dtype=np.int8) % 3},
    "bias without dimensions": {"bias": np.array(0.5, np.float32)},
    "mask without dimensions": {"mask": np.array(True)},
}
TAKEN = {f"scale, {name}": {"scale": scale} for name, scale in SCALES.items()} | PAIRWISE


@IMPLEMENTATIONS
@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.sweep(name=lambda name: [name.partition(",")[0]])
def test_arguments_that_only_jax_nn_has(name, implementation):
    options = dict(TAKEN[name])
    if name == "scale, jax":
        options["scale"] = jnp.asarray(options["scale"])
    expected, got = by_both(implementation, arrays(2), is_causal=True, **options)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=5e-6, rtol=2e-6), got, expected)


@IMPLEMENTATIONS
def test_a_traced_scale_has_gradients(implementation):
    for scale in (0.3, -0.3):
        given = [*arrays(2), jnp.float32(scale)]
        expected, got = by_both(implementation, given, argnums=(0, 1, 2, 3), traced=("scale",))
        assert jnp.abs(expected[1][3]) > 1e-3
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=2e-5), got, expected)


def test_a_traced_scale_is_one_number():
    call = functools.partial(unchecked(pallas_attn.dot_product_attention), *arrays(2))
    message = "dot_product_attention: argument 'scale': expected a finite number, .*, got an array of dtype"
    for wrong in (jnp.ones(1), jnp.ones((), bool)):
        with pytest.raises(TypeError, match=message):
            jax.eval_shape(lambda scale: call(scale=scale), wrong)


@pytest.mark.once
def test_a_traced_scale_rounds_a_query_of_16_bits_once():
    query, key, value = (x.astype(jnp.bfloat16) for x in arrays(2))
    attend = functools.partial(pallas_attn.dot_product_attention, query, key, value, implementation="xla")
    got = jax.jit(lambda scale: attend(scale=scale))(0.3)
    assert got.dtype == jnp.bfloat16
    rounded = (query.astype(jnp.float32) * 0.3).astype(jnp.bfloat16)

    def off(got: jax.Array, query: jax.Array, **scale: float) -> float:
        expected = pallas_attn.dot_product_attention(query, key, value, implementation="xla", **scale)
        return float(np.mean(np.asarray(got != expected)))

    # Two programs may add up in two orders, which moves an element in a thousand; another rounding moves many.
    assert off(got, rounded, scale=1.0) < 0.01
    assert off(got, query * jnp.bfloat16(0.3), scale=1.0) > 0.1
    # A power of two rounds nothing.
    assert off(jax.jit(lambda: attend(scale=1 / jnp.sqrt(16.0)))(), query) < 0.01


def test_no_gradient_goes_through_the_residual():
    """Neither jax.nn's nor ours; that of `flash_attention` is there for it."""
    query, key, value = arrays(2)

    def of_residual(function, query, key, value):
        return jnp.sum(jnp.sin(function(query, key, value, return_residual=True)[1]))

    for function in (jax.nn.dot_product_attention, pallas_attn.dot_product_attention):
        gradients = jax.jit(jax.grad(functools.partial(of_residual, function), (0, 1, 2)))(query, key, value)
        assert all((gradient == 0).all() for gradient in gradients)
    gradient = jax.grad(lambda q: jnp.sum(jnp.sin(flash_attention(q, key, value, return_lse=True)[1])))(query)
    assert jnp.abs(gradient).max() > 1e-3


@pytest.mark.parametrize("sizes", [(2, 0, 3), (2, 3, 0), (0, 3, 3), (2, 0, 0)], ids=str)
def test_without_tokens(sizes):
    batch, q_len, kv_len = sizes
    query, key, value = jnp.ones((batch, q_len, 4, 16)), *jnp.ones((2, batch, kv_len, 2, 16))
    lengths = jnp.zeros(batch, jnp.int32)
    every = dict(is_causal=True, local_window_size=2, query_seq_lengths=lengths, scale=-0.3)
    pairs = dict(bias=jnp.ones((1, 4, q_len, kv_len)), mask=jnp.ones((batch, 1, 1, kv_len), bool))
    for options in ({}, every | pairs):
        expected, got = by_both("xla", (query, key, value), **options)
        jax.tree.map(np.testing.assert_array_equal, got, expected)
        assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, expected)


def test_what_is_empty_but_of_tokens_is_refused():
    for heads, dim in ((0, 16), (4, 0)):
        query, key = jnp.ones((2, 0, heads, dim)), jnp.ones((2, 3, 2, dim))
        with pytest.raises(
            ValueError, match="dot_product_attention: argument 'query': expected no empty dim"
        ):
            pallas_attn.dot_product_attention(query, key, key)
    query, key = jnp.ones((2, 0, 4, 16)), jnp.ones((2, 3, 2, 16))
    with pytest.raises(ValueError, match="flash_attention: argument 'query': expected no empty dimension"):
        flash_attention(query, key, key)


@pytest.mark.once
def test_dot_product_attention_without_a_batch():
    query, key, value = arrays()
    bias = jnp.linspace(0, 1, 24)[None, None] * jnp.ones((4, 24, 1))
    expected = jax.nn.dot_product_attention(query, key, value, bias)
    for same in (bias, bias[None]):  # jax.nn's documentation asks for four dimensions all the same
        got = pallas_attn.dot_product_attention(query, key, value, same)
        np.testing.assert_allclose(got, expected, atol=2e-6)


@pytest.mark.once
def test_a_mask_may_be_of_queries_and_keys_alone():
    query, key, value = arrays(2)
    mask = jnp.asarray(np.random.default_rng(1).random((24, 24)) < 0.5) | jnp.eye(24, dtype=bool)
    for same in (mask, mask[None]):
        expected, got = (
            attention(query, key, value, mask=same)
            for attention in (jax.nn.dot_product_attention, pallas_attn.dot_product_attention)
        )
        np.testing.assert_allclose(got, expected, atol=2e-6)
