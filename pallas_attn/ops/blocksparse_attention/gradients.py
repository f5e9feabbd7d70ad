"""The call with its derivative: what is kept for the backward pass, and which kernel computes what."""

import dataclasses
import functools
from typing import Any

import jax

from pallas_attn._call import derivative
from pallas_attn._call.gradients import refuse
from pallas_attn._call.op import Call
from pallas_attn._tile import low_bits, softmax, weights
from pallas_attn._tile.logits import natural_scale
from pallas_attn.ops.blocksparse_attention import cuda
from pallas_attn.ops.blocksparse_attention.operands import KEYS, BackwardOperands, Operands, as_prefill

FLOATS = ("query", "key", "value")
RESULTS = ("tokens heads dim", "tokens heads parts")


def attend(call: Call, operands: Operands) -> tuple[jax.Array, ...]:
    """(out as query, lse [num_tokens, num_heads])."""

    def forward(operands: Operands, keep: bool) -> tuple[derivative.Results, Any]:
        low = None
        if keep and low_bits.are_lost(operands.query.dtype):
            # Sequences of one query also go to the kernel that writes lower bits.
            out, parts, low = call.run(as_prefill(operands), results=(*RESULTS, RESULTS[0]), keep=True)
        else:
            out, parts = call.run(operands)
        lse = softmax.Lse(parts[..., 0], parts[..., 1])
        natural = lse.natural(natural_scale(operands.rules, operands.scale, None))
        return (out, natural), (weights.Kept(lse, low) if keep else None)

    def attended(operands: Operands) -> derivative.Results:
        return forward(operands, False)[0]

    if not call.op.implementations[call.implementation].steps:  # JAX differentiates it itself
        return attended(operands)
    if operands.cache_layout is not None:
        return refuse(f"{call.op.name} with keys in pages", attended)(operands)
    gradients = functools.partial(_gradients, call)
    rule = derivative.Rule(call.op.name, FLOATS, forward, gradients, operands.checkpoint_name)
    return derivative.differentiable(rule, operands)


def _gradients(
    call: Call, operands: Operands, results, kept: weights.Kept, cotangents, asked
) -> dict[str, Any]:
    (out, _), (d_out, d_lse) = results, cotangents
    lse = kept.lse
    block_size, q_block_size = operands.layout.sizes
    if q_block_size > block_size:
        # A row may list only later blocks of its own positions, so that its first queries see none.
        d_out = weights.of_seeing(d_out, weights.are_blind(lse))
    found = weights.of_queries(weights.product(out, kept.low, d_out), lse, d_lse)
    # A single KV head's gradient sums over all query heads, which must therefore be on one device.
    heads = "heads" if operands.pool.num_kv_heads > 1 else "all_heads"
    backward = BackwardOperands(
        **vars(dataclasses.replace(operands, heads=heads)),
        d_out=d_out,
        maximum=softmax.finite(lse.maximum).T,
        rest=lse.rest.T,
        delta=found.delta.T,
        total=found.total.T,
    )
    own = call.implementation == "cuda" and cuda.takes_backward(call.config)
    step = "cuda_backward" if own else "backward"
    gradients = call.run(backward, step=step, results=(f"tokens {heads} dim", KEYS, KEYS))
    return dict(zip(FLOATS, gradients, strict=True))
