"""Flash attention on Hopper: the CUDA kernels of csrc/attention, and which gradients are theirs."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import hopper_backward, hopper_forward, hopper_lists, sharding
from pallas_attn._tile import low_bits, softmax
from pallas_attn._tile.band import Band
from pallas_attn.mods.evaluate import evaluate
from pallas_attn.mods.operands import Mods, has_mask, has_score, refused_by_cuda
from pallas_attn.mods.program import HEAD
from pallas_attn.mods.slopes import slopes_of
from pallas_attn.ops.flash_attention.config import FlashAttentionCudaConfig
from pallas_attn.ops.flash_attention.operands import BackwardOperands, Operands
from pallas_attn.ops.flash_attention.problem import Problem

FEW_PAIRS, FEW_NARROW_PAIRS = 2**25, 2**28
"""Of queries and keys, of all heads: with fewer, what comes before the kernel, the order of its tiles, takes longer
than it gains. Of heads narrower than WIDE_HEADS it gains less."""
WIDE_HEADS = 128
FEW_KEY_TILES, FEW_NARROW_KEY_TILES = 512, 4096
"""Of 128 keys, of all KV heads: gradients by CUDA were timed with at least as many, narrow ones of heads narrower than
WIDE_HEADS. A CTA has one at a time, and walks over all heads of its group."""
FEW_NARROW_TOKENS = 2048
"""Of a sequence whose queries see all of it, or all before them: of narrow heads what a tile costs was timed among as
many, where the tiled kernels are almost as fast."""
WIDTHS_OF_GRADIENTS = (64, 64), (128, 128), (192, 128), (256, 256)
"""Of heads and values, for which they were timed and faster. Of widths in between products are padded further."""
WIDTHS_OVER_BLOCKS = ((256, 256),)
"""Likewise over block masks, of which all widths take three passes."""
FEW_DOCUMENTS = 1024
"""Whose bounds are looked at whether they exist or not."""
MOST_TILES = 2**31
"""Of all documents, were each as long as its batch."""


def unsupported(operands: Operands) -> str | None:
    """The reason the CUDA kernel cannot serve a call, or None."""
    for name, array in (("bias", operands.bias), ("mask", operands.mask)):
        if array is not None:
            return f"has no {name}"
    problem, mods = Problem.of(operands), operands.mods
    if has_score(mods) and not has_slopes(operands):
        return refused_by_cuda(mods)
    if mods is not None and mods.mask is not None:
        if mods.bits is None:
            return "asks no mask_mod, but takes a block_mask that is made with max_partial"
        return hopper_lists.unsupported(
            operands.query.dtype,
            (problem.head_dim, problem.value_dim),
            mods.block,
            queries=problem.batch * problem.q_len,
            num_heads=problem.num_kv_heads * problem.group,
            num_seqs=None,
        )
    tiles = problem.q_len * problem.q_len * problem.group // 128
    if operands.q_documents is not None and tiles > MOST_TILES:
        return f"takes fewer tokens where there are documents, got {problem.q_len}"
    sizes = problem.head_dim, problem.value_dim, problem.group, 0
    return hopper_forward.unsupported(operands.query.dtype, *sizes)


def is_slower(operands: Operands) -> bool:
    """Whether the tiled kernel is as fast."""
    problem = Problem.of(operands)
    pairs = math.prod(problem.lse_shape) * problem.kv_len
    return pairs < (FEW_PAIRS if problem.widest >= WIDE_HEADS else FEW_NARROW_PAIRS)


def backward_unsupported(operands: Operands) -> str | None:
    """Of what `unsupported` leaves: the reason the CUDA kernel cannot serve its gradients, or None."""
    mods, widest = operands.mods, max(hopper_backward.DIMS)
    if mods is not None and mods.mask is not None:
        return hopper_backward.blocks_unsupported(*mods.block)
    if has_score(mods) and operands.rules.softcap is not None:
        return "takes no soft cap beside ALiBi"
    if has_score(mods) and Problem.of(operands).widest > widest:
        return f"takes ALiBi for heads of at most {widest} elements, got {Problem.of(operands).widest}"
    return None


def backward_is_slower(operands: Operands) -> bool:
    """Whether the tiled kernels may be as fast (csrc/attention/sm90/backward/README.md)."""
    problem = Problem.of(operands)
    widths = WIDTHS_OVER_BLOCKS if has_mask(operands.mods) else WIDTHS_OF_GRADIENTS
    if (problem.head_dim, problem.value_dim) not in widths:
        return True
    tiles = problem.batch * problem.num_kv_heads * (problem.kv_len // hopper_backward.BLOCK_KV)
    if problem.widest >= WIDE_HEADS:
        return tiles < FEW_KEY_TILES
    partly = operands.q_documents is not None or operands.rules.band.left is not None
    return partly or min(problem.q_len, problem.kv_len) < FEW_NARROW_TOKENS or tiles < FEW_NARROW_KEY_TILES


def takes_backward(operands: Operands, config: FlashAttentionCudaConfig | None) -> bool:
    """Whose gradients of queries, keys and values are, where the forward pass is the CUDA kernel's: the CUDA kernel's
    where the caller says so, and where he says nothing if it can serve them and is not slower."""
    if config is not None and config.backward is not None:
        return config.backward == "cuda"
    return backward_unsupported(operands) is None and not backward_is_slower(operands)


def check(operands: Operands, config: FlashAttentionCudaConfig) -> None:
    hopper_backward.check_asked("flash_attention", config.backward, backward_unsupported(operands))


@functools.partial(jax.jit, static_argnames="keep")
def forward(operands: Operands, *, keep: bool = False) -> tuple[jax.Array, ...]:
    """As `kernel.forward`, of what `unsupported` leaves."""
    problem, rules, query = Problem.of(operands), operands.rules, operands.query
    heads_first = rules.layout == "BNTH"
    at = 1 if heads_first else 2  # of the query's KV heads, and behind them their groups
    whole = query.reshape(*query.shape[:at], problem.num_kv_heads * problem.group, *query.shape[at + 2 :])
    sinks = None if operands.sinks is None else softmax.finite_sink(operands.sinks).reshape(-1)
    keep = keep and low_bits.are_lost(query.dtype)
    options: dict[str, Any] = dict(
        scale=jnp.full(1, rules.scale, jnp.float32),
        softcap=rules.softcap,
        sinks=sinks,
        lse_heads_first=True,
        keep=keep,
    )
    if operands.mods is not None and operands.mods.mask is not None:
        out, lse, *kept = hopper_lists.forward(
            whole, operands.key, operands.value, _lists(operands.mods), heads_first=heads_first, **options
        )
    else:
        sees = [
            -1 if bound is None else min(bound, 2**31 - 1) for bound in (rules.band.left, rules.band.right)
        ]
        out, lse, *kept = hopper_forward.forward(
            whole,
            operands.key,
            operands.value,
            _sequences(operands),
            alibi_slopes=_slopes(operands),
            window=jnp.array(sees, jnp.int32),
            q_offset=rules.band.offset,
            query_heads_first=heads_first,
            key_heads_first=heads_first,
            base2_lse=True,
            sinks_without_keys=True,
            **options,
        )

    def split(array: jax.Array) -> jax.Array:
        return array.reshape(*query.shape[:-1], problem.value_dim)

    lse = lse.reshape(problem.lse_shape)
    if not keep:
        # All of it is the rest of a maximum of 0.
        return split(out), jnp.where(lse == -jnp.inf, -np.inf, np.float32(0)), lse
    rest, low = kept
    return split(out), lse, rest.reshape(problem.lse_shape), split(low)


def backward(operands: BackwardOperands) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `backward.backward`, of what `backward_unsupported` leaves."""
    problem, rules = Problem.of(operands), operands.rules
    heads_first = rules.layout == "BNTH"
    at = 1 if heads_first else 2

    def whole(array: jax.Array) -> jax.Array:
        return array.reshape(*array.shape[:at], -1, *array.shape[at + 2 :])

    def by_head(array: jax.Array) -> jax.Array:
        return array.reshape(problem.batch, -1, problem.q_len)

    rows = operands.maximum, operands.rest, operands.delta, operands.total
    blocks, band = None, rules.band
    if operands.mods is not None and operands.mods.mask is not None:
        blocks, band = _blocks(operands.mods), Band()
    d_query, d_key, d_value = hopper_backward.backward(
        whole(operands.query),
        operands.key,
        operands.value,
        whole(operands.d_out),
        tuple(map(by_head, rows)),
        _sequences(operands),
        scale=rules.scale,
        left=band.left,
        right=band.right,
        offset=band.offset,
        softcap=rules.softcap,
        heads_first=heads_first,
        blocks=blocks,
        alibi_slopes=_slopes(operands),
    )
    gradients = d_query.reshape(operands.query.shape), d_key, d_value
    return sharding.vary(gradients, sharding.varying_axes(operands))


