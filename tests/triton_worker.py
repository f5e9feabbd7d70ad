"""A process that compiles Triton IR to machine code with the Triton first on its path; it neither has nor needs a GPU.

Reads requests and writes answers, one line of JSON each, until its input ends. A Triton of its own for each process is
what lets one run of the tests read the same kernels with several, whatever torch has brought into the environment.
"""

import faulthandler
import gzip
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

POLICY = re.compile(
    r" \{cachePolicy = #tt\.cache_policy<cache_modifier = (\w+), eviction_policy = (\w+)>\} :"
)
OLD_POLICY = re.compile(r" (?:cacheModifier = (\w+) )?(?:evictionPolicy = (\w+) )(?=:)")
HINTS = ("evict_first", "evict_last")
# After which a compiler hangs: less than a test has, so that the kernel is named.
MOST_SECONDS = 900


def spell(triton_ir: str, release: tuple[int, int]) -> str:
    """Cache hints as this Triton writes them: 3.9 and jax 0.12 have one attribute, those before have a word for each.

    A spelling that is not known here stays, and Triton's parser refuses it.
    """
    if release >= (3, 9):
        return OLD_POLICY.sub(
            lambda m: (
                f" {{cachePolicy = #tt.cache_policy<cache_modifier = {m[1] or 'none'}, eviction_policy = {m[2]}>}} "
            ),
            triton_ir,
        )

    def words(match: re.Match[str]) -> str:
        modifier = "" if match[1] == "none" else f" cacheModifier = {match[1]}"
        return f"{modifier} evictionPolicy = {match[2]} :"

    return POLICY.sub(words, triton_ir)


def hints(text: str) -> dict[str, int]:
    return {hint: text.count(hint) for hint in HINTS}


def simplified(triton_ir: str, sm: int, folder: Path) -> str:
    """After the target-independent passes, which `triton.compile` leaves out for a file of Triton IR and XLA does not.

    Among them is the one that lets `acc + dot(a, b)` accumulate in place. Without locations, so that what two versions
    of jax lower to the same operations is the same text.
    """
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    path = folder / "lowered.ttir"
    path.write_text(triton_ir)
    backend: Any = make_backend(GPUTarget("cuda", sm, 32))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = ir.parse_mlir_module(str(path), context)
    module.context = context
    read, meant = hints(str(module)), hints(triton_ir)
    if read != meant:
        raise ValueError(f"Triton read the hints {read}, the kernel has {meant}")
    backend.make_ttir(module, {}, backend.parse_options({}), sm)
    text = re.sub(r"^#loc.*\n", "", str(module), flags=re.MULTILINE)
    return re.sub(r' loc\((#loc\d*|".*?":\d+:\d+|unknown)\)', "", text)


STAGES = Path(__file__).parents[1] / "pallas_attn/_lowering/stages.py"


