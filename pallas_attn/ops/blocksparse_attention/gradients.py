"""The call, on every device its share of it, and its derivative."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call import partition
from pallas_attn._call.gradients import refuse
from pallas_attn._tile import derivative, low_bits, softmax, weights
from pallas_attn.ops.blocksparse_attention.operands import KEYS, BackwardOperands, Operands
from pallas_attn.ops.blocksparse_attention.problem import Problem, natural_scale

FLOATS = ("query", "key", "value")


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a call."""

    problem: Problem
    forward: Callable[..., tuple[jax.Array, ...]]
    """Of the lse, [num_tokens, num_heads, 2], the parts, the maximum of products as the rules have them."""
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None
    """None of an implementation that JAX differentiates itself."""
    implementation: str
    checkpoint_name: str | None = None

    def run(self, fn: Callable[..., Any], operands: Operands, results: tuple[str, ...], **static: Any) -> Any:
        return partition.run(
            "blocksparse_attention",
            _share,
            operands,
            results,
            static={"fn": fn, "problem": self.problem, **static},
            implementation=self.implementation,
        )


def attend(call: Call, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """(out as query, lse [num_tokens, num_heads])."""

    def forward(operands: Operands, keep: bool) -> tuple[derivative.Results, Any]:
        results, whole = ("tokens heads dim", "tokens heads parts"), call
        if keep and low_bits.are_lost(operands.query.dtype):
            # Sequences of one query, too, by the kernel that knows of lower bits.
            like_prompts, operands = as_prefill(call.problem, operands)
            whole = dataclasses.replace(call, problem=like_prompts)
            out, parts, low = whole.run(call.forward, operands, (*results, results[0]), keep=True)
        else:
            (out, parts), low = call.run(call.forward, operands, results), None
        lse = softmax.Lse(parts[..., 0], parts[..., 1])
        return (out, lse.natural(natural_scale(call.problem))), (weights.Kept(lse, low) if keep else None)

    def attended(operands: Operands) -> derivative.Results:
        return forward(operands, False)[0]

    if call.backward is None:
        out, lse = attended(operands)
    elif call.problem.cache_layout is not None:
        out, lse = refuse("blocksparse_attention with keys in pages", attended)(operands)
    else:
        gradients = functools.partial(_gradients, call, call.backward)
        rule = derivative.Rule("blocksparse_attention", FLOATS, forward, gradients, call.checkpoint_name)
        out, lse = derivative.differentiable(rule, operands)
    return out, lse


def as_prefill(problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
    """The same call, sequences of one query being no case of their own."""
    if problem.kinds == "decode":
        ends = jnp.arange(problem.num_seqs + 1, dtype=jnp.int32)
        operands = dataclasses.replace(operands, cu_q_lens=ends)
    return dataclasses.replace(problem, kinds="prefill"), operands


def _gradients(
    call: Call, backward: Any, operands: Operands, results, kept: weights.Kept, cotangents, asked
) -> dict[str, Any]:
    (out, _), (d_out, d_lse) = results, cotangents
    lse = kept.lse
    found = weights.of_queries(weights.product(out, kept.low, d_out), lse, d_lse)
    block_size, q_block_size = operands.layout.sizes
    if q_block_size > block_size:
        # A row may list the later blocks of its own positions alone, and its first queries see none.
        d_out = jnp.where(found.blind[..., None], 0, d_out)
    # A single KV head's gradient sums over all query heads: no device may have some of them only.
    heads = "heads" if call.problem.pool.num_kv_heads > 1 else "all_heads"
    operands = BackwardOperands(
        **vars(dataclasses.replace(operands, heads=heads)),
        d_out=d_out,
        maximum=softmax.finite(lse.maximum).T,
        rest=lse.rest.T,
        delta=found.delta.T,
        total=found.total.T,
    )
    gradients = call.run(backward, operands, (f"tokens {heads} dim", KEYS, KEYS))
    return dict(zip(FLOATS, gradients, strict=True))


def _share(operands: Operands, *, fn: Callable[..., Any], problem: Problem, **static: Any) -> Any:
    """`fn` of the operands at hand: of the whole call, or of one device's share of its heads."""
    heads = operands.query.shape[1]
    kv_heads = max(1, problem.pool.num_kv_heads * heads // problem.num_heads)
    if heads != problem.num_heads:
        config = problem.config
        if config.heads_together and heads % config.heads_together:
            config = dataclasses.replace(config, heads_together=0)
        pool = problem.pool._replace(num_kv_heads=kv_heads)
        problem = dataclasses.replace(problem, num_heads=heads, pool=pool, config=config)
    return fn(operands, problem=problem, **static)
