"""From the text of a module to PTX, by the stages of Triton's own compiler.

It needs Triton but neither JAX nor a GPU: the driver compiles the PTX when XLA loads the kernel. This is the only
importer of Triton.
"""

import functools
import re
import tempfile
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

OLDEST, NEWEST = (3, 6), (3, 9)
STAGES = ("ttir", "ttgir", "llir", "ptx")
POLICY = re.compile(r" \{cachePolicy = #tt\.cache_policy<cache_modifier = none, eviction_policy = (\w+)>\}")

# Passes that find nothing to do in our kernels, which have a single function, use no clusters and leave prefetching to
# the pipeliner. Triton verifies the whole module after each pass, which is most of their cost.
IDLE = {
    "add_inliner",
    "add_symbol_dce",
    "add_rewrite_tensor_pointer",
    "add_rewrite_tensor_descriptor_to_pointer",
    "add_optimize_descriptor_encoding",
    "add_tma_lowering",
    "add_loop_unroll",
    "add_f32_dot_tc",
    "add_plan_cta",
    "add_assign_cga_layouts",
    "add_optimize_cta_locality",
    "add_check_matmul_two_cta",
    "add_cluster_barrier_mbar_allocator",
    "add_initialize_ws_cluster_barriers",
    "add_fuse_nested_loops",
    "add_hopper_warpspec",
    "add_warp_specialize_to_llvm",
}
# For tensor memory (Blackwell).
IDLE_BELOW_100 = {
    "add_optimize_tmem_layouts",
    "add_tmem_load_reduce",
    "add_interleave_tmem",
    "add_hoist_mbarrier_lifecycle",
    "add_allocate_tensor_memory",
    "add_tmem_barrier_insertion",
    "add_tmem_wait_insertion",
}
# Line information of the temporary file that Triton parses, which differs each time.
UNWANTED = {"add_di_scope"}


def release(version: str) -> tuple[int, int]:
    major, minor, *_ = (*map(int, re.findall(r"\d+", version)), 0, 0)
    return major, minor


def respell(text: str, triton: tuple[int, int]) -> str:
    """`text` in the syntax before Triton 3.9, where a cache hint was a keyword."""
    return text if triton >= (3, 9) else POLICY.sub(r" evictionPolicy = \1", text)


class _Without:
    """A module of Triton in which functions of these names, at any depth, do nothing."""

    def __init__(self, module: ModuleType, names: set[str]) -> None:
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            return lambda *_, **__: None
        found = getattr(self._module, name)
        return _Without(found, self._names) if isinstance(found, ModuleType) else found


@functools.cache
def _backend(capability: int) -> Any:
    """Triton's backend for this GPU without the idle passes; a copy, so that other users of Triton are not affected."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    whole: Any = make_backend(GPUTarget("cuda", capability, 32))
    left_out = IDLE | UNWANTED | (IDLE_BELOW_100 if capability < 100 else set())

    def shortened(stage: Any) -> Any:
        """The same function, for which Triton's modules of passes are `_Without`."""
        is_static = isinstance(stage, staticmethod)
        made = stage.__func__ if is_static else stage
        reads = {
            name: _Without(found, left_out) if name in ("passes", "nvidia") else found
            for name, found in made.__globals__.items()
        }
        copy = FunctionType(made.__code__, reads, made.__name__, made.__defaults__, made.__closure__)
        return staticmethod(copy) if is_static else copy

    stages = {name: shortened(vars(type(whole))[name]) for name in ("make_ttir", "make_ttgir", "make_llir")}
    return type(type(whole).__name__, (type(whole),), stages)(whole.target)


def to_ptx(
    text: str, capability: int, num_warps: int, num_stages: int, ptx_version: int, max_registers: int = 0
) -> dict[str, Any]:
    """With at most `max_registers` a thread (0: no limit): name, ptx, shared_bytes and num_warps (Triton may add some
    that only load)."""
    import triton
    from triton._C.libtriton import ir
    from triton.backends.compiler import Language

    backend = _backend(capability)
    sizes = {"num_warps": num_warps, "num_stages": num_stages, "ptx_version": ptx_version}
    # Multiply-adds are fused, as by XLA.
    options = backend.parse_options({**sizes, "maxnreg": max_registers or None, "enable_fp_fusion": True})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    with tempfile.TemporaryDirectory() as folder:  # Triton parses files only
        path = Path(folder) / "kernel.ttir"
        path.write_text(respell(text, release(triton.__version__)))
        module = ir.parse_mlir_module(str(path), context)
    module.context = context
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, Language.TRITON)
    facts: dict[str, Any] = {"target": backend.target, **vars(options)}
    for stage in STAGES:
        module = stages[stage](module, facts)
    for scratch in ("global_scratch_size", "profile_scratch_size"):
        if facts.get(scratch):
            raise RuntimeError(f"Triton wants {facts[scratch]} bytes of memory beside the kernel's own")
    return {
        "name": facts["name"],
        "ptx": module,
        "shared_bytes": facts["shared"],
        "num_warps": facts["num_warps"],
    }
