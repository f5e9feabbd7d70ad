"""How many registers a thread of a kernel may have, where Pallas compiles it.

Two programs of eight warps share a multiprocessor if a thread takes at most 128. Triton has that as an attribute of a
kernel's module, and Pallas no parameter for it. So a kernel asks for it by a primitive, whose lowering, inside Pallas',
writes the attribute. How rules for Pallas' lowering are registered is private: `private.PALLAS_RULES`.
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
    """Inside a kernel's body: its threads get at most so many."""
    _limit(registers=registers)
