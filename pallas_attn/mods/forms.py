"""Gradients of arrays that a score_mod captures, by the form in which they are read.

If the index of a read depends on the query only, the gradient is a sum over keys, and so on: a kernel sums over what
the index does not depend on, in a fixed order, and the results are scattered here. The same inputs give the same bits.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn.mods.derivative import Read
from pallas_attn.mods.evaluate import Values, as_it_is, from_arrays
from pallas_attn.mods.operands import Mods
from pallas_attn.mods.program import BATCH, HEAD, KEY, QUERY, VARIABLES, Number, Operand, Program

type ReadForm = Literal["queries", "keys", "distances"]
"""What a kernel's sums leave: for each head, one number for each query, key, or distance between the two."""
FORMS: tuple[ReadForm, ...] = ("queries", "keys", "distances")


def form_of(program: Program, read: Read) -> ReadForm | None:
    """None: the index depends on query and key in another way than by their distance."""
    used = _used(program, read.index)
    if KEY not in used:
        return "queries"
    if QUERY not in used:
        return "keys"
    return "distances" if all(_of_distance(program, one) for one in read.index) else None


def _used(program: Program, operands: Sequence[Operand]) -> frozenset[int]:
    return frozenset[int]().union(
        *(program.variables[one] for one in operands if not isinstance(one, Number))
    )


def _of_distance(program: Program, operand: Operand) -> bool:
    if isinstance(operand, Number) or not program.variables[operand] & {QUERY, KEY}:
        return True
    by = _linear(program, operand)
    if by is not None and by[0] == -by[1]:
        return True
    if operand < len(VARIABLES):
        return False
    return all(_of_distance(program, one) for one in program.steps[operand - len(VARIABLES)].inputs)


def _linear(program: Program, operand: Operand) -> tuple[int, int] | None:
    """The constant slopes of an integer by query and key, where it has such."""
    if isinstance(operand, Number) or not program.variables[operand] & {QUERY, KEY}:
        return 0, 0
    if operand < len(VARIABLES):
        return int(operand == QUERY), int(operand == KEY)
    step = program.steps[operand - len(VARIABLES)]
    if step.name not in ("add", "sub", "neg") or step.dtype != "int32":
        return None
    parts = [_linear(program, one) for one in step.inputs]
    signs = {"add": (1, 1), "sub": (1, -1), "neg": (-1,)}[step.name]
    if any(part is None for part in parts):
        return None
    both = [
        (sign * part[0], sign * part[1]) for sign, part in zip(signs, parts, strict=True) if part is not None
    ]
    return sum(one[0] for one in both), sum(one[1] for one in both)


def length(form: ReadForm, q_len: int, kv_len: int) -> int:
    """The numbers left for a head. Place 0 of distances is q_idx - kv_idx = 1 - kv_len."""
    return {"queries": q_len, "keys": kv_len, "distances": q_len + kv_len - 1}[form]


def brought_to_places(
    program: Program,
    read: Read,
    form: ReadForm,
    sums: jax.Array,
    mods: Mods,
    arrays: Sequence[Any],
    kv_len: int,
) -> jax.Array:
    """The captured array's gradient, float32, from `sums` [batch, num_kv_heads, group, length]. `arrays`: all captured
    ones, on which indices may depend."""
    at = jnp.arange(sums.shape[3], dtype=jnp.int32)
    distance = at - (kv_len - 1)
    known = {
        "queries": {QUERY: at},
        "keys": {KEY: at},
        "distances": {QUERY: jnp.maximum(distance, 0), KEY: jnp.maximum(-distance, 0)},
    }[form]
    if mods.heads is not None:
        known[HEAD] = mods.heads[:, :, None]
    if mods.sequences is not None:
        known[BATCH] = mods.sequences[:, None, None, None]
    used = _used(program, read.index)
    axes = (BATCH in used, HEAD in used, HEAD in used, bool(used & {QUERY, KEY}))
    left = jnp.sum(sums, axis=[axis for axis, stays in enumerate(axes) if not stays], keepdims=True)
    places = Values(Program(program.steps, read.index, program.captures), from_arrays(arrays), as_it_is)
    found = places.given(known).results or [jnp.int32(0)]
    index = [jnp.broadcast_to(one, left.shape) for one in found]
    shape = program.captures[read.capture].shape or (1,)
    flat = jnp.ravel_multi_index(index, shape, mode="clip").ravel()
    whole = jnp.zeros(shape, jnp.float32).ravel()
    if _apart(program, read, used):
        return whole.at[flat].add(left.ravel(), unique_indices=True).reshape(shape)
    return _segment_sums(flat, left.ravel(), whole).reshape(shape)


def _apart(program: Program, read: Read, used: frozenset[int]) -> bool:
    """Whether no two heads, sequences or tokens read the same element."""
    along = [_linear(program, one) for one in read.index]
    tokens = not used & {QUERY, KEY} or any(by not in (None, (0, 0)) for by in along)
    return tokens and all(which in read.index for which in (BATCH, HEAD) if which in used)


def _segment_sums(index: jax.Array, values: jax.Array, whole: jax.Array) -> jax.Array:
    """`whole`, zeros, with values of equal indices summed at their place, in the values' order."""
    order = jnp.argsort(index, stable=True)
    index, values = index[order], values[order]
    first = jnp.concatenate([jnp.ones(1, bool), index[1:] != index[:-1]])

    def joined(before: tuple[jax.Array, jax.Array], after: tuple[jax.Array, jax.Array]):
        return before[0] | after[0], jnp.where(after[0], after[1], before[1] + after[1])

    _, sums = lax.associative_scan(joined, (first, values))
    last = jnp.concatenate([index[1:] != index[:-1], jnp.ones(1, bool)])
    at = jnp.where(last, index, whole.size + jnp.arange(index.size))  # beyond the array: dropped
    return whole.at[at].set(sums, mode="drop", unique_indices=True)
