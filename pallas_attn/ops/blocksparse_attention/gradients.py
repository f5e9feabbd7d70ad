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
from pallas_attn._tile.layout import DIMS
from pallas_attn.ops.blocksparse_attention.layout import SparseLayout
from pallas_attn.ops.blocksparse_attention.problem import Problem, natural_scale

LAYOUT_ARRAYS = ("row_pointers", "columns")
FLOATS = ("query", "key", "value")

type Arrays = derivative.Arrays


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a call."""

    problem: Problem
    sizes: tuple[int, int]
    """Of the layout's blocks."""
    layout_heads: int
    forward: Callable[..., tuple[jax.Array, ...]]
    """Of the lse, [num_tokens, num_heads, 2], the parts, the maximum of products as the rules have them."""
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None
    """None of an implementation that JAX differentiates itself."""
    implementation: str
    checkpoint_name: str | None = None

    def run(
        self, fn: Callable[..., Any], operands: Arrays, results: tuple[str, ...], heads: str, **static: Any
    ) -> Any:
        """`heads`: the word for the query's heads, which says whether they may be sharded."""
        problem = self.problem
        layout = f"{heads if self.layout_heads > 1 else 'all'} entries"
        keys = DIMS[problem.cache_layout] if problem.cache_layout else dict.fromkeys(FLOATS[1:], KEYS)
        per_token = dict.fromkeys(("maximum", "rest", "delta", "total"), f"{heads} tokens")
        dims = {"query": f"tokens {heads} dim", **keys, **dict.fromkeys(LAYOUT_ARRAYS, layout),
                "cu_q_lens": "ends", "cu_k_lens": "ends", "block_tables": "tables columns", "seq_lens": "tables",
                "d_out": f"tokens {heads} dim", **per_token}  # fmt: skip
        static = {"fn": fn, "problem": problem, "sizes": self.sizes, **static}
        return partition.run(
            "blocksparse_attention",
            _share,
            operands,
            dims,
            results,
            static=static,
            implementation=self.implementation,
        )


KEYS = "key_tokens kv_heads dim"


def attend(call: Call, operands: Arrays) -> tuple[jax.Array, jax.Array]:
    """(out as query, lse [num_tokens, num_heads])."""

    def forward(floats: Arrays, others: Arrays, keep: bool) -> tuple[derivative.Results, Any]:
        results, whole, operands = ("tokens heads dim", "tokens heads parts"), call, floats | others
        if keep and low_bits.are_lost(floats["query"].dtype):
            # Sequences of one query, too, by the kernel that knows of lower bits.
            like_prompts, operands = as_prefill(call.problem, operands)
            whole = dataclasses.replace(call, problem=like_prompts)
            out, parts, low = whole.run(call.forward, operands, (*results, results[0]), "heads", keep=True)
        else:
            (out, parts), low = call.run(call.forward, operands, results, "heads"), None
        lse = softmax.Lse(parts[..., 0], parts[..., 1])
        return (out, lse.natural(natural_scale(call.problem))), (weights.Kept(lse, low) if keep else None)

    def attended(floats: Arrays, others: Arrays) -> derivative.Results:
        return forward(floats, others, False)[0]

    floats = {name: operands[name] for name in FLOATS}
    others = {name: array for name, array in operands.items() if name not in FLOATS}
    if call.backward is None:
        out, lse = attended(floats, others)
    elif call.problem.cache_layout is not None:
        out, lse = refuse("blocksparse_attention with keys in pages", attended)(floats, others)
    else:
        gradients = functools.partial(_gradients, call, call.backward)
        rule = derivative.Rule("blocksparse_attention", forward, gradients, call.checkpoint_name)
        out, lse = derivative.differentiable(rule, floats, others)
    return out, lse


def as_prefill(problem: Problem, operands: Arrays) -> tuple[Problem, Arrays]:
    """The same call, sequences of one query being no case of their own."""
    if problem.kinds == "decode":
        operands = operands | {"cu_q_lens": jnp.arange(problem.num_seqs + 1, dtype=jnp.int32)}
    return dataclasses.replace(problem, kinds="prefill"), operands


def _gradients(
    call: Call, backward: Any, floats: Arrays, others: Arrays, results, kept: weights.Kept, cotangents, asked
) -> dict[str, Any]:
    (out, _), (d_out, d_lse) = results, cotangents
    lse = kept.lse
    found = weights.of_queries(weights.product(out, kept.low, d_out), lse, d_lse)
    block_size, q_block_size = call.sizes
    if q_block_size > block_size:
        # A row may list the later blocks of its own positions alone, and its first queries see none.
        d_out = jnp.where(found.blind[..., None], 0, d_out)
    # Neighbouring queries' side by side, as kernels read them.
    of_rows = {
        "maximum": softmax.finite(lse.maximum),
        "rest": lse.rest,
        "delta": found.delta,
        "total": found.total,
    }
    by_head = {name: numbers.T for name, numbers in of_rows.items()}
    # A single KV head's gradient sums over all query heads: no device may have some of them only.
    heads = "heads" if call.problem.pool.num_kv_heads > 1 else "all_heads"
    operands = floats | others | {"d_out": d_out} | by_head
    gradients = call.run(backward, operands, (f"tokens {heads} dim", KEYS, KEYS), heads)
    return dict(zip(FLOATS, gradients, strict=True))


def _share(
    operands: Arrays, *, fn: Callable[..., Any], problem: Problem, sizes: tuple[int, int], **static: Any
) -> Any:
    """`fn` of the operands at hand: of the whole call, or of one device's share of its heads."""
    query = operands["query"]
    heads = query.shape[1]
    kv_heads = max(1, problem.pool.num_kv_heads * heads // problem.num_heads)
    if heads != problem.num_heads:
        config = problem.config
        if config.heads_together and heads % config.heads_together:
            config = dataclasses.replace(config, heads_together=0)
        pool = problem.pool._replace(num_kv_heads=kv_heads)
        problem = dataclasses.replace(problem, num_heads=heads, pool=pool, config=config)
    layout = SparseLayout(operands["row_pointers"], operands["columns"], *sizes)
    rest = {n: x for n, x in operands.items() if n != "query" and n not in LAYOUT_ARRAYS}
    return fn(query, rest, layout, problem=problem, **static)
