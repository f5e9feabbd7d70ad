"""The call with its derivative: what is kept for the backward pass, and who works out what."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import partition
from pallas_attn._tile import derivative, softmax, weights
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

type Arrays = derivative.Arrays


class Passes(NamedTuple):
    """An implementation: (operands, *, rules, config) -> results, as kernel.py and backward.py have them."""

    name: str
    forward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    bias_gradient: Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a call."""

    rules: Rules
    passes: Passes
    config: FlashAttentionConfig | None
    """The caller's own."""

    def run(
        self, fn: Callable[..., Any], operands: Arrays, results: tuple[str, ...], summed: Any = None
    ) -> Any:
        return partition.run(
            FUNCTION,
            fn,
            operands,
            {name: self.dims(name, array.shape) for name, array in operands.items()},
            results,
            static={"rules": self.rules, "passes": self.passes, "config": self.config},
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
            "sinks": "heads group",
            "maximum": "seqs heads group q",
            "rest": "seqs heads group q",
            "delta": "seqs heads group q",
        }
        if name in named:
            return named[name]
        tokens, heads = ("kv", "heads") if name in ("key", "value") else ("q", "heads group")
        return f"seqs {tokens} {heads} dim" if self.rules.layout == "BTNH" else f"seqs {heads} {tokens} dim"


def attend(call: Call, floats: Arrays, others: Arrays) -> tuple[jax.Array, jax.Array]:
    """(out as query, lse [batch, num_kv_heads, group, q_len]). Gradients flow to `floats`: query, key, value, sinks,
    bias."""

    def attended(floats: Arrays, others: Arrays) -> derivative.Results:
        results = (call.dims("query", ()), *["seqs heads group q"] * 2)
        out, *parts = call.run(_forward, floats | others, results)
        return out, softmax.Lse(*parts).natural(natural_scale(call.rules, floats)), *parts

    out, lse, *_ = derivative.differentiable(attended, functools.partial(_gradients, call), floats, others)
    return out, lse


def _gradients(call: Call, floats: Arrays, others: Arrays, results, cotangents, asked) -> dict[str, Any]:
    (out, _, *parts), (d_out, d_lse, *_) = results, cotangents
    lse = softmax.Lse(*parts)
    if call.rules.layout == "BTNH":
        delta = jnp.moveaxis(weights.delta(out, d_out, jnp.moveaxis(d_lse, -1, 1)), 1, -1)
    else:
        delta = weights.delta(out, d_out, d_lse)
    # A query that sees nothing has logits of -inf alone, and weights of 0 whatever is taken off.
    maximum, rest = map(softmax.finite, lse)
    operands = floats | others | {"d_out": d_out, "maximum": maximum, "rest": rest, "delta": delta}
    gradients: dict[str, Any] = dict.fromkeys(floats)
    which = ("query", "key", "value")
    if asked.keys() & set(which):
        dims = tuple(call.dims(name, ()) for name in which)
        gradients |= zip(which, call.run(_backward, operands, dims), strict=True)
    if "sinks" in asked:
        # The sink's logit has a weight, like a key's, and no value; of a row that saw nothing, a sink of -inf has none.
        sinks = softmax.finite_sink(floats["sinks"])[None, :, :, None]
        # None has a weight above 1, which rounding makes of a large sink.
        above = (sinks - softmax.finite(lse.maximum) * natural_scale(call.rules, floats)) * softmax.LOG2_E
        of_sinks = jnp.exp2(jnp.minimum(above - softmax.finite(lse.rest), 0.0))
        gradients["sinks"] = -jnp.sum(of_sinks * delta, axis=(0, 3))
    if "bias" in asked:
        shape = floats["bias"].shape
        shared = tuple(kind for kind, size in zip(("seqs", "heads"), shape, strict=False) if size == 1)
        dims = (call.dims("bias", shape),)
        (gradients["bias"],) = call.run(_bias_gradient, operands, dims, summed=shared)
    return gradients


def _forward(operands: Arrays, *, rules: Rules, passes: Passes, config: Any):
    return passes.forward(operands, rules=rules, config=config)


def _backward(operands: Arrays, *, rules: Rules, passes: Passes, config: Any):
    return passes.backward(operands, rules=rules, config=config)


def _bias_gradient(operands: Arrays, *, rules: Rules, passes: Passes, config: Any, axes: tuple[str, ...]):
    """Devices that share a bias, those along `axes`, have parts of its gradient: what is rounded is their sum."""
    own = operands["bias"].dtype
    dtype = jnp.dtype(jnp.float32) if axes else own
    part = passes.bias_gradient(operands, rules=rules, config=config, dtype=dtype)
    return ((lax.psum(part, axes) if axes else part).astype(own),)
