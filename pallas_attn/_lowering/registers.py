"""Limiting a kernel's registers a thread, where Pallas compiles it.

Two programs of eight warps share a multiprocessor if a thread takes at most 128. Triton has an attribute for that on a
kernel's module, but Pallas has no parameter. So a kernel binds a primitive whose lowering rule, inside Pallas', sets
the attribute. Registering rules with Pallas' lowering is not public: `private.PALLAS_RULES`.
"""

from jax.interpreters import mlir

from pallas_attn._lowering import private

ATTRIBUTE = "ttg.maxnreg"


def _lower(ctx, *, registers: int):
    operation = mlir.ir.InsertionPoint.current.block.owner
    while operation.parent is not None:
        operation = operation.parent
    operation.attributes[ATTRIBUTE] = mlir.i32_attr(registers)
    return []


_limit = private.line_in_pallas("pallas_attn_limit_registers", _lower)


def limit(registers: int) -> None:
    """In a kernel's body: limits its threads to so many registers."""
    _limit(registers=registers)
