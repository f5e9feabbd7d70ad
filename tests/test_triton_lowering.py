"""`implementation="triton"`: what is written for each kernel, what Triton makes of it, and how it is called. No GPU."""

import functools
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import lowered_modules
import lowering
import pytest
import triton_kernels
from jax import export
from triton_shapes import BROAD, MAIN, SHAPES

import pallas_attn
from pallas_attn._call import dispatch
from pallas_attn._lowering import cache, compiler, private, stages
from pallas_attn._lowering.launch import RESERVED_BYTES, given

ROOT = Path(__file__).parents[1]
DEVICES = {**lowering.DEVICES, 120: ("NVIDIA GeForce RTX 5090", 170)}
SMEM_LIMIT = {**lowering.SMEM_LIMIT, 120: 99 * 1024}
TABLE = Path(__file__).with_name("triton_kernels.json")


@functools.cache
def kernels_of(name: str, sm: int = 90) -> list[triton_kernels.Written]:
    lower, sizes, options = SHAPES[name]
    with triton_kernels.written() as kernels:
        lower(*sizes, **options, implementation="triton", device=DEVICES[sm])
    kernels = [kernel for kernel in kernels if kernel.name.endswith(MAIN.get(name, ""))]
    assert kernels
    return kernels


def facts(kernel: triton_kernels.Written, sm: int, triton: str) -> dict[str, int]:
    made = kernel.compile(triton, sm)
    return {
        "registers": made.registers,
        "stack": made.stack_bytes,
        "shared": made.shared_bytes,
        "wgmma": made.ptx.count("wgmma.mma_async"),
        "mma": len(re.findall(r"\bmma\.sync|tcgen05\.mma", made.ptx)),
    }


COMPILED = [(name, sm) for name in SHAPES for sm in DEVICES if name in BROAD or sm == 90]


@pytest.mark.once
@pytest.mark.parametrize(("name", "sm"), COMPILED)
def test_compiles_to_what_the_table_says(name, sm):
    """`python tests/test_triton_lowering.py` renews triton_kernels.json; a regression shows in its difference."""
    triton = lowering.NEWEST_TRITON
    expected = json.loads(TABLE.read_text()).get(triton, {})
    for kernel in kernels_of(name, sm):
        made = facts(kernel, sm, triton)
        assert made["shared"] <= SMEM_LIMIT[sm]
        # It says so where it has one product wait for the other.
        assert sm != 90 or not kernel.compile(triton, sm).remarks
        was = expected.get(f"{name} {kernel.name} sm_{sm}")
        if triton != "latest":
            assert was is not None, f"{name} {kernel.name} sm_{sm} is not in {TABLE.name}"
            assert {**made, "registers": 0} == {**was, "registers": 0}
            assert abs(made["registers"] - was["registers"]) <= 8


# What these have beside "flash" and "ragged", others have.
OLDER = [name for name in SHAPES if name not in ("bias", "documents", "prefix")]
# Bytes that a thread spills: Triton before 3.9 has no room for the latents' 512 columns of a program's rows.
SPILLED = {"latent prefill": 592}


@pytest.mark.once
@pytest.mark.parametrize("triton", lowering.TRITONS)
def test_values_of_bytes_are_not_read_by_bytes(triton):
    """`narrow.settled` holds conversions back by what Triton does with it, so with every Triton."""
    attend, *_ = kernels_of("paged")
    assert not re.findall(r"ld\.shared\S*\.[bsu]8\b", attend.compile(triton).ptx)


@pytest.mark.once
@pytest.mark.parametrize("triton", lowering.TRITON_ENDS[:-1])
@pytest.mark.parametrize("name", OLDER)
def test_older_tritons_compile_it(name, triton):
    for kernel in kernels_of(name):
        made = facts(kernel, 90, triton)
        assert made["shared"] <= lowering.SMEM_LIMIT[90]
        assert made["stack"] <= SPILLED.get(name, 256)
        hinted = "evict_last" in kernel.text and "combine" not in kernel.name
        assert not hinted or "L1::evict_last" in kernel.compile(triton).ptx


