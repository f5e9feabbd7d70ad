"""Flax's own modules with `nn.attention_fn`: the same numbers and gradients, and nothing dropped in silence."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from pallas_attn.nn import attention_fn

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "interpret"])
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 24, 16)), jnp.float32)
MASK = nnx.make_causal_mask(X[..., 0])  # of numbers
DROPOUT = "attention_fn: argument 'dropout_rate': expected 0, or deterministic=True: .*, got 0.5"


def of_nnx(dropout_rate: float = 0.0) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(2, 16, decode=False, dropout_rate=dropout_rate, rngs=nnx.Rngs(0))


@IMPLEMENTATIONS
@pytest.mark.parametrize("how", [dict(mask=MASK), dict(is_causal=True)], ids=["mask", "is_causal"])
def test_an_nnx_module_trains_the_same(implementation, how):
    module = of_nnx()

    def step(**given):
        def of_module(module):
            for name, function in given.items():
                setattr(module, name, function)
            return jnp.sum(jnp.sin(module(X, **how)))

        return nnx.value_and_grad(of_module)(module)

    ours = functools.partial(attention_fn, implementation=implementation)
    with jax.default_matmul_precision("highest"):
        (got, got_grads), (expected, grads) = step(attention_fn=ours), step()
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=5e-6, rtol=1e-5), got_grads, grads)


def test_a_linen_module_gives_the_same():
    plain, ours = (
        linen.MultiHeadDotProductAttention(2, dropout_rate=0.5, deterministic=True, **how)
        for how in ({}, dict(attention_fn=attention_fn))
    )
    weights = plain.init(jax.random.key(0), X)
    got, expected = (module.apply(weights, X, mask=MASK) for module in (ours, plain))
    np.testing.assert_allclose(got, expected, atol=2e-6)


def test_dropout_is_refused():
    """Of weights; where it is off it may be named."""
    module = of_nnx(0.5)
    module.attention_fn = attention_fn
    assert module(X, deterministic=True).shape == X.shape
    with pytest.raises(ValueError, match=DROPOUT):
        module(X, deterministic=False, rngs=nnx.Rngs(1))
    of_linen = linen.MultiHeadDotProductAttention(2, dropout_rate=0.5, attention_fn=attention_fn)
    with pytest.raises(ValueError, match=DROPOUT):
        of_linen.init(dict(params=jax.random.key(0), dropout=jax.random.key(1)), X, deterministic=False)


def test_weights_cannot_be_had():
    module = of_nnx()
    module.attention_fn = attention_fn
    with pytest.raises(
        ValueError, match="attention_fn: argument 'module': expected None: there are no weights"
    ):
        module(X, sow_weights=True)


@pytest.mark.parametrize(
    "flax_own", [linen.dot_product_attention, nnx.dot_product_attention], ids=["linen", "nnx"]
)
def test_every_option_is_known(flax_own):
    """Linen drops those that are not, without a word. What its module never passes need not be."""
    never_passed = {"einsum_dot_general", "promote_dtype"}
    assert set(inspect.signature(flax_own).parameters) - never_passed <= set(
        inspect.signature(attention_fn).parameters
    )
