"""Loads that each thread does for itself, of the elements that it needs where it needs them.

Triton spreads a tile's loads over threads so that neighbours are loaded by neighbours, copies them to shared memory a
step ahead, four bytes at a time where rows are no rows of memory, and from there to who needs them. Of a table by the
distance of query and key, threads that hold a product's results need elements that lie side by side, and the same ones
in row after row. As a line of assembly a load is arithmetic to Triton: it stays with those threads, and loads of equal
addresses become one.

As arithmetic it may also be done for tiles that a loop does not reach: places must lie inside of the array for those,
too. Not ld.global.nc: a kernel may be launched before the one ahead of it has written (`dependent_launch.py`).
"""

from typing import Any

import jax.numpy as jnp

from pallas_attn._lowering import private

_REGISTERS = {2: "h", 4: "r"}  # by bytes of an element; smaller ones share a register


def assembly(dtype: Any) -> tuple[str, str] | None:
    """The line and its constraints; None where there is none for elements of this type."""
    size = jnp.dtype(dtype).itemsize
    register = "f" if jnp.dtype(dtype) == jnp.float32 else _REGISTERS.get(size)
    return None if register is None else (f"ld.global.b{8 * size} $0, [$1];", f"={register},l")


def _lower(ctx, loaded):
    """From Pallas' own load, which nobody uses then, and Triton drops."""
    (aval,) = ctx.avals_in
    load = getattr(loaded.owner, "opview", loaded.owner)
    how = assembly(aval.dtype)
    if how is None or load.operation.name != "tt.load" or len(load.operation.operands) != 1:
        return loaded
    return private.assembly(*how, loaded.type, load.operation.operands[0], pure=True)


# In a kernel's body that Pallas compiles: a load, done so.
each = private.in_pallas("pallas_attn_each", _lower)
