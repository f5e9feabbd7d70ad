"""Kernels that this package writes as Triton IR, taken from calls before they are compiled."""

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import lowering

from pallas_attn._lowering import compiler
from pallas_attn._lowering.cache import Compiled

NOTHING = "module {\n  tt.func public @nothing(%arg0: !tt.ptr<f32>) {\n    tt.return\n  }\n}\n"


@dataclasses.dataclass(frozen=True)
class Written:
    text: str
    sm: int
    num_warps: int
    num_stages: int
    max_registers: int = 0

    @property
    def name(self) -> str:
        return self.text.partition("tt.func public @")[2].partition("(")[0]

    def compile(self, triton: str = lowering.NEWEST_TRITON, sm: int | None = None) -> lowering.Compiled:
        """By one of the Tritons beside the environment, in a process of its own."""
        sm = sm or self.sm
        names = ("num_warps", "num_stages", "max_registers")
        options = {name: getattr(self, name) for name in names}
        return lowering.compile_text(
            self.name, self.text, sm, triton, **options, ptx_version=compiler.ptx_version(sm)
        )


@contextlib.contextmanager
def written() -> Iterator[list[Written]]:
    """Collects the kernels of what is lowered inside the block, which compiles none."""
    found: list[Written] = []

    def compile_kernel(text: str, capability: int, num_warps: int, *rest: int) -> Compiled:
        found.append(Written(text, capability, num_warps, *rest))
        return Compiled(found[-1].name, f"// not compiled: kernel {len(found) - 1}", 0, num_warps, "none")

    with mock.patch.multiple(compiler, compile_kernel=compile_kernel, begin=lambda *_: None):
        yield found


def arguments(*lead: int):
    """Of `paged_attention`; those that differ from step to step with `lead` before their dimensions."""
    lens = jax.ShapeDtypeStruct((*lead, 4), jnp.int32)
    pool = jax.ShapeDtypeStruct((64, 16, 2, 64), jnp.bfloat16)
    return (
        jax.ShapeDtypeStruct((4, 8, 64), jnp.bfloat16),
        pool,
        pool,
        jax.ShapeDtypeStruct((4, 8), jnp.int32),
        lens,
    )
