"""Flash attention on Hopper: the CUDA kernels of csrc/attention. Gradients that a caller gets are the tiled kernels':
the CUDA backward pass is right, and slower yet."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import hopper_backward, hopper_forward
from pallas_attn._tile import low_bits, sharding, softmax
from pallas_attn.ops.flash_attention.problem import Case, Problem, Rules

WIDE_HEADS = 128
"""Of narrower heads, exponentials take as long as products, and the tiled kernel is as fast."""
FEW_PAIRS = 2**25
"""Of queries and keys, of all heads: with fewer, what comes before the kernel, the order of its tiles, takes longer
than it gains."""
FEW_DOCUMENTS = 1024
"""Whose bounds are looked at whether they exist or not."""
MOST_TILES = 2**31
"""Of all documents, were each as long as its batch."""


def unsupported(case: Case) -> str | None:
    """The reason the CUDA kernel cannot serve a call, or None."""
    if case.has_bias or case.mask_elements:
        return f"has no {'bias' if case.has_bias else 'mask'}"
    if case.has_config:
        return "has tiles of its own and takes no config"
    if case.has_documents and case.q_len * case.q_len * case.group // 128 > MOST_TILES:
        return f"takes fewer tokens where there are documents, got {case.q_len}"
    return hopper_forward.unsupported(case.dtype, case.head_dim, case.value_dim, case.group, 0)


def is_slower(case: Case) -> bool:
    """Whether the tiled kernel is as fast, or nothing is known."""
    pairs = case.batch * case.num_kv_heads * case.group * case.q_len * case.kv_len
    return max(case.head_dim, case.value_dim) < WIDE_HEADS or pairs < FEW_PAIRS


@functools.partial(jax.jit, static_argnames=("rules", "config", "keep"))
def forward(
    operands: dict[str, jax.Array], *, rules: Rules, config: None = None, keep: bool = False
) -> tuple[jax.Array, ...]:
    """As `kernel.forward`, of what `unsupported` leaves."""
    problem = Problem.of(operands, rules)
    heads_first = rules.layout == "BNTH"
    at = 1 if heads_first else 2  # of the query's KV heads, and behind them their groups
    query = operands["query"]
    whole = query.reshape(*query.shape[:at], problem.num_kv_heads * problem.group, *query.shape[at + 2 :])
    sinks = operands.get("sinks")
    sees = [-1 if bound is None else min(bound, 2**31 - 1) for bound in (rules.band.left, rules.band.right)]
    keep = keep and low_bits.are_lost(query.dtype)
    out, lse, *kept = hopper_forward.forward(
        whole,
        operands["key"],
        operands["value"],
        _sequences(operands),
        window=jnp.array(sees, jnp.int32),
        scale=jnp.full(1, rules.scale, jnp.float32),
        softcap=rules.softcap,
        sinks=None if sinks is None else softmax.finite_sink(sinks).reshape(-1),
        q_offset=rules.band.offset,
        query_heads_first=heads_first,
        key_heads_first=heads_first,
        lse_heads_first=True,
        base2_lse=True,
        sinks_without_keys=True,
        keep=keep,
    )

    def split(array: jax.Array) -> jax.Array:
        return array.reshape(*query.shape[:-1], problem.value_dim)

    lse = lse.reshape(problem.lse_shape)
    if not keep:
        # All of it is the rest of a maximum of 0.
        return split(out), jnp.where(lse == -jnp.inf, -np.inf, np.float32(0)), lse
    rest, low = kept
    return split(out), lse, rest.reshape(problem.lse_shape), split(low)


@functools.partial(jax.jit, static_argnames=("rules",))
def backward(operands: dict[str, jax.Array], *, rules: Rules) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `backward.backward`, of what `unsupported` leaves, without sinks or with, for heads of up to 128."""
    problem = Problem.of(operands, rules)
    heads_first = rules.layout == "BNTH"
    at = 1 if heads_first else 2

    def whole(name: str) -> jax.Array:
        array = operands[name]
        return array.reshape(*array.shape[:at], -1, *array.shape[at + 2 :])

    rows = tuple(
        operands[name].reshape(problem.batch, -1, problem.q_len)
        for name in ("maximum", "rest", "delta", "total")
    )
    d_query, d_key, d_value = hopper_backward.backward(
        whole("query"),
        operands["key"],
        operands["value"],
        whole("d_out"),
        rows,
        _sequences(operands),
        scale=rules.scale,
        left=rules.band.left,
        right=rules.band.right,
        offset=rules.band.offset,
        softcap=rules.softcap,
        heads_first=heads_first,
    )
    gradients = d_query.reshape(operands["query"].shape), d_key, d_value
    return sharding.vary(gradients, sharding.varying_axes(operands))


def _sequences(operands: dict[str, Any]) -> hopper_forward.Sequences:
    if "q_rank" not in operands:
        return hopper_forward.Sequences()
    ranks = operands["q_rank"], operands["kv_rank"]
    count = None
    if operands["q_table"].shape[1] > FEW_DOCUMENTS:
        count = functools.reduce(jnp.maximum, (jnp.max(rank) for rank in ranks))[None] + 1
    return hopper_forward.Sequences(
        q_table=operands["q_table"],
        k_table=operands["kv_table"],
        q_ranks=ranks[0],
        k_ranks=ranks[1],
        num_seqs=count,
    )
