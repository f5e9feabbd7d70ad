"""Lowering for a GPU that is not there, and compiling the result to machine code.

`jax` can lower for an abstract device, and pip's Triton, in processes of its own (triton_worker.py), compiles the
Triton IR found in the lowered module. That Triton is not the one inside XLA, so its numbers (registers, shared memory)
are a check, not the truth. The helper uses private JAX modules, which is why it lives with the tests.
"""

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src.lib import triton as triton_lib
from jax._src.lib.mlir import ir

ROOT = Path(__file__).parents[1]
# What a CPU test asks for when it wants "a GPU of this architecture".
DEVICES = {
    80: ("NVIDIA A100-SXM4-80GB", 108),
    90: ("NVIDIA H100 80GB HBM3", 132),
    100: ("NVIDIA B200", 148),
    120: ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 188),
}
H100 = DEVICES[90]
SMEM_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}


def _tritons() -> list[str]:
    """Versions, oldest first. `make test-latest` has one of its own instead of those that are claimed."""
    if (Path(sys.prefix) / "triton-latest").exists():
        return ["latest"]
    claimed = [path.stem.removeprefix("triton-") for path in ROOT.glob(".ci/lock/triton-*.txt")]
    return sorted(claimed, key=lambda version: [int(part) for part in version.split(".")])


TRITONS = _tritons()
NEWEST_TRITON = TRITONS[-1]
USUAL_TRITON = TRITONS[0]
"""For what JAX lowers: the one in XLA is nearest to it, and it takes half of the newest one's time."""
TRITON_ENDS = list(dict.fromkeys((TRITONS[0], NEWEST_TRITON)))
"""Those that all kernels are compiled with; what lies between them is asked whether hints arrive."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    name: str
    sm: int
    ttgir: str
    ptx: str
    shared_bytes: int
    registers: int
    stack_bytes: int
    remarks: str = ""
    """The assembler's, of a module as this package writes it."""


@contextlib.contextmanager
def abstract_mesh(device: tuple[str, int] = H100, num_devices: int = 1) -> Iterator[None]:
    """What is traced inside is traced for abstract GPUs."""
    kind, cores = device
    mesh = jax.sharding.AbstractMesh(
        (num_devices,),
        ("x",),
        # Explicit axes would give every intermediate of a whole model a sharding to agree on.
        axis_types=(jax.sharding.AxisType.Auto,),
        abstract_device=jax.sharding.AbstractDevice(platform="gpu", device_kind=kind, num_cores=cores),
    )
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def lower_for_four(
    function: Any, arrays: list[Any], specs: list[Any], out_specs: list[Any], axis_type: jax.sharding.AxisType
) -> str:
    """For 2 x 2 abstract GPUs, axes x and y: Explicit ones, or shard_map's (Manual), whose check of what varies it
    must pass."""
    manual = axis_type == jax.sharding.AxisType.Manual
    kind, cores = H100
    device = jax.sharding.AbstractDevice(platform="gpu", device_kind=kind, num_cores=cores)
    outer = jax.sharding.AxisType.Auto if manual else axis_type
    mesh = jax.sharding.AbstractMesh((2, 2), ("x", "y"), axis_types=(outer,) * 2, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        if manual:
            function = jax.shard_map(function, mesh=mesh, in_specs=tuple(specs), out_specs=tuple(out_specs))
        else:
            arrays = [
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))
                for x, spec in zip(arrays, specs, strict=True)
            ]
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def lower_for_gpu(
    fn: Callable[..., Any], *args: Any, device: tuple[str, int] = H100, num_devices: int = 1
) -> Any:
    """jax.stages.Lowered of jit(fn) for abstract GPUs; `args` are arrays or ShapeDtypeStructs."""
    with abstract_mesh(device, num_devices):
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


def triton_text(bytecode: bytes) -> str:
    """A kernel's Triton IR as this jax writes it."""
    with ir.Context() as context:
        triton_lib.dialect.register_dialect(context)
        return str(ir.Module.parse(bytecode))


def compile_kernels(
    lowered: Any, sm: int, triton: str = USUAL_TRITON, ending: tuple[str, ...] = ("",), **options: Any
) -> list[Compiled]:
    """Compiles the Pallas kernels of a lowered module whose names end so, for one architecture (80, 90, 100, 120).

    A cache hint that does not reach Triton is an error.
    """
    return [
        compile_text(
            name, triton_text(bytecode), sm, triton, num_warps=num_warps, num_stages=num_stages, **options
        )
        for name, bytecode, num_warps, num_stages in triton_kernels(lowered)
        if name.endswith(ending)
    ]


def compile_text(name: str, triton_ir: str, sm: int, triton: str = USUAL_TRITON, **options: Any) -> Compiled:
    worker = _worker(triton, sm)
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps({"ir": triton_ir, "sm": sm, **options}) + "\n")
    worker.stdin.flush()
    line = worker.stdout.readline()
    assert line, f"the process of Triton {triton} ended while it compiled {name} for sm_{sm}"
    answer = json.loads(line)
    assert "error" not in answer, f"{name} for sm_{sm} by Triton {triton}: {answer['error']}"
    return Compiled(name, sm, **answer)


@functools.cache
def _worker(triton: str, sm: int) -> subprocess.Popen:
    """One for each architecture: Triton 3.6 goes on converting float8 as on the first that a process compiles for."""
    overlay = Path(sys.prefix) / f"triton-{triton}"
    if not overlay.exists():
        pytest.fail(f"Triton {triton} is not installed: run `make .venv/triton-{triton}`")
    worker = subprocess.Popen(
        [
            sys.executable,
            str(Path(__file__).with_name("triton_worker.py")),
            str(ROOT / ".pytest_cache/triton"),
        ],
        env=os.environ | {"PYTHONPATH": str(overlay)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(worker.communicate)  # ends its input, and with it the process
    assert worker.stdout is not None
    hello = json.loads(worker.stdout.readline())
    assert Path(hello["file"]).is_relative_to(overlay), f"Triton came from {hello['file']}"
    assert triton in (hello["version"], "latest"), f"{overlay} holds Triton {hello['version']}"
    return worker
