"""The call, on every device its share of it, and its derivative."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_attn._call import partition
from pallas_attn._call.gradients import refuse
from pallas_attn._tile import derivative, softmax, weights
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
    forward: Callable[..., tuple[jax.Array, jax.Array]]
    """Of the lse, [num_tokens, num_heads, 2], the parts, the maximum of products as the rules have them."""
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None
    """None of an implementation that JAX differentiates itself."""
    implementation: str

    def run(self, fn: Callable[..., Any], operands: Arrays, results: tuple[str, ...], heads: str) -> Any:
        """`heads`: the word for the query's heads, which says whether they may be sharded."""
        problem = self.problem
        layout = f"{heads if self.layout_heads > 1 else 'all'} entries"
        keys = DIMS[problem.cache_layout] if problem.cache_layout else dict.fromkeys(FLOATS[1:], KEYS)
        per_token = dict.fromkeys(("maximum", "rest", "delta"), f"{heads} tokens")
        dims = {"query": f"tokens {heads} dim", **keys, **dict.fromkeys(LAYOUT_ARRAYS, layout),
                "cu_q_lens": "ends", "cu_k_lens": "ends", "block_tables": "tables columns", "seq_lens": "tables",
                "d_out": f"tokens {heads} dim", **per_token}  # fmt: skip
        static = {"fn": fn, "problem": problem, "sizes": self.sizes}
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

    def attended(floats: Arrays, others: Arrays) -> derivative.Results:
        results = ("tokens heads dim", "tokens heads parts")
        out, parts = call.run(call.forward, floats | others, results, "heads")
        lse = softmax.Lse(parts[..., 0], parts[..., 1])
        return out, lse.natural(natural_scale(call.problem)), *lse

    floats = {name: operands[name] for name in FLOATS}
    others = {name: array for name, array in operands.items() if name not in FLOATS}
    if call.backward is None:
        out, lse, *_ = attended(floats, others)
        return out, lse
    if call.problem.cache_layout is not None:
        out, lse, *_ = refuse("blocksparse_attention with keys in pages", attended)(floats, others)
        return out, lse
    rule = functools.partial(_gradients, call, call.backward)
    out, lse, *_ = derivative.differentiable(attended, rule, floats, others)
    return out, lse


def _gradients(
    call: Call, backward: Any, floats: Arrays, others: Arrays, results, cotangents, asked
) -> dict[str, Any]:
    (out, _, maximum, rest), (d_out, d_lse, *_) = results, cotangents
    delta = weights.delta(out, d_out, d_lse)
    # Neighbouring queries' side by side, as kernels read them.
    by_row = {"maximum": softmax.finite(maximum).T, "rest": rest.T, "delta": delta.T}
    operands = floats | others | {"d_out": d_out} | by_row
    # A single KV head's gradient sums over all query heads: no device may have some of them only.
    heads = "heads" if call.problem.pool.num_kv_heads > 1 else "all_heads"
    found = call.run(backward, operands, (f"tokens {heads} dim", KEYS, KEYS), heads)
    return dict(zip(FLOATS, found, strict=True))


def _share(operands: Arrays, *, fn: Callable[..., Any], problem: Problem, sizes: tuple[int, int]) -> Any:
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
    return fn(query, rest, layout, problem=problem)
