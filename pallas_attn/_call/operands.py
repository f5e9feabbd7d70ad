"""An op's operands, from its public function to its kernel: one frozen pytree whose fields have the public names.

    @operands
    class Operands:
        query: Array = dims("seqs q heads dim")
        sinks: Array | None = dims("heads", default=None)
        scale: float

A field with `dims` holds the caller's array, then a tracer, under `vmap` and `shard_map` a part of the array, and
inside a kernel the ref to it; None where it is optional and missing. Its dimensions are named in words, which decide
how a call is partitioned (partition.py). A field without `dims` is compiled in.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, dataclass_transform

import jax

_DIMS = "dims"


def dims(*words: Any, default: Any = dataclasses.MISSING) -> Any:
    """A field that holds an array, with its dimensions in words; or a pytree of arrays, with as many words.

    Of several `words`, the one with as many dimensions as the array counts. Where they depend on compiled-in fields, a
    function of the operands returns them. With `default` None the field is optional.
    """
    return dataclasses.field(default=default, metadata={_DIMS: words})


@dataclass_transform(frozen_default=True, kw_only_default=True, eq_default=False, field_specifiers=(dims,))
def operands[T](cls: type[T]) -> type[T]:
    """Turns an annotated class into an op's operands: a frozen dataclass and a pytree."""
    made: Any = dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls)
    fields = dataclasses.fields(made)
    arrays = [field.name for field in fields if _DIMS in field.metadata]
    static = [field.name for field in fields if _DIMS not in field.metadata]
    return jax.tree_util.register_dataclass(made, data_fields=arrays, meta_fields=static)


def _fields(operands: Any) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """(name, value, words) of the fields that hold arrays."""
    for field in dataclasses.fields(operands):
        if (value := getattr(operands, field.name)) is not None and _DIMS in field.metadata:
            yield field.name, value, field.metadata[_DIMS]


def named(operands: Any) -> dict[str, Any]:
    """The arrays that were given, or the pytrees of them."""
    return {name: value for name, value, _ in _fields(operands)}


def dims_of(operands: Any) -> tuple[tuple[str, str], ...]:
    """(name, dimensions in words) of each array, as `jax.tree.leaves` has them."""
    return tuple(
        (name, said)
        for name, value, words in _fields(operands)
        for said in jax.tree.leaves(_said(operands, value, words))
    )


def only(operands: Any, *names: str) -> Any:
    """A copy that holds only these arrays, for a kernel that reads no others."""
    return dataclasses.replace(operands, **dict.fromkeys(named(operands).keys() - set(names)))


def aliases(operands: Any, *names: str) -> dict[int, int]:
    """{index of an array among the leaves: index of the result that overwrites it}, for those of the named arrays that
    were given; `names` are in the results' order."""
    given = [name for name, _ in dims_of(operands)]
    return {given.index(name): result for result, name in enumerate(names) if name in given}


def _said(operands: Any, value: Any, words: Sequence[Any]) -> Any:
    if len(words) > 1:
        return next(one for one in words if len(one.split()) == len(value.shape))
    (said,) = words
    return said(operands) if callable(said) else said


def ready(operands: Any) -> Any:
    """A copy with JAX arrays: outside jit a caller's may be numpy's."""
    return jax.tree.map(jax.numpy.asarray, operands)
