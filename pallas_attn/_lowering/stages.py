"""What is asked of Triton: from the text of a module to PTX, by the stages of Triton's own compiler.

It runs in any process that has Triton, and needs neither JAX nor a GPU: the driver makes machine code of the PTX when
XLA loads the kernel. The only importer of Triton.
"""

import re
import tempfile
from pathlib import Path
from typing import Any

OLDEST, NEWEST = (3, 6), (3, 9)
STAGES = ("ttir", "ttgir", "llir", "ptx")
POLICY = re.compile(r" \{cachePolicy = #tt\.cache_policy<cache_modifier = none, eviction_policy = (\w+)>\}")
# What debuggers read. It names the file that Triton parsed, which is another each time, and is most of the text.
DEBUG = re.compile(
    r"^\t\.(?:loc|file)\t[^\n]*\n|^\t\.section\t\.debug_\w+\s*\{.*?^\t\}\n", re.MULTILINE | re.DOTALL
)


def release(version: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def respell(text: str, triton: tuple[int, int]) -> str:
    """`text` as Triton before 3.9 reads it: a cache hint was a word of its own."""
    return text if triton >= (3, 9) else POLICY.sub(r" evictionPolicy = \1", text)


def to_ptx(text: str, capability: int, num_warps: int, num_stages: int, ptx_version: int) -> dict[str, Any]:
    """name, ptx, shared_bytes, num_warps (Triton may add some that only load) and triton, its version."""
    import triton
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget, Language
    from triton.compiler.compiler import make_backend

    backend: Any = make_backend(GPUTarget("cuda", capability, 32))
    sizes = {"num_warps": num_warps, "num_stages": num_stages, "ptx_version": ptx_version}
    # Products and sums are fused, as by XLA.
    options = backend.parse_options({**sizes, "enable_fp_fusion": True})
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
        "ptx": DEBUG.sub("", module),
        "shared_bytes": facts["shared"],
        "num_warps": facts["num_warps"],
        "triton": triton.__version__,
    }
