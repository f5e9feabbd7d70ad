"""`jax.nn.dot_product_attention` by flash attention: the same arguments, to be put in its place."""

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call.checks import (
    LARGEST_FLOAT32,
    LEAST_FLOAT32,
    ArgumentChecker,
    brief,
    is_array,
    is_number,
    is_traced,
    shown,
)
from pallas_attn._call.options import DTYPES
from pallas_attn._types import ImplementationOrCuda
from pallas_attn.ops.flash_attention.api import serve

NAME = "dot_product_attention"
SPELLED = {"causal": "is_causal", "sliding_window": "local_window_size", "return_lse": "return_residual"}
type AnyArray = jax.Array | np.ndarray | np.generic


@overload
def dot_product_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: AnyArray | None = None,
    mask: AnyArray | None = None, *, scale: float | AnyArray | None = None, is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None, key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None, implementation: ImplementationOrCuda | None = None,
    return_residual: Literal[False] = False, residual_checkpoint_name: str | None = None,
) -> jax.Array: ...  # fmt: skip


@overload
def dot_product_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: AnyArray | None = None,
    mask: AnyArray | None = None, *, scale: float | AnyArray | None = None, is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None, key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None, implementation: ImplementationOrCuda | None = None,
    return_residual: Literal[True], residual_checkpoint_name: str | None = None,
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip


@overload
def dot_product_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: AnyArray | None = None,
    mask: AnyArray | None = None, *, scale: float | AnyArray | None = None, is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None, key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None, implementation: ImplementationOrCuda | None = None,
    return_residual: bool = False, residual_checkpoint_name: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...  # fmt: skip
def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: AnyArray | None = None,
    mask: AnyArray | None = None,
    *,
    scale: float | AnyArray | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: ImplementationOrCuda | None = None,
    return_residual: bool = False,
    residual_checkpoint_name: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`jax.nn.dot_product_attention` with the arguments of jax 0.11 and 0.12, served by `flash_attention`.

    For the `attention_fn` of Flax's modules use `pallas_attn.nn.attention_fn`: with this function Linen would drop its
    dropout in silence.

    Args:
        query, key, value: [batch, q_len, num_heads, head_dim] and [batch, kv_len, num_kv_heads, head_dim], or without
            the batch; bf16, fp16 or float32.
        bias, mask: [batch, num_heads, q_len, kv_len], where each dimension may be 1, and the first ones, or all, may
            be left out. bias is of floats, float64 and integers taken as float32; mask is bool.
        scale: factor of the logits, a number of any sign, 0 included, or an array of one without dimensions; None
            means head_dim ** -0.5. A traced one, as `1 / jnp.sqrt(16.0)` is under jit, multiplies the query, which
            rounds a 16-bit query once more than jax.nn does; it has gradients.
        is_causal: query i sees keys up to i.
        query_seq_lengths, key_value_seq_lengths: [batch] int32; tokens from there on are padding, whatever they hold.
        local_window_size: (left, right), or one int for both: query i sees keys from i - left to i + right.
        implementation: of `flash_attention`: None, "cuda", "pallas", "triton", "xla" or "interpret".
        return_residual: also return the log-sum-exp, [batch, q_len, num_heads], through which no gradients go, as in
            jax.nn; that of `flash_attention` has gradients.
        residual_checkpoint_name: as of `flash_attention`, for jax.checkpoint's policies; jax.nn has no such argument.

    Returns:
        What jax.nn's returns, except for a query that sees no key: out is 0 and the residual -inf here. The residual is
        float32, where jax.nn rounds it to the key's dtype. Dimensions of 0 (batch, queries, keys) are served.

    What jax.nn's supports and this does not: implementation "cudnn"; lists and Python numbers for arrays; query, key
    and value of float64 or of unlike numbers of dimensions; a bias of bools; int64 lengths; a window that is a list,
    negative or traced; heads wider than 256 on the GPU; forward mode and second derivatives.

    Raises:
        TypeError, ValueError: as `flash_attention`, under this name for what only this function has.
    """
    check = ArgumentChecker(NAME, SPELLED)
    check.is_array("query", query)
    if len(query.shape) not in (3, 4):
        forms = "[batch, q_len, num_heads, head_dim] or [q_len, num_heads, head_dim]"
        check.fail("query", f"shape {forms}", str(list(query.shape)))
    for name, array in (("key", key), ("value", value)):
        check.is_array(name, array)
        if len(array.shape) != len(query.shape):
            check.fail(name, "as many dimensions as query", str(list(array.shape)))
    single = len(query.shape) == 3

    def in_four_dimensions(array: Any) -> Any:
        few = is_array(array) and len(array.shape) < 4
        return array[(None,) * (4 - len(array.shape))] if few else array

    query, key, value, bias, mask = map(in_four_dimensions, (query, key, value, bias, mask))
    lengths = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    lengths = {name: given for name, given in lengths.items() if given is not None}
    for name, given in lengths.items():
        check.array(name, given, (query.shape[0],), [jnp.int32])
    query, scale = _scaled(check, query, scale)
    window = local_window_size
    if isinstance(window, int | np.integer):
        window = (window, window)
    check.flag("return_lse", return_residual)
    out, lse = serve(
        check,
        query,
        key,
        value,
        bias=_promoted(bias),
        mask=mask,
        segment_ids=None,
        lengths=lengths,
        causal=is_causal,
        sliding_window=window,
        scale=scale,
        return_lse=True,
        implementation=implementation,
        residual_checkpoint_name=residual_checkpoint_name,
        without_tokens=True,
    )
    lse = jax.lax.stop_gradient(lse)
    if single:
        out, lse = out[0], lse[0]
    return (out, lse) if return_residual else out


def _promoted(bias: Any) -> Any:
    """As jax promotes it against float32 logits."""
    if is_array(bias) and (bias.dtype == np.float64 or jnp.issubdtype(bias.dtype, jnp.integer)):
        return jnp.asarray(bias, jnp.float32)
    return bias


def _scaled(check: ArgumentChecker, query: Any, scale: Any) -> tuple[Any, float | None]:
    """A scale that kernels can take, concrete and above 0, and the query times the remaining factor."""
    if scale is None:
        return query, None
    expected = "a finite number, as such or as an array without dimensions, or None"
    if not is_number(scale):
        array = isinstance(scale, jax.Array | np.ndarray | np.generic) and scale.shape == ()
        if not array or not any(jnp.issubdtype(scale.dtype, kind) for kind in (jnp.floating, jnp.integer)):
            check.fail("scale", expected, shown(scale), TypeError)
    check.dtype_among("query", query, DTYPES)
    if is_traced(scale):
        return (query.astype(jnp.float32) * scale.astype(jnp.float32)).astype(query.dtype), 1.0
    number: Any = scale.item() if is_array(scale) else scale
    size = abs(number)
    if not size <= LARGEST_FLOAT32:
        check.fail("scale", expected, brief(number))
    if size < LEAST_FLOAT32:
        return query * 0, 1.0
    return (query if number > 0 else -query), float(size)
