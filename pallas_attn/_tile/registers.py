"""How many registers a thread of a kernel may have, where Pallas compiles it.

Two programs of eight warps share a multiprocessor if a thread takes at most 128. Triton has that as an attribute of a
kernel's module, and Pallas no parameter for it. So a kernel asks for it by a primitive, whose lowering, inside Pallas',
writes the attribute. How rules for Pallas' lowering are registered is private: `private.PALLAS_RULES`.
"""

from jax.extend.core import Effect, Primitive
from jax.interpreters import mlir

from pallas_attn._lowering import private

ATTRIBUTE = "ttg.maxnreg"


class _Limited(Effect):
    """Keeps a line of a kernel's that has no result."""


_limit_p = Primitive("pallas_attn_limit_registers")
_limit_p.multiple_results = True


def limit(registers: int) -> None:
    """Inside a kernel's body: its threads get at most so many."""
    _limit_p.bind(registers=registers)


@_limit_p.def_effectful_abstract_eval
def _(*, registers: int):
    return [], {_Limited()}


def _lower(ctx, *, registers: int):
    operation = mlir.ir.InsertionPoint.current.block.owner
    while operation.parent is not None:
        operation = operation.parent
    operation.attributes[ATTRIBUTE] = mlir.i32_attr(registers)
    return []


private.register_in_pallas(_limit_p, _lower)