@pytest.mark.once
@pytest.mark.parametrize("triton", lowering.TRITONS)
def test_loops_over_tables_count_in_32_bits(triton):
    """LLVM would widen them for the address of an id, and all comparisons with them."""
    attend, *_ = kernels_of("sparse")
    assert not re.findall(r"\bsetp\.\w+\.[su]64", attend.compile(triton).ptx)


@pytest.mark.once
@pytest.mark.parametrize("triton", lowering.TRITON_ENDS)
def test_page_ids_of_short_tiles_are_copied_by_page(triton):
    """Triton 3.6 copied a token's id for each layout of the tokens, 26 times in the kernel."""
    with triton_kernels.written() as kernels:
        config = dict(block_kv=32, num_warps=4, num_stages=5, num_splits=0, target_programs=256)
        lowered_modules.paged(1, 512, 32, 8, 128, 16, implementation="triton", config=config)
    attend, *_ = kernels
    ptx = attend.compile(triton).ptx
    assert 0 < len(re.findall(r"cp\.async\.ca\S*.*, 0x4,", ptx)) <= 13
    # One for the maximum; that of the sum is behind the loop.
    loop = ptx[ptx.index("mma.sync") : ptx.rindex("mma.sync")]
    assert loop.count("shfl.sync") <= 8


@pytest.mark.once
@pytest.mark.parametrize("triton", lowering.TRITON_ENDS)
def test_threads_read_656_byte_latents_side_by_side(triton):
    """Where one thread reads 16 bytes behind the other's, those of a warp do not meet at the same banks; a group's 128
    elements in one thread would."""
    attend, *_ = kernels_of("sparse of 16 heads")
    reads = re.findall(r"ld\.shared\.v4\.b32\s[^\[]*\[(%r\d+)(?:\+(\d+))?\]", attend.compile(triton).ptx)
    assert len(reads) >= 8, "the tile's elements"
    places = {(register, int(offset or 0)) for register, offset in reads}
    assert not [place for place in places if (place[0], place[1] + 16) in places]


@pytest.mark.once
@pytest.mark.parametrize("triton", lowering.TRITON_ENDS)
def test_transposed_mla_over_scheduled_sequences_keeps_little_on_the_stack(triton):
    """With 600 bytes by Triton 3.6 some are stored and loaded in every tile, which then takes twice as long. What is
    left is of the loop around, over a part's sequences."""
    with triton_kernels.written() as kernels:
        lowered_modules.mla(128, 64, 32, 1, 1, 64, num_parts=132, implementation="triton")
    attend = kernels[0]
    assert attend.compile(triton).stack_bytes <= 400


@pytest.mark.once
def test_passes_that_are_left_out_change_nothing(monkeypatch):
    """But the time: Triton verifies a module behind each pass."""
    kernel = kernels_of("flash")[-1]

    def compiled():
        stages._backend.cache_clear()
        sizes = kernel.sm, kernel.num_warps, kernel.num_stages, compiler.ptx_version(kernel.sm)
        return stages.to_ptx(kernel.text, *sizes)

    shortened = compiled()
    monkeypatch.setattr(stages, "IDLE", set())
    monkeypatch.setattr(stages, "IDLE_BELOW_100", set())
    assert compiled() == shortened
    monkeypatch.setattr(stages, "UNWANTED", {"add_coalesce"})  # they are left out
    assert compiled()["ptx"] != shortened["ptx"]
    stages._backend.cache_clear()


@pytest.mark.parametrize("name", BROAD)
def test_writes_what_reads_alike_for_every_trace(name):
    """The cache lives by the text: two traces of a kernel must give the same."""
    first, second = (
        [kernel.text for kernel in lower(name)] for lower in (kernels_of, kernels_of.__wrapped__)
    )
    assert first == second
    assert all("loc(" not in text and str(ROOT) not in text for text in first)


