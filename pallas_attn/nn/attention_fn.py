"""Flash attention inside Flax's own attention modules, NNX's and Linen's."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn import dot_product_attention
from pallas_attn._call.checks import ArgumentChecker, is_array, is_number, shown
from pallas_attn._call.options import DTYPES
from pallas_attn._types import Implementation


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = True,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    is_causal: bool = False,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """`pallas_attn.dot_product_attention` as `attention_fn` of `nnx.MultiHeadAttention` and
    `linen.MultiHeadDotProductAttention`.

    Linen passes only the options in a function's signature, and drops the others in silence. All of them are here, so
    that those without a counterpart are refused: dropout of attention weights, and `sow_weights`, since the weights are
    never in memory.

    Args:
        query, key, value: [batch, tokens, heads, head_dim]; brought to `dtype`, or to the one they promote to.
        bias, mask: as of `dot_product_attention`; numbers in a mask, as `make_causal_mask` gives, count as True where
            not 0.
        dropout_rate: 0, or any number where `deterministic` is True; `dropout_rng` and `broadcast_dropout` are then
            ignored.
        dtype: of the computation and of the result.
        precision, force_fp32_for_softmax: any; float32 is never rounded, and the softmax is float32.
        module, qk_attn_weights_einsum, attn_weights_value_einsum: None.
        is_causal: query i sees keys up to i.
        implementation: of `flash_attention`; bind it with `functools.partial`.

    Returns:
        [batch, tokens, heads, head_dim]; 0 for a query that sees no key, which in Flax sees all of them alike.

    Raises:
        TypeError, ValueError: an option that has no counterpart; and as `dot_product_attention`, under its name.
    """
    check = ArgumentChecker("attention_fn")
    check.flag("deterministic", deterministic)
    if not is_number(dropout_rate):
        check.fail("dropout_rate", "a number", shown(dropout_rate), TypeError)
    if dropout_rate != 0 and not deterministic:
        check.fail("dropout_rate", "0, or deterministic=True: weights have no dropout", str(dropout_rate))
    if module is not None:
        check.fail("module", "None: there are no weights to sow", "a module")
    for name, einsum in (
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        if einsum is not None:
            check.fail(name, "None: products are the kernel's own", shown(einsum))
    if dtype is not None:
        check.dtype("dtype", dtype, DTYPES)
    if mask is not None:
        check.is_array("mask", mask)
        mask = jnp.asarray(mask).astype(bool)
    if all(map(is_array, (query, key, value))):
        common = jnp.result_type(query, key, value) if dtype is None else dtype
        query, key, value = (jnp.asarray(array).astype(common) for array in (query, key, value))
    return dot_product_attention(
        query, key, value, bias, mask, is_causal=is_causal, implementation=implementation
    )
