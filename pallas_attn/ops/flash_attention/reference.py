"""`flash_attention` in plain jnp: works anywhere, in float32, and keeps nothing of size queries x keys.

Forward and backward loop over tiles of keys, small enough that the logits of all queries take some tens of megabytes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import sharding, symbolic
from pallas_attn._tile import low_bits, masking, softmax, weights
from pallas_attn.mods import operands as mods
from pallas_attn.mods.derivative import slope as slope_of
from pallas_attn.mods.evaluate import as_it_is, from_arrays
from pallas_attn.mods.operands import Tile
from pallas_attn.mods.program import BATCH, HEAD, KEY, QUERY, Program
from pallas_attn.ops.flash_attention.operands import BackwardOperands, Operands
from pallas_attn.ops.flash_attention.problem import Problem
from pallas_attn.ops.flash_attention.scores import natural_scale

LOGITS = 2**24  # of a chunk, for all queries and heads
LEAST_CHUNK = 16
OPEN_CHUNK = 128  # where sizes are symbolic
dot = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)


class KeyTile(NamedTuple):
    """Some keys and values, with the logits of all queries [batch, num_kv_heads, group, q_len]."""

    key: jax.Array
    value: jax.Array
    logits: jax.Array
    """Natural after multiplication by `scores.natural_scale`."""
    seen: jax.Array
    slope: jax.Array
    """The soft cap's derivative where a key is seen, or 1."""


