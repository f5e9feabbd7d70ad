"""The call with its derivative: what is kept for the backward pass, and who works out what."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import derivative
from pallas_attn._call.op import Call
from pallas_attn._tile import low_bits, softmax, weights
from pallas_attn.mods.diagonal import holds_diagonal
from pallas_attn.mods.operands import captured_dims
from pallas_attn.ops.flash_attention import cuda
from pallas_attn.ops.flash_attention.operands import KEYS, LSE, QUERIES, BackwardOperands, Operands, of_pairs
from pallas_attn.ops.flash_attention.problem import Problem
from pallas_attn.ops.flash_attention.scores import natural_scale

FLOATS = ("query", "key", "value", "sinks", "bias", "captured")


def attend(call: Call, operands: Operands) -> tuple[jax.Array, ...]:
    """(out as query, lse [batch, num_kv_heads, group, q_len])."""
    problem = Problem.of(operands)
    if 0 in (problem.batch, problem.q_len, problem.kv_len):
        out = jnp.zeros((*operands.query.shape[:-1], problem.value_dim), operands.query.dtype)
        return out, jnp.full(problem.lse_shape, -jnp.inf, jnp.float32)

    def forward(operands: Operands, keep: bool) -> tuple[derivative.Results, Any]:
        loses = keep and low_bits.are_lost(operands.query.dtype)
        query = QUERIES(operands)
        results = (query, LSE, LSE, *([query] if loses else []))
        out, maximum, rest, *low = call.run(operands, results=results, keep=loses)
        lse = softmax.Lse(maximum, rest)
        natural = lse.natural(natural_scale(operands))
        return (out, natural), (weights.Kept(lse, low[0] if low else None) if keep else None)

    gradients = functools.partial(_gradients, call)
    rule = derivative.Rule(call.op.name, FLOATS, forward, gradients, operands.checkpoint_name)
    return derivative.differentiable(rule, operands)


def _gradients(
    call: Call, operands: Operands, results, kept: weights.Kept, cotangents, asked
) -> dict[str, Any]:
    (out, natural), (d_out, d_lse) = results, cotangents
    lse, layout = kept.lse.following(natural), operands.rules.layout

    def by_head(x: jax.Array) -> jax.Array:
        """[batch, num_kv_heads, group, q_len] of numbers that stand as out's rows."""
        return jnp.moveaxis(x, 1, -1) if layout == "BTNH" else x

    if call.implementation == "xla" or _may_blind(operands):
        # Elsewhere kernels never read, of whole tiles, what sees no key.
        blind = weights.are_blind(lse, has_sink=operands.sinks is not None)
        d_out = weights.of_seeing(d_out, jnp.moveaxis(blind, -1, 1) if layout == "BTNH" else blind)
    product = by_head(weights.product(out, kept.low, d_out))
    if operands.sinks is not None:
        sinks = softmax.finite_sink(operands.sinks)[None, :, :, None]
        found = weights.of_queries(product, lse, d_lse, sinks, natural_scale(operands))
    else:
        found = weights.of_queries(product, lse, d_lse)
    # A query that sees nothing has logits of -inf alone, and weights of 0 whatever is taken off.
    maximum, rest = map(softmax.finite, lse)
    own = call.implementation == "cuda" and cuda.takes_backward(operands, call.config)
    given = vars(dataclasses.replace(operands if own else without_bits(operands), padding=None))
    backward = BackwardOperands(
        **given, d_out=d_out, maximum=maximum, rest=rest, delta=found.delta, total=found.total
    )
    gradients: dict[str, Any] = dict.fromkeys(name for name in FLOATS if given[name] is not None)
    which = ("query", "key", "value")
    if asked.keys() & set(which):
        dims = (QUERIES(operands), KEYS(operands), KEYS(operands))
        step = "cuda_backward" if own else "backward"
        gradients |= zip(which, call.run(backward, step=step, results=dims), strict=True)
    if "sinks" in asked:
        # The sink's logit has a weight, like a key's, and no value.
        gradients["sinks"] = jnp.sum(found.d_sink, axis=(0, 3))
    if "bias" in asked and (bias := operands.bias) is not None:
        shared = tuple(kind for kind, size in zip(("seqs", "heads"), bias.shape, strict=False) if size == 1)
        (gradients["bias"],) = call.run(
            backward, step="bias_gradient", results=(of_pairs(bias),), summed=shared
        )
    if "captured" in asked and (captured := operands.captured) is not None:
        gradients["captured"] = call.run(
            backward,
            step="captured_gradients",
            results=tuple(map(captured_dims, captured)),
            summed=("seqs", "heads"),
            asked=tuple(i for i in range(len(captured)) if f"captured.{i}" in asked),
        )
    return gradients


def _may_blind(operands: Operands) -> bool:
    """Whether mask, bias or mods may leave a query no key."""
    mods = operands.mods
    if operands.mask is not None or operands.bias is not None:
        return True
    if mods is None or cuda.has_slopes(operands):
        return False
    problem = Problem.of(operands)
    own = mods.mask is None or (problem.q_len <= problem.kv_len and holds_diagonal(mods.mask))
    return mods.score is not None or not own


def without_bits(operands: Operands) -> Operands:
    """For kernels that ask a mask, and need not be told."""
    if operands.mods is None or operands.mods.bits is None:
        return operands
    return dataclasses.replace(operands, mods=dataclasses.replace(operands.mods, bits=None))


def padded(forward: Callable[..., tuple[jax.Array, ...]]) -> Callable[..., tuple[jax.Array, ...]]:
    """`forward`, which knows of no padding."""

    def attended(operands: Operands, **options: Any) -> tuple[jax.Array, ...]:
        out, maximum, rest, *low = forward(dataclasses.replace(operands, padding=None), **options)
        if operands.padding is not None:
            rest = jnp.where(operands.padding[:, None, None], -jnp.inf, rest)
        return out, maximum, rest, *low

    return attended


def shared(captured_gradients: Callable[..., Any]) -> Callable[..., tuple[jax.Array, ...]]:
    """Every device has a part of them, float32."""

    def gradients(
        operands: BackwardOperands, *, axes: tuple[str, ...], **options: Any
    ) -> tuple[jax.Array, ...]:
        assert operands.captured is not None
        parts = captured_gradients(operands, **options)
        parts = lax.psum(parts, axes) if axes else parts
        return tuple(part.astype(one.dtype) for part, one in zip(parts, operands.captured, strict=True))

    return gradients


def summed(bias_gradient: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array]]:
    """Devices that share a bias, those along `axes`, have parts of its gradient: what is rounded is their sum."""

    def gradient(operands: BackwardOperands, *, axes: tuple[str, ...], **options: Any) -> tuple[jax.Array]:
        assert operands.bias is not None
        own = operands.bias.dtype
        part = bias_gradient(operands, dtype=jnp.dtype(jnp.float32) if axes else own, **options)
        return ((lax.psum(part, axes) if axes else part).astype(own),)

    return gradient
