"""Kernels by Triton itself, without Pallas: a body is traced, translated to Triton IR, compiled and launched.

    body     what a kernel's body is written with, and its jaxpr
    text     values, types, and the lines of the IR
    rules    which rule writes which primitive; a jaxpr from top to bottom
    arithmetic  shapes  memory  control    the rules
    each     loads that threads do for themselves, for Pallas' lowering too
    module   a whole kernel as the text of a module
    stages  compiler  cache    from that text to PTX, by Triton, once for all processes
    driver   machine code of it, before XLA asks
    launch   the call that XLA runs
    private  what of this is no public interface of JAX

What was learnt on the way is in EXPERIMENTS.md.

The IR is the Triton dialect of triton-lang.org ("MLIR dialects" of its documentation); Triton is Tillet, Kung and Cox,
"Triton: an intermediate language and compiler for tiled neural network computations" (2019).
"""

from pallas_attn._lowering.body import Place as Place
from pallas_attn._lowering.body import Ref as Ref
from pallas_attn._lowering.body import Slice as Slice
from pallas_attn._lowering.body import is_tracing as is_tracing
from pallas_attn._lowering.body import load as load
from pallas_attn._lowering.body import program_id as program_id
from pallas_attn._lowering.body import store as store
from pallas_attn._lowering.body import touch as touch
from pallas_attn._lowering.launch import launch as launch