@pytest.mark.parametrize("name", ["paged", "flash", "growing"])
def test_64_bit_types_change_no_kernel(name):
    """A user may have them on: indices of 64 bits took a third more registers, and "growing" could not be traced."""
    with jax.enable_x64(True):
        texts = [kernel.text for kernel in kernels_of.__wrapped__(name)]
    assert texts == [kernel.text for kernel in kernels_of(name)]


@pytest.mark.once
def test_what_a_gpu_runs_by_pallas_it_runs_by_triton_too(unpaired):
    """Of the tests that are collected: all, where the suite runs."""
    assert not unpaired


@pytest.mark.parametrize("most_shared", [99 * 1024, 163 * 1024, 227 * 1024])
@pytest.mark.parametrize("together", [1, 2, 4, 5, 8])
def test_shared_memory_holds_programs_apart(together, most_shared):
    """As many as are meant find room beside what each is charged with, and no more."""
    charged = given(1000, most_shared, together) + RESERVED_BYTES
    whole = most_shared + RESERVED_BYTES
    assert together * charged <= whole < (together + 1) * charged
    assert given(most_shared, most_shared, together) == most_shared
    assert given(1000, most_shared, 0) == 1000


def test_a_planned_call_leaves_no_room_for_more_programs():
    """By what is written into the call: 528 programs on 132 multiprocessors, four on each, of 38 KB."""
    lens = jax.ShapeDtypeStruct((16,), jnp.int32)
    pool = jax.ShapeDtypeStruct((16 * 512, 16, 8, 128), jnp.bfloat16)
    query, tables = (
        jax.ShapeDtypeStruct((16, 32, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((16, 512), jnp.int32),
    )
    with triton_kernels.written():
        text = lowering.lower_for_gpu(ATTEND, query, pool, pool, tables, lens).as_text()
    attend, merge = (int(size) for size in re.findall(r"shared_mem_bytes = (\d+)", text))
    assert attend > 45_000
    assert merge == 0


def write(pages: int, implementation="triton"):
    new = jax.ShapeDtypeStruct((4, 8, 128), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((pages, 16, 8, 128), jnp.int8)
    slots = jax.ShapeDtypeStruct((4,), jnp.int32)
    call = functools.partial(pallas_attn.write_kv, implementation=implementation)
    with triton_kernels.written() as kernels:
        lowered = lowering.lower_for_gpu(call, new, new, pool, pool, slots)
    return kernels, lowered.as_text()


def test_offsets_are_64_bits_wide_where_a_pool_needs_it():
    """Seen on an H200: int8 and e4m3 pools of 3 * 2**30 elements are written and read right."""
    page = 16 * 8 * 128
    for pages, wide in ((2**31 // page, False), (2**31 // page + 1, True)):
        (kernel,), _ = write(pages)
        stores = [line for line in kernel.text.splitlines() if "tt.addptr" in line and "i8" in line]
        assert len(stores) >= 2
        assert all(("i64" in line) == wide for line in stores)


def test_pools_are_updated_in_place_and_not_passed_as_scratch():
    """What is passed twice XLA would copy before it is overwritten."""
    _, text = write(100)
    call = next(line for line in text.splitlines() if private.PTX_CALL in line)
    operands = re.search(r"@__gpu\$xla\.gpu\.ptx\((.*?)\)", call)
    assert operands is not None
    names = operands[1].split(", ")
    assert names[0] != names[1]
    assert names.count(names[0]) == names.count(names[1]) == 1
    assert names[-1] == names[-2] != names[0]
    assert call.count("output_operand_alias<") == 2


ATTEND = functools.partial(pallas_attn.paged_attention, implementation="triton")


def test_vmap_is_a_larger_grid():
    """Pools stay one; what is mapped has its own part."""
    mapped = jax.vmap(jax.vmap(ATTEND, in_axes=(None,) * 4 + (0,)), in_axes=(None,) * 4 + (0,))
    with triton_kernels.written() as kernels:
        lowered = lowering.lower_for_gpu(mapped, *triton_kernels.arguments(2, 3))
    assert lowered.out_info.shape == (2, 3, 4, 8, 64)
    grids = re.findall(r"grid_x = (\d+)", lowered.as_text())
    with triton_kernels.written():
        single = re.findall(
            r"grid_x = (\d+)", lowering.lower_for_gpu(ATTEND, *triton_kernels.arguments()).as_text()
        )
    assert [int(n) for n in grids] == [6 * int(n) for n in single]
    assert "64x16x2x64xbf16" in lowered.as_text()
    assert "arith.remui" in kernels[0].text


def test_vmap_over_nothing_launches_nothing():
    """A grid without programs is none that a GPU takes."""
    call = jax.vmap(jax.vmap(ATTEND, in_axes=(None,) * 4 + (0,)), in_axes=(None,) * 4 + (0,))
    for lead in ((0, 3), (3, 0)):
        with triton_kernels.written():
            lowered = lowering.lower_for_gpu(call, *triton_kernels.arguments(*lead))
        assert lowered.out_info.shape == (*lead, 4, 8, 64)
        assert private.PTX_CALL not in lowered.as_text()


@pytest.mark.parametrize("platforms", [("cpu",), ("rocm",), ("cuda", "cpu")])
def test_other_platforms_are_refused_in_our_words(platforms):
    words = "pallas_attn_paged_attention: implementation 'triton' is for NVIDIA GPUs"
    with triton_kernels.written(), lowering.abstract_mesh(), pytest.raises(NotImplementedError, match=words):
        jax.jit(ATTEND).trace(*triton_kernels.arguments()).lower(lowering_platforms=platforms)


@pytest.mark.once
def test_exported_functions_hold_the_kernel():
    """As _lowering/README.md says: JAX wants the call vouched for."""
    vouched = export.DisabledSafetyCheck.custom_call(private.PTX_CALL)
    with triton_kernels.written() as kernels, lowering.abstract_mesh():
        exported = export.export(jax.jit(ATTEND), platforms=["cuda"], disabled_checks=[vouched])(
            *triton_kernels.arguments()
        )
        with pytest.raises(ValueError, match="no compatibility guarantees"):
            export.export(jax.jit(ATTEND), platforms=["cuda"])(*triton_kernels.arguments())
    text = export.deserialize(exported.serialize()).mlir_module()
    assert text.count(private.PTX_CALL) == len({kernel.name for kernel in kernels}) > 0


def test_has_no_gradients():
    def loss(query, *rest):
        return ATTEND(query, *rest).astype(jnp.float32).sum()

    with pytest.raises(NotImplementedError, match="has no gradients; implementation 'xla' has"):
        lowering.lower_for_gpu(jax.grad(loss), *triton_kernels.arguments())


@pytest.mark.slow
def test_without_pallas_triton_none_chooses_it_and_nothing_warns(tmp_path):
    program = """
import sys, warnings
for name in ("jax.experimental.pallas.triton", "jax._src.pallas.triton"):
    sys.modules[name] = None
warnings.simplefilter("error")
import lowering, triton_kernels, pallas_attn
from triton_shapes import SHAPES
with triton_kernels.written() as kernels, pallas_attn.record_implementations() as by:
    for lower, sizes, options in SHAPES.values():
        lower(*sizes, **options, implementation=None, device=lowering.H100)
assert set(by.values()) == {"triton"}, by
assert len(by) == 11, by
assert len({kernel.name for kernel in kernels}) == 22
assert "has no Pallas-Triton lowering" in pallas_attn.available_implementations()["write_kv"]["interpret"]
"""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    # The checkout that is tested, whichever is installed.
    first = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]\n"
    )
    nothing = str(tmp_path / "nothing")  # in the place of the CUDA kernels
    environment = os.environ | {"PYTHONPATH": path, cache.FOLDER: str(tmp_path)}
    environment |= {"PALLAS_ATTN_CUDA_LIBRARY": nothing}
    command = [sys.executable, "-c", first + program]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]


NARROWING = """module {
  tt.func public @narrowing(%arg0: !tt.ptr<f8E4M3FN>) {
    %0 = tt.make_range {end = 256 : i32, start = 0 : i32} : tensor<256xi32>
    %1 = arith.sitofp %0 : tensor<256xi32> to tensor<256xf32>
    %2 = tt.fp_to_fp %1, rounding = rtne : tensor<256xf32> -> tensor<256xf8E4M3FN>
    %3 = tt.splat %arg0 : !tt.ptr<f8E4M3FN> -> tensor<256x!tt.ptr<f8E4M3FN>>
    %4 = tt.addptr %3, %0 : tensor<256x!tt.ptr<f8E4M3FN>>, tensor<256xi32>
    tt.store %4, %2 : tensor<256x!tt.ptr<f8E4M3FN>>
    tt.return
  }
}
"""


def test_a_folder_called_triton_is_no_triton(tmp_path, monkeypatch):
    """As where its repository lies beside the user's program."""
    (tmp_path / "triton").mkdir()
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert compiler.installed.__wrapped__() is None


def test_a_stand_in_for_triton_is_none(monkeypatch):
    """Packages that go without it import one, so that their kernels' decorators are there."""
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    assert compiler.installed.__wrapped__() is None


# The oldest PTX that knows the architecture: with an older one Triton's process ends, a newer one wants newer drivers.
PTX = {80: "8.0", 89: "8.1", 90: "8.0", 100: "8.6", 103: "8.8", 110: "9.0", 120: "8.7", 121: "8.8"}


@pytest.mark.once
@pytest.mark.parametrize("sm", PTX)
def test_ptx_is_as_old_as_the_gpu_allows(sm):
    """The assembler takes it, too, and float8 where the GPU converts it."""
    options = dict(num_warps=4, num_stages=3, ptx_version=compiler.ptx_version(sm))
    text = triton_kernels.NOTHING if sm < 89 else NARROWING
    made = lowering.compile_text("a kernel", text, sm, lowering.NEWEST_TRITON, **options)
    suffix = "a" if sm >= 90 else ""
    assert f".version {PTX[sm]}\n.target sm_{sm}{suffix}" in made.ptx


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("3.5.1", "needs Triton 3.6 to 3.9, 3.5.1"),
        ("3.10.0", "needs Triton 3.6 to 3.9, 3.10.0"),
        ("main", "needs Triton 3.6 to 3.9, main"),
        (None, "not installed"),
    ],
)
def test_why_triton_cannot_serve(version, words, monkeypatch):
    monkeypatch.setattr(compiler, "installed", lambda: version)
    assert words in str(compiler.unavailable())
    assert "pip install 'triton>=3.6,<3.10'" in str(compiler.unavailable())


def test_where_triton_serves_no_folder_is_searched(monkeypatch):
    """Whoever calls an op outside jit would wait for that each time."""
    monkeypatch.setattr(compiler, "unavailable", lambda: None)
    monkeypatch.setattr(cache, "holds_any", lambda: pytest.fail("searched"))
    assert dispatch.installed["triton"]() is None


def test_hints_are_respelled_for_older_tritons():
    hint = " {cachePolicy = #tt.cache_policy<cache_modifier = none, eviction_policy = evict_first>} :"
    assert stages.respell("tt.load %0" + hint, (3, 9)) == "tt.load %0" + hint
    assert stages.respell("tt.load %0" + hint, (3, 8)) == "tt.load %0 evictionPolicy = evict_first :"


if __name__ == "__main__":
    triton = lowering.NEWEST_TRITON
    made = {
        f"{name} {kernel.name} sm_{sm}": facts(kernel, sm, triton)
        for name, sm in COMPILED
        for kernel in kernels_of(name, sm)
    }
    TABLE.write_text(json.dumps({triton: made}, indent=0, sort_keys=True).replace("{\n", "{ ") + "\n")
    print(TABLE.read_text())
