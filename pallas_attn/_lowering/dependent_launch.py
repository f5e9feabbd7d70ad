"""Programmatic dependent launch and prefetches, where Pallas compiles a kernel.

On Hopper and later XLA launches its Triton kernels as dependents: each may start before the previous kernel has ended,
and first waits for its end and its writes (griddepcontrol.wait). The previous kernel triggers that launch
(griddepcontrol.launch_dependents), at the latest when it ends. A kernel whose results only the merge reads triggers it
as soon as it runs, so that the merge's programs are resident where a multiprocessor has space.

Only such a kernel may: code that XLA itself compiles may load what it takes for constant before its wait
(openxla/xla#43894). The merge's loads stay behind its wait, and readers of its results start when it ends.

Registering rules with Pallas' lowering is not public: `private.PALLAS_RULES`.
"""

import jax
from jax.interpreters import mlir

from pallas_attn._lowering import private

INSTRUCTION = "griddepcontrol.launch_dependents;"


def _lower_launch(ctx):
    # The operation must have a result.
    result = mlir.ir.IntegerType.get_signless(32)
    private.assembly(f"{INSTRUCTION} mov.b32 $0, 0;", "=r", result, pure=False)
    return []


_launch = private.line_in_pallas("pallas_attn_launch_dependents", _lower_launch)
_touched = private.line_in_pallas("pallas_attn_touched", lambda ctx, elements: [])


def launch_dependents() -> None:
    """In a kernel's body: the next kernel may be launched once all programs have reached this."""
    _launch()


def touched(elements: jax.Array) -> None:
    """In a kernel's body: keeps a load whose value is discarded, a prefetch."""
    _touched(elements)
