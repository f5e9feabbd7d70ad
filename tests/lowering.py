"""Lowering for a GPU that is not there, and compiling the result to machine code.

`jax` can lower for an abstract device, and pip's Triton compiles the Triton IR found in the lowered module. That
Triton is not the one inside XLA, so its numbers (registers, shared memory) are a check, not the truth.
The helper uses private JAX modules, which is why it lives with the tests.
"""

import dataclasses
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax._src.lib import triton as triton_lib
from jax._src.lib.mlir import ir

# Triton 3.9 warns until the choice is made; XLA's Triton fuses.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

H100 = ("NVIDIA H100 80GB HBM3", 132)
SMEM_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@dataclasses.dataclass(frozen=True)
class Compiled:
    name: str
    sm: int
    ptx: str
    shared_bytes: int
    registers: int
    stack_bytes: int


def lower_for_gpu(
    fn: Callable[..., Any], *args: Any, device: tuple[str, int] = H100, num_devices: int = 1
) -> Any:
    """jax.stages.Lowered of jit(fn) for abstract GPUs; `args` are arrays or ShapeDtypeStructs."""
    kind, cores = device
    mesh = jax.sharding.AbstractMesh(
        (num_devices,),
        ("x",),
        # Explicit axes would give every intermediate of a whole model a sharding to agree on.
        axis_types=(jax.sharding.AxisType.Auto,),
        abstract_device=jax.sharding.AbstractDevice(platform="gpu", device_kind=kind, num_cores=cores),
    )
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",))


def triton_kernels(lowered: Any) -> list[tuple[str, bytes, int, int]]:
    """(name, Triton IR bytecode, num_warps, num_stages) of each Pallas kernel in a lowered module."""
    found: list[tuple[str, bytes, int, int]] = []

    def visit(op: Any) -> ir.WalkResult:
        if "call_target_name" in op.attributes and "triton" in str(op.attributes["call_target_name"]):
            config = op.attributes["mhlo.backend_config"]
            found.append(
                (
                    ir.StringAttr(config["name"]).value,
                    ir.StringAttr(config["ir"]).value_bytes,
                    ir.IntegerAttr(config["num_warps"]).value,
                    ir.IntegerAttr(config["num_stages"]).value,
                )
            )
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(visit)
    return found


def compile_kernels(lowered: Any, sm: int) -> list[Compiled]:
    """Compiles every Pallas kernel of a lowered module for one architecture (80, 90, 100)."""
    import triton
    from triton.backends.compiler import GPUTarget

    compiled = []
    for name, bytecode, num_warps, num_stages in triton_kernels(lowered):
        with tempfile.TemporaryDirectory() as folder, ir.Context() as context:
            triton_lib.dialect.register_dialect(context)
            path = Path(folder) / f"{name}.ttir"
            path.write_text(_modern(str(ir.Module.parse(bytecode))))
            _simplify(path, sm)
            kernel = triton.compile(
                str(path),
                target=GPUTarget("cuda", sm, 32),
                options={"num_warps": num_warps, "num_stages": num_stages},
            )
        registers, spills = _resources(kernel.asm["cubin"])
        compiled.append(Compiled(name, sm, kernel.asm["ptx"], kernel.metadata.shared, registers, spills))
    return compiled


def _modern(triton_ir: str) -> str:
    """jax 0.11's spelling of an eviction hint in the one that pip's Triton and jax 0.12 read."""
    policy = r" {cachePolicy = #tt.cache_policy<cache_modifier = none, eviction_policy = \1>} :"
    return re.sub(r" evictionPolicy = (\w+) :", policy, triton_ir)


def _simplify(path: Path, sm: int) -> None:
    """Runs the target-independent passes, which `triton.compile` leaves out for a file of Triton IR and XLA does not.

    Among them is the one that lets `acc + dot(a, b)` accumulate in place.
    """
    from triton._C.libtriton import ir as triton_ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", sm, 32))
    context = triton_ir.context()
    triton_ir.load_dialects(context)
    backend.load_dialects(context)
    module = triton_ir.parse_mlir_module(str(path), context)
    module.context = context
    backend.make_ttir(module, {}, backend.parse_options({}), sm)
    path.write_text(str(module))


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of stack) as cuobjdump, which Triton's wheel ships, reports them."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    registers = re.search(r"REG:(\d+)", report)
    stack = re.search(r"STACK:(\d+)", report)
    assert registers is not None, report
    assert stack is not None, report
    return int(registers.group(1)), int(stack.group(1))
