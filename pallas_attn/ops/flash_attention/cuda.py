"""Flash attention's forward pass on Hopper: the CUDA kernel of csrc/attention. Gradients are the tiled kernels'."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import hopper_forward
from pallas_attn._tile import low_bits, softmax
from pallas_attn.ops.flash_attention.operands import Operands
from pallas_attn.ops.flash_attention.problem import Problem

WIDE_HEADS = 128
"""Of narrower heads, exponentials take as long as products, and the tiled kernel is as fast."""
FEW_PAIRS = 2**25
"""Of queries and keys, of all heads: with fewer, what comes before the kernel, the order of its tiles, takes longer
than it gains."""
FEW_DOCUMENTS = 1024
"""Whose bounds are looked at whether they exist or not."""
MOST_TILES = 2**31
"""Of all documents, were each as long as its batch."""


def unsupported(operands: Operands) -> str | None:
    """The reason the CUDA kernel cannot serve a call, or None."""
    for name, array in (("bias", operands.bias), ("mask", operands.mask)):
        if array is not None:
            return f"has no {name}"
    problem = Problem.of(operands)
    tiles = problem.q_len * problem.q_len * problem.group // 128
    if operands.q_documents is not None and tiles > MOST_TILES:
        return f"takes fewer tokens where there are documents, got {problem.q_len}"
    sizes = problem.head_dim, problem.value_dim, problem.group, 0
    return hopper_forward.unsupported(operands.query.dtype, *sizes)


def is_slower(operands: Operands) -> bool:
    """Whether the tiled kernel is as fast, or nothing is known."""
    problem = Problem.of(operands)
    pairs = math.prod(problem.lse_shape) * problem.kv_len
    return problem.widest < WIDE_HEADS or pairs < FEW_PAIRS


@functools.partial(jax.jit, static_argnames="keep")
def forward(operands: Operands, *, keep: bool = False) -> tuple[jax.Array, ...]:
    """As `kernel.forward`, of what `unsupported` leaves."""
    problem, rules, query = Problem.of(operands), operands.rules, operands.query
    heads_first = rules.layout == "BNTH"
    at = 1 if heads_first else 2  # of the query's KV heads, and behind them their groups
    whole = query.reshape(*query.shape[:at], problem.num_kv_heads * problem.group, *query.shape[at + 2 :])
    sinks = operands.sinks
    sees = [-1 if bound is None else min(bound, 2**31 - 1) for bound in (rules.band.left, rules.band.right)]
    keep = keep and low_bits.are_lost(query.dtype)
    out, lse, *kept = hopper_forward.forward(
        whole,
        operands.key,
        operands.value,
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


def _sequences(operands: Operands) -> hopper_forward.Sequences:
    queries, keys = operands.q_documents, operands.kv_documents
    if queries is None or keys is None:
        return hopper_forward.Sequences()
    count = None
    if queries.table.shape[1] > FEW_DOCUMENTS:
        count = functools.reduce(jnp.maximum, (jnp.max(side.rank) for side in (queries, keys)))[None] + 1
    return hopper_forward.Sequences(
        q_table=queries.table, k_table=keys.table, q_ranks=queries.rank, k_ranks=keys.rank, num_seqs=count
    )