def compile_ours(triton_ir: str, sm: int, ptx_version: int, folder: Path, **options: int) -> dict[str, Any]:
    """A module as this package writes it, by its own way through Triton, and by the assembler that Triton brings."""
    from triton.backends.nvidia.compiler import get_ptxas

    spec = importlib.util.spec_from_file_location("stages", STAGES)
    assert spec is not None
    assert spec.loader is not None
    stages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stages)
    made = stages.to_ptx(triton_ir, sm, **options, ptx_version=ptx_version)
    source, cubin = folder / "kernel.ptx", folder / "assembled.cubin"
    source.write_text(made["ptx"])
    target = re.search(r"\.target (sm_\w+)", made["ptx"])
    assert target is not None
    command = [get_ptxas(sm).path, f"--gpu-name={target[1]}", str(source), "-o", str(cubin)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    if said.returncode:
        raise ValueError(said.stderr)
    registers, stack = resources(cubin.read_bytes(), folder)
    return {
        "ttgir": "",
        "ptx": made["ptx"],
        "shared_bytes": made["shared_bytes"],
        "registers": registers,
        "stack_bytes": stack,
        "remarks": said.stderr.strip(),
    }


def compile_kernel(triton_ir: str, sm: int, folder: Path, **options: int) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget

    path = folder / "simplified.ttir"
    path.write_text(triton_ir)
    kernel = triton.compile(str(path), target=GPUTarget("cuda", sm, 32), options=options)
    registers, stack = resources(kernel.asm["cubin"], folder)
    return {
        "ttgir": kernel.asm["ttgir"],
        "ptx": kernel.asm["ptx"],
        "shared_bytes": kernel.metadata.shared,
        "registers": registers,
        "stack_bytes": stack,
    }


def measure_shared(triton_ir: str, sm: int, folder: Path, **options: int) -> dict[str, Any]:
    """Shared memory alone, which is known before LLVM begins: a quarter of the time, or less."""
    from triton._C.libtriton import ir, nvidia, passes
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptx_version_from_options
    from triton.compiler.compiler import make_backend

    path = folder / "simplified.ttir"
    path.write_text(triton_ir)
    backend: Any = make_backend(GPUTarget("cuda", sm, 32))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = ir.parse_mlir_module(str(path), context)
    module.context = context
    parsed = backend.parse_options(options)
    facts = {"target": backend.target, **vars(parsed)}
    for stage in (backend.make_ttir, backend.make_ttgir):
        module = stage(module, facts, parsed, sm)
    # The beginning of `make_llir`.
    stages = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(stages)
    passes.ttgpuir.add_allocate_warp_groups(stages)
    passes.convert.add_scf_to_cf(stages)
    ptx_version = get_ptx_version_from_options(parsed, sm)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(stages, sm, ptx_version)
    ttgir = str(module)
    stages.run(module, "allocate_shared_memory")
    none = {"ptx": "", "registers": 0, "stack_bytes": 0}
    return {"ttgir": ttgir, "shared_bytes": module.get_int_attr("ttg.shared"), **none}


def resources(cubin: bytes, folder: Path) -> tuple[int, int]:
    """(registers a thread, bytes of stack) as cuobjdump, which Triton's wheel ships, reports them."""
    from triton import knobs

    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (re.search(rf"{name}:(\d+)", report) for name in ("REG", "STACK"))
    if registers is None or stack is None:
        raise ValueError(f"cuobjdump reported neither registers nor stack: {report}")
    return int(registers[1]), int(stack[1])


def answer(request: dict[str, Any], version: str, cache: Path) -> dict[str, Any]:
    """`request`: ir, sm, num_warps, num_stages, ptx_version for a module of the package's own, and shared_only where
    nothing else is asked for.

    What was compiled from the same text is read from `cache`.
    """
    sm = request["sm"]
    options = {
        name: request[name] for name in ("num_warps", "num_stages", "max_registers") if name in request
    }
    shared_only = request.get("shared_only", False)
    major, minor = (int(part) for part in version.split(".")[:2])
    with tempfile.TemporaryDirectory(dir=cache) as name:
        folder = Path(name)
        ours = request.get("ptx_version")
        text = request["ir"] if ours else simplified(spell(request["ir"], (major, minor)), sm, folder)
        key = json.dumps(
            [
                version,
                sm,
                options,
                ours,
                shared_only,
                text,
                Path(__file__).read_text(),
                STAGES.read_text() if ours else "",
            ]
        )
        kept = cache / f"{hashlib.sha256(key.encode()).hexdigest()}.json.gz"
        if kept.exists():
            return json.loads(gzip.decompress(kept.read_bytes()))
        if shared_only:
            compiled = measure_shared(text, sm, folder, **options)
        elif ours:
            compiled = compile_ours(text, sm, ours, folder, **options)
        else:
            compiled = compile_kernel(text, sm, folder, **options)
        unfinished = folder / kept.name
        unfinished.write_bytes(gzip.compress(json.dumps(compiled).encode()))
        unfinished.replace(kept)  # at once: another process may look for it
    return compiled


def main(cache: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Triton prints is no answer
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"  # the cache here is the one that both ends of jax share
    os.environ.setdefault(
        "TRITON_DEFAULT_FP_FUSION", "1"
    )  # 3.9 warns until the choice is made; XLA's Triton fuses
    os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")  # no debugger reads it
    import triton

    Path(cache).mkdir(parents=True, exist_ok=True)
    print(json.dumps({"version": triton.__version__, "file": triton.__file__}), file=answers, flush=True)
    for line in sys.stdin:
        faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
        try:
            reply = answer(json.loads(line), triton.__version__, Path(cache))
        except Exception as error:  # it is the caller's to raise
            reply = {"error": f"{type(error).__name__}: {error}"}
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