class KeyTiles:
    """The keys of a call, tile by tile."""

    def __init__(self, operands: Operands):
        self.problem, self.rules, self.operands = Problem.of(operands), operands.rules, operands
        self.slopes = isinstance(operands, BackwardOperands)
        self.query = self.by_head(operands.query)
        self.size = self._chunk()
        self.count = -(-self.problem.kv_len // self.size)
        self.key, self.value = (self._padded(self.by_head(x), 2) for x in (operands.key, operands.value))

    def _chunk(self) -> int:
        kv_len = self.problem.kv_len
        if symbolic.is_open(*self.query.shape, kv_len):
            return OPEN_CHUNK if symbolic.is_open(kv_len) else min(kv_len, OPEN_CHUNK)
        queries = max(1, self.query.size // self.query.shape[-1])
        return min(kv_len, max(LEAST_CHUNK, LOGITS // queries))

    def by_head(self, array: jax.Array) -> jax.Array:
        """[batch, heads..., tokens, dim] in float32."""
        array = array.astype(jnp.float32)
        return jnp.moveaxis(array, 1, -2) if self.rules.layout == "BTNH" else array

    def as_given(self, array: jax.Array) -> jax.Array:
        """The inverse, in the operands' dtype."""
        array = jnp.moveaxis(array, -2, 1) if self.rules.layout == "BTNH" else array
        return array.astype(self.operands.query.dtype)

    def _padded(self, array: jax.Array, axis: int) -> jax.Array:
        widths = [(0, 0)] * array.ndim
        widths[axis] = (0, self.count * self.size - array.shape[axis])
        return jnp.pad(array, widths)

    def _of(self, i: jax.Array, array: jax.Array, axis: int) -> jax.Array:
        return lax.dynamic_slice_in_dim(array, i * self.size, self.size, axis)

    def __getitem__(self, i: jax.Array) -> KeyTile:
        rules, operands = self.rules, self.operands
        seen = self._seen(i)
        # What no query sees may hold anything and is zeroed: 0 * NaN is NaN.
        held = jnp.any(seen, axis=(2, 3))[..., None]
        key, value = (jnp.where(held, self._of(i, array, 2), 0.0) for array in (self.key, self.value))
        logits, scale, bent = weights.bent(
            dot("bkgqd,bksd->bkgqs", self.query, key), rules.scale, rules.softcap
        )
        slope = jnp.float32(1.0) if bent is None else jnp.where(seen, bent, 0.0)
        if operands.mods is not None and operands.mods.score is not None:
            of_mod = slope_of(operands.mods.score) if self.slopes else operands.mods.score
            logits, *own = self.of_mods(i, of_mod).scored(logits * scale)
            slope, scale = functools.reduce(lambda x, y: jnp.where(seen, x * y, 0.0), own, slope), 1.0
        if operands.bias is not None:
            bias = self._of(i, self._padded(operands.bias, 4), 4).astype(jnp.float32)
            logits = logits * scale + bias
        return KeyTile(key, value, masking.apply(logits, seen), seen, slope)

    def _seen(self, i: jax.Array) -> jax.Array:
        """[batch or 1, num_kv_heads or 1, group or 1, q_len, keys of a chunk]"""
        rules, operands = self.rules, self.operands
        query_at = jnp.arange(self.problem.q_len)[:, None]
        key_at = (i * self.size + jnp.arange(self.size))[None, :]
        seen = jnp.broadcast_to(key_at < self.problem.kv_len, (1, 1, 1, self.problem.q_len, self.size))
        for mask in rules.band.visible(query_at, key_at):
            seen &= mask[None, None, None]
        if operands.mask is not None:
            seen &= self._of(i, self._padded(operands.mask, 4), 4) != 0
        if operands.q_documents is not None and operands.kv_documents is not None:
            of_keys = self._of(i, self._padded(operands.kv_documents.rank, 1), 1)
            same = operands.q_documents.rank[:, :, None] == of_keys[:, None, :]
            seen &= same[:, None, None]
        if operands.mods is not None and (of_mod := self.of_mods(i, None).seen()) is not None:
            seen &= of_mod
        return seen

    def of_mods(self, i: jax.Array, score: Program | None, captured: Any = None) -> Tile:
        """Over [batch or 1, num_kv_heads or 1, group or 1, q_len, keys of a chunk]."""
        given, problem = self.operands.mods, self.problem
        assert given is not None
        known = {}
        if given.sequences is not None:
            known[BATCH] = given.sequences[:, None, None, None, None]
        if given.heads is not None:
            known[HEAD] = given.heads[:, :, None, None]
        mine = mods.tile(given, captured or self.operands.captured, score, from_arrays, as_it_is).given(known)
        mine = mine.at(QUERY, jnp.arange(problem.q_len)[:, None], problem.q_len)
        return mine.at(KEY, (i * self.size + jnp.arange(self.size))[None, :], problem.kv_len)

    def summed(self, subscripts: str, weights: jax.Array, seen: jax.Array, over: jax.Array) -> jax.Array:
        """A product that sums over tokens. With several documents, a token's NaN reaches only queries that see it."""
        if self.operands.q_documents is None:
            return dot(subscripts, weights, over)
        finite = jnp.isfinite(over)
        total = dot(subscripts, weights, jnp.where(finite, over, 0.0))
        seen = jnp.broadcast_to(seen, weights.shape).astype(jnp.float32)
        return softmax.poison(total, dot(subscripts, seen, (~finite).astype(jnp.float32)) > 0)


def _loop(count: int, step, carry, operands: Operands):
    return lax.fori_loop(0, count, step, sharding.vary(carry, sharding.varying_axes(operands)))


@functools.partial(jax.jit, static_argnames="keep")
def forward(operands: Operands, *, keep: bool = False) -> tuple[jax.Array, ...]:
    """As the kernel's, but all of out's lower bits are kept."""
    chunks = KeyTiles(operands)
    problem, scale = chunks.problem, natural_scale(operands)

    def step(i, state):
        chunk = chunks[i]
        state, weights = softmax.rescale(state, chunk.logits, scale * softmax.LOG2_E)
        acc = state.acc + chunks.summed("bkgqs,bksd->bkgqd", weights, chunk.seen, chunk.value)
        return state._replace(acc=acc)

    state = _loop(chunks.count, step, softmax.start(problem.lse_shape, problem.value_dim), operands)
    if operands.sinks is not None:
        sinks = jnp.broadcast_to(operands.sinks[None, :, :, None], problem.lse_shape)
        out, lse = softmax.finish_beside(state, scale, sinks)
    else:
        out, lse = softmax.finish(state)
    rounded = chunks.as_given(out)
    if not (keep and low_bits.are_lost(rounded.dtype)):
        return rounded, *lse
    out = jnp.moveaxis(out, -2, 1) if operands.rules.layout == "BTNH" else out
    return rounded, *lse, low_bits.of(out, rounded, jnp.int16)


@jax.jit
def backward(operands: BackwardOperands) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As the kernels'."""
    chunks = KeyTiles(operands)
    d_out, query = chunks.by_head(operands.d_out), chunks.query

    def step(i, sums):
        chunk = chunks[i]
        weights, d_logits = _of_chunk(operands, chunk, d_out)
        d_products = d_logits * chunk.slope * operands.rules.scale
        d_query, d_key, d_value = sums
        d_query += chunks.summed("bkgqs,bksd->bkgqd", d_products, chunk.seen, chunk.key)
        mine = (
            chunks.summed("bkgqs,bkgqd->bksd", d_products, chunk.seen, query),
            chunks.summed("bkgqs,bkgqd->bksd", weights, chunk.seen, d_out),
        )
        at = i * chunks.size
        d_key, d_value = (
            lax.dynamic_update_slice_in_dim(whole, part, at, 2)
            for whole, part in zip((d_key, d_value), mine, strict=True)
        )
        return d_query, d_key, d_value

    zeros = jax.tree.map(jnp.zeros_like, (query, chunks.key, chunks.value))
    d_query, d_key, d_value = _loop(chunks.count, step, zeros, operands)
    kv_len = chunks.problem.kv_len
    return (
        chunks.as_given(d_query),
        chunks.as_given(d_key[:, :, :kv_len]),
        chunks.as_given(d_value[:, :, :kv_len]),
    )


def _of_chunk(operands: BackwardOperands, chunk: KeyTile, d_out: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights, and gradients of logits."""
    lse, factor = softmax.Lse(operands.maximum, operands.rest), natural_scale(operands) * softmax.LOG2_E
    weights = jnp.where(chunk.seen, softmax.weights_again(chunk.logits, factor, lse), 0.0)
    d_weights = dot("bkgqd,bksd->bkgqs", d_out, chunk.value)
    return weights, jnp.where(chunk.seen, weights * (d_weights - operands.delta[..., None]), 0.0)


@functools.partial(jax.jit, static_argnames="dtype")
def bias_gradient(operands: BackwardOperands, *, dtype: Any) -> jax.Array:
    """As the kernel's."""
    assert operands.bias is not None
    shape, chunks = operands.bias.shape, KeyTiles(operands)
    d_out = chunks.by_head(operands.d_out)
    summed = [axis for axis, size in enumerate(shape[:4]) if size == 1]

    def step(i, whole):
        _, d_logits = _of_chunk(operands, chunks[i], d_out)
        part = jnp.sum(d_logits, axis=summed, keepdims=True)
        return lax.dynamic_update_slice_in_dim(whole, part, i * chunks.size, 4)

    zeros = jnp.zeros((*shape[:4], chunks.count * chunks.size), jnp.float32)
    return _loop(chunks.count, step, zeros, operands)[..., : shape[4]].astype(dtype)


@functools.partial(jax.jit, static_argnames="asked")
def captured_gradients(operands: BackwardOperands, *, asked: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """As the kernels', but for arrays that are read in any way: by JAX's own derivatives of gathers."""
    chunks, given, captured = KeyTiles(operands), operands.mods, operands.captured
    assert given is not None
    assert captured is not None
    d_out, score = chunks.by_head(operands.d_out), given.score
    # One device's part: derivatives of replicated values would be summed over devices.
    own = sharding.vary(tuple(captured[number] for number in asked), sharding.varying_axes(operands))

    def step(i, sums):
        chunk = chunks[i]
        _, d_logits = _of_chunk(operands, chunk, d_out)
        products = dot("bkgqd,bksd->bkgqs", chunks.query, chunk.key)
        logits, scale, _ = weights.bent(products, operands.rules.scale, operands.rules.softcap)

        def scored(arrays: tuple[jax.Array, ...]) -> jax.Array:
            changed = list(captured)
            for number, array in zip(asked, arrays, strict=True):
                changed[number] = array
            return chunks.of_mods(i, score, tuple(changed)).scored(logits * scale)[0]

        _, pull = jax.vjp(scored, own)
        found = pull(jnp.where(chunk.seen, d_logits, 0.0))[0]
        return tuple(total + one.astype(jnp.float32) for total, one in zip(sums, found, strict=True))

    zeros = tuple(jnp.zeros(captured[number].shape, jnp.float32) for number in asked)
    sums = dict(zip(asked, _loop(chunks.count, step, zeros, operands), strict=True))
    return tuple(sums.get(i, jnp.zeros(one.shape, jnp.float32)) for i, one in enumerate(captured))
