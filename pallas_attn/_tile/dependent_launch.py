"""What a kernel says or asks for before anyone needs it, where Pallas compiles it.

On Hopper and later XLA launches its Triton kernels early; each begins by waiting for the end of the kernel in front and
for what that wrote (griddepcontrol.wait). From when on it may be launched the kernel in front says; one that never does
has said so when it ends. A kernel whose results the merge alone reads says it as soon as it runs: programs of the merge
then stand ready where a multiprocessor has room for them.

Only such a kernel may: what XLA itself compiles may load what it takes for constant before its wait
(openxla/xla#43894). The merge's loads stay behind theirs, and whatever reads its results starts when it ends.

How rules for Pallas' lowering are registered is private: `private.PALLAS_RULES`.
"""

import jax
from jax.interpreters import mlir

from pallas_attn._lowering import private

INSTRUCTION = "griddepcontrol.launch_dependents;"


def _lower_launch(ctx):
    ir = mlir.ir
    # The operation has to have a result.
    ir.Operation.create(
        "tt.elementwise_inline_asm",
        results=[ir.IntegerType.get_signless(32)],
        operands=[],
        attributes={
            "asm_string": ir.StringAttr.get(f"{INSTRUCTION} mov.b32 $0, 0;"),
            "constraints": ir.StringAttr.get("=r"),
            "pure": ir.BoolAttr.get(False),
            "packed_element": mlir.i32_attr(1),
        },
    )
    return []


_launch = private.line_in_pallas("pallas_attn_launch_dependents", _lower_launch)
_touched = private.line_in_pallas("pallas_attn_touched", lambda ctx, elements: [])


def launch_dependents() -> None:
    """Inside a kernel's body: the next kernel may be launched once all programs have come here."""
    _launch()


def touched(elements: jax.Array) -> None:
    """Inside a kernel's body: that these are loaded is all that is wanted of them."""
    _touched(elements)