def has_slopes(operands: Operands) -> bool:
    """Whether all that there is of mods is a score_mod that is ALiBi."""
    mods = operands.mods
    if mods is None or mods.score is None or mods.mask is not None:
        return False
    return slopes_of(mods.score, operands.rules.band) is not None


def _slopes(operands: Operands) -> jax.Array | None:
    """[num_heads]"""
    mods = operands.mods
    if mods is None or mods.score is None:
        return None
    program = slopes_of(mods.score, operands.rules.band)
    assert program is not None
    heads = {} if mods.heads is None else {HEAD: mods.heads}
    (found,) = evaluate(program, mods.of_score(operands.captured or ()), heads)
    problem = Problem.of(operands)
    return jnp.broadcast_to(found, (problem.num_kv_heads, problem.group)).reshape(-1)


def _lists(mods: Mods) -> hopper_lists.OfMask:
    assert mods.of_queries is not None
    assert mods.bits is not None

    order, _, ends = map(_of_heads, mods.of_queries)
    return hopper_lists.OfMask(order, ends, _of_heads(mods.bits.first), mods.bits.words, *mods.block)


def _blocks(mods: Mods) -> hopper_backward.Blocks:
    assert mods.of_queries is not None
    assert mods.of_keys is not None
    assert mods.bits is not None
    (order, _, ends), (key_order, _, key_ends) = (
        map(_of_heads, side) for side in (mods.of_queries, mods.of_keys)
    )
    first, words = _of_heads(mods.bits.first), mods.bits.words
    return hopper_backward.blocks_of((order, ends), (key_order, key_ends), first, words, mods.block)


def _of_heads(array: jax.Array) -> jax.Array:
    return array.reshape(array.shape[0], -1, *array.shape[3:])


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
