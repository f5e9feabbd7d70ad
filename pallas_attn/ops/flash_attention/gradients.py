"""The call with its derivative: what is kept for the backward pass, and who works out what."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import partition
from pallas_attn._tile import derivative, low_bits, softmax, weights
from pallas_attn.ops.flash_attention.config import FlashAttentionConfig
from pallas_attn.ops.flash_attention.problem import Rules
from pallas_attn.ops.flash_attention.scores import natural_scale

FUNCTION = "flash_attention"
OTHERS = {
    "q_rank": "seqs q",
    "kv_rank": "seqs kv",
    "q_table": "seqs ranks span",
    "kv_table": "seqs ranks span",
}
PADDING = "padding"

type Arrays = derivative.Arrays


class Passes(NamedTuple):
    """An implementation: (operands, *, rules, config) -> results, as kernel.py and backward.py have them."""

    name: str
    forward: Callable[..., tuple[jax.Array, ...]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    bias_gradient: Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a call."""

    rules: Rules
    passes: Passes
    config: FlashAttentionConfig | None
    """The caller's own."""
    checkpoint_name: str | None = None

    def run(
        self,
        fn: Callable[..., Any],
        operands: Arrays,
        results: tuple[str, ...],
        summed: Any = None,
        **static: Any,
    ) -> Any:
        return partition.run(
            FUNCTION,
            fn,
            operands,
            results,
            dims={name: self.dims(name, array.shape) for name, array in operands.items()},
            static={"rules": self.rules, "passes": self.passes, "config": self.config, **static},
            summed=summed,
            implementation=self.passes.name,
        )

    def dims(self, name: str, shape: tuple[int, ...]) -> str:
        """What an operand's dimensions are. KV heads are the heads that may be sharded, the queries' too."""
        if name in ("bias", "mask"):
            kinds = ("seqs", "heads", "group", "q", "kv")
            return " ".join("one" if size == 1 else kind for kind, size in zip(kinds, shape, strict=True))
        named = {
            **OTHERS,
            PADDING: "seqs q",
            "sinks": "heads group",
            **dict.fromkeys(("maximum", "rest", "delta", "total"), "seqs heads group q"),
        }
        if name in named:
            return named[name]
        tokens, heads = ("kv", "heads") if name in ("key", "value") else ("q", "heads group")
        return f"seqs {tokens} {heads} dim" if self.rules.layout == "BTNH" else f"seqs {heads} {tokens} dim"


def attend(
    call: Call, floats: Arrays, others: Arrays, padding: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """(out as query, lse [batch, num_kv_heads, group, q_len]). Gradients flow to `floats`: query, key, value, sinks,
    bias. `padding` [batch, q_len]: queries whose lse is -inf, even where there are sinks."""
    if padding is not None:
        others = others | {PADDING: padding}

    def forward(floats: Arrays, others: Arrays, keep: bool) -> tuple[derivative.Results, Any]:
        loses = keep and low_bits.are_lost(floats["query"].dtype)
        query = call.dims("query", ())
        results = (query, *["seqs heads group q"] * 2, *([query] if loses else []))
        out, maximum, rest, *low = call.run(_forward, floats | others, results, keep=loses)
        lse = softmax.Lse(maximum, rest)
        natural = lse.natural(natural_scale(call.rules, floats))
        return (out, natural), (weights.Kept(lse, low[0] if low else None) if keep else None)

    rule = derivative.Rule(FUNCTION, forward, functools.partial(_gradients, call), call.checkpoint_name)
    out, lse = derivative.differentiable(rule, floats, others)
    return out, lse


def _gradients(
    call: Call, floats: Arrays, others: Arrays, results, kept: weights.Kept, cotangents, asked
) -> dict[str, Any]:
    (out, natural), (d_out, d_lse) = results, cotangents
    lse = kept.lse.following(natural)

    def by_head(x: jax.Array) -> jax.Array:
        """[batch, num_kv_heads, group, q_len] of numbers that stand as out's rows."""
        return jnp.moveaxis(x, 1, -1) if call.rules.layout == "BTNH" else x

    product = by_head(weights.product(out, kept.low, d_out))
    if "sinks" in floats:
        sinks = softmax.finite_sink(floats["sinks"])[None, :, :, None]
        found = weights.of_queries(product, lse, d_lse, sinks, natural_scale(call.rules, floats))
    else:
        found = weights.of_queries(product, lse, d_lse)
    if call.passes.name == "xla" or "mask" in others or "bias" in floats:
        # Elsewhere kernels never read, of whole tiles, what sees no key.
        blind = jnp.moveaxis(found.blind, -1, 1) if call.rules.layout == "BTNH" else found.blind
        d_out = jnp.where(blind[..., None], 0, d_out)
    operands = floats | {name: array for name, array in others.items() if name != PADDING}
    # A query that sees nothing has logits of -inf alone, and weights of 0 whatever is taken off.
    maximum, rest = map(softmax.finite, lse)
    operands |= {"d_out": d_out, "maximum": maximum, "rest": rest, "delta": found.delta, "total": found.total}
    gradients: dict[str, Any] = dict.fromkeys(floats)
    which = ("query", "key", "value")
    if asked.keys() & set(which):
        dims = tuple(call.dims(name, ()) for name in which)
        gradients |= zip(which, call.run(_backward, operands, dims), strict=True)
    if "sinks" in asked:
        # The sink's logit has a weight, like a key's, and no value.
        gradients["sinks"] = jnp.sum(found.d_sink, axis=(0, 3))
    if "bias" in asked:
        shape = floats["bias"].shape
        shared = tuple(kind for kind, size in zip(("seqs", "heads"), shape, strict=False) if size == 1)
        dims = (call.dims("bias", shape),)
        (gradients["bias"],) = call.run(_bias_gradient, operands, dims, summed=shared)
    return gradients


def _forward(operands: Arrays, *, rules: Rules, passes: Passes, config: Any, keep: bool):
    given = {name: array for name, array in operands.items() if name != PADDING}
    out, maximum, rest, *low = passes.forward(given, rules=rules, config=config, keep=keep)
    if PADDING in operands:
        rest = jnp.where(operands[PADDING][:, None, None], -jnp.inf, rest)
    return out, maximum, rest, *low


def _backward(operands: Arrays, *, rules: Rules, passes: Passes, config: Any):
    return passes.backward(operands, rules=rules, config=config)


def _bias_gradient(operands: Arrays, *, rules: Rules, passes: Passes, config: Any, axes: tuple[str, ...]):
    """Devices that share a bias, those along `axes`, have parts of its gradient: what is rounded is their sum."""
    own = operands["bias"].dtype
    dtype = jnp.dtype(jnp.float32) if axes else own
    part = passes.bias_gradient(operands, rules=rules, config=config, dtype=dtype)
    return ((lax.psum(part, axes) if axes else part).astype(own),)
