"""e5m2 arrays that an interpreted kernel writes to in place, as bytes.

XLA for CPUs writes elements of e5m2 arrays by way of a wider type, for the whole array, which changes NaN payloads. So
an interpreted kernel gets the array's bytes behind what looks like a ref of e5m2: it loads and stores numbers, and what
it does not touch stays the same bit for bit.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

E5M2, BYTES = jnp.float8_e5m2, jnp.uint8


class Place(NamedTuple):
    """A part of such an array."""

    place: Any

    def load(self, read: Callable[..., jax.Array], *, other: Any, **options: Any) -> jax.Array:
        other = None if other is None else as_bytes(jnp.asarray(other, E5M2))
        return jax.lax.bitcast_convert_type(read(self.place, other=other, **options), E5M2)


class Ref:
    """The part of a ref's interface that kernels use."""

    dtype = jnp.dtype(E5M2)

    def __init__(self, ref: Any):
        self._ref, self.shape = ref, ref.shape

    @property
    def at(self) -> "Ref":
        return self

    def __getitem__(self, index: Any) -> Place:
        return Place(self._ref.at[index])


def as_bytes(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, BYTES)


def call(
    make: Callable[..., Callable[..., Any]],
    kernel: Callable[..., None],
    *,
    out_shape: Sequence[jax.ShapeDtypeStruct],
    input_output_aliases: Mapping[int, int],
    **options: Any,
) -> Callable[..., Any]:
    """`make(kernel, ...)`, with aliased e5m2 operands passed as bytes."""
    options["input_output_aliases"] = input_output_aliases
    mine = [output for output in input_output_aliases.values() if out_shape[output].dtype == E5M2]
    structs = [s.update(dtype=BYTES) if i in mine else s for i, s in enumerate(out_shape)]
    inputs = [i for i, output in input_output_aliases.items() if output in mine]

    def run(*operands: Any) -> list[jax.Array]:
        leaves, tree = jax.tree.flatten(operands)

        def body(*refs: Any) -> None:
            given, outputs = jax.tree.leaves(refs[: len(operands)]), list(refs[len(operands) :])
            for part, which in ((given, inputs), (outputs, mine)):
                for i in which:
                    part[i] = Ref(part[i])
            kernel(*jax.tree.unflatten(tree, given), *outputs)

        for i in inputs:
            leaves[i] = as_bytes(leaves[i])
        outputs = list(make(body, out_shape=structs, **options)(*jax.tree.unflatten(tree, leaves)))
        for i in mine:
            outputs[i] = jax.lax.bitcast_convert_type(outputs[i], E5M2)
        return outputs

    return run if mine else make(kernel, out_shape=out_shape, **options)
