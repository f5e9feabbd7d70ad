"""The kernels of `flash_attention` lower for GPUs that are not there, and compile into what they should."""

import functools
import re

import jax
import jax.numpy as jnp
import lowering
import pytest
import triton_kernels

from pallas_attn import flash_attention, mods
from pallas_attn.testing.flash_attention import FlashCase

CAUSAL = FlashCase(4096, 4096, 16, 4, 128, "bfloat16", causal=True)
CASES = [
    CAUSAL,
    FlashCase(4096, 4096, 8, 8, 64, "float16", layout="BNTH"),
    FlashCase(1000, 3000, 4, 2, 80, "bfloat16", causal=True, sliding_window=500, q_offset=2000),
    FlashCase(2048, 2048, 4, 4, 192, "bfloat16", value_dim=128, causal=True),
    FlashCase(2048, 2048, 2, 1, 256, "bfloat16", causal=True),
    FlashCase(1024, 1024, 2, 2, 64, "float32", causal=True),
    FlashCase(1024, 1024, 4, 2, 64, "bfloat16", causal=True, segments="packed", softcap=30.0, sinks=True,
              bias="ht", mask="b"),
]  # fmt: skip


def compiled(case: FlashCase, sm: int, triton: str = lowering.USUAL_TRITON) -> dict[str, lowering.Compiled]:
    """{"", "_dq", ...: kernel} of a call and all of its gradients."""
    dtype, value_dim = jnp.dtype(case.dtype), case.value_dim or case.head_dim

    def tokens(count: int, heads: int, dim: int) -> jax.ShapeDtypeStruct:
        order = (count, heads) if case.layout == "BTNH" else (heads, count)
        return jax.ShapeDtypeStruct((case.batch, *order, dim), dtype)

    floats = {
        "query": tokens(case.q_len, case.num_heads, case.head_dim),
        "key": tokens(case.kv_len, case.num_kv_heads, case.head_dim),
        "value": tokens(case.kv_len, case.num_kv_heads, value_dim),
    }
    if case.sinks:
        floats["sinks"] = jax.ShapeDtypeStruct((case.num_heads,), jnp.float32)
    if case.bias:
        floats["bias"] = jax.ShapeDtypeStruct((1, case.num_heads, case.q_len, 1), jnp.float32)
    mask = jnp.ones((case.batch, 1, 1, case.kv_len), bool) if case.mask else None
    ids = jnp.zeros((case.batch, case.q_len), jnp.int32) if case.segments else None

    def loss(floats):
        return flash_attention(**floats, mask=mask, segment_ids=ids, **case.options).astype(jnp.float32).sum()

    lowered = lowering.lower_for_gpu(jax.grad(loss), floats, device=lowering.DEVICES[sm])
    kernels = lowering.compile_kernels(lowered, sm, triton)
    return {kernel.name.removeprefix("pallas_attn_flash_attention"): kernel for kernel in kernels}


@pytest.mark.parametrize(
    ("case", "sm"),
    # The first is compiled for sm_90 below; for others by "triton" (test_triton_lowering.py), of the same bodies.
    [*((case, 90) for case in CASES[2:]), (CASES[1], 80)],
    ids=lambda value: getattr(value, "id", str(value)),
)
@pytest.mark.once
def test_compiles(case, sm):
    kernels = compiled(case, sm)
    assert kernels.keys() == {"", "_dq", "_dkv"} | ({"_dbias"} if case.bias else set())
    for name, kernel in kernels.items():
        assert kernel.shared_bytes <= lowering.SMEM_LIMIT[sm], name
        assert ("mma" in kernel.ptx) == (case.dtype != "float32"), f"{name}: the tensor cores are not used"


@pytest.mark.parametrize("triton", lowering.TRITON_ENDS)
def test_the_fast_case_is_pipelined_and_asynchronous(triton):
    """On Hopper: warpgroup products, copies ahead of them, weights from registers, and next to nothing spilled."""
    for name, kernel in compiled(CAUSAL, 90, triton).items():
        # A loop without masks and one with: each has a wait before its softmax and one for its sums at the end.
        assert kernel.shared_bytes <= lowering.SMEM_LIMIT[90], name
        assert kernel.ptx.count("wgmma.mma_async") >= 24, name
        assert "mma.sync" not in kernel.ptx, name
        # The forward kernel's loops, with 32 weights a thread each, spend three instructions on a weight.
        assert name or all(kernel.ptx.count(f"{op}.rn.ftz.f32 t,") == 64 for op in ("sub", "mul"))
        assert kernel.ptx.count("cp.async.cg") >= 12, name
        # dkv, two programs of one warpgroup, keeps 376: it takes 14 % less on an H200 than a tile of two warpgroups,
        # which keeps 144. A row's maximum is apart from the rest of its log-sum-exp, so that weights of large logits
        # are right.
        most = 376 if name == "_dkv" else 0
        assert kernel.stack_bytes <= most, f"{name} keeps {kernel.stack_bytes} bytes on the stack"


MODS = {
    "documents": lambda ids, slopes, table: dict(mask_mod=mods.documents(ids)),
    "alibi": lambda ids, slopes, table: dict(score_mod=mods.alibi(slopes), causal=True),
    "table": lambda ids, slopes, table: dict(
        score_mod=mods.distance_table(table, -4095), mask_mod=mods.causal()
    ),
}


@pytest.mark.parametrize("implementation", ["pallas", "triton"])
@pytest.mark.parametrize("name", MODS)
def test_functions_of_the_callers_are_part_of_the_kernels(name, implementation):
    """Forward is as asynchronous as without them and keeps nothing on the stack; captured arrays' gradients have
    kernels in the form that they are read in."""

    def loss(query, key, value, slopes, table, ids):
        options = MODS[name](ids, slopes, table) | dict(implementation=implementation)
        return flash_attention(query, key, value, **options).astype(jnp.float32).sum()

    tokens = jax.ShapeDtypeStruct((1, 4096, 16, 128), jnp.bfloat16)
    slopes, table = (jax.ShapeDtypeStruct((16, *size), jnp.float32) for size in ((), (8191,)))
    ids = jax.ShapeDtypeStruct((4096,), jnp.int32)
    lowered = lowering.lower_for_gpu(jax.grad(loss, range(5)), tokens, tokens, tokens, slopes, table, ids)
    if implementation == "triton":
        return
    kernels = {kernel.name: kernel for kernel in lowering.compile_kernels(lowered, 90)}
    own = {"documents": set(), "alibi": {"_dmod_queries"}, "table": {"_dmod_distances"}}[name]
    assert {key.removeprefix("pallas_attn_flash_attention") for key in kernels} == {"", "_dq", "_dkv"} | own
    forward = kernels["pallas_attn_flash_attention"]
    assert forward.stack_bytes == 0
    assert forward.ptx.count("wgmma.mma_async") == 24
    # Of a table half as many threads copy as many keys: its tiles are smaller.
    assert forward.ptx.count("cp.async.cg") == (96 if name == "table" else 48)
    # 16 bytes beside the neighbouring thread's, though a thread may store 16 bytes of what is kept.
    copied = re.findall(r"async_copy_global_to_local.*contiguity = (\d+)", forward.ttgir)
    assert "8" in copied
    assert "16" not in copied
    # Three buffers of keys and values, whatever is read of captured arrays.
    assert kernels["pallas_attn_flash_attention_dq"].shared_bytes > 160_000
    for kernel in kernels.values():
        assert kernel.shared_bytes <= lowering.SMEM_LIMIT[90], kernel.name


def test_lists_are_looked_up_ahead():
    """Where a block mask's list ends and its first run come before tokens, and the partial blocks' first run before the
    full ones are walked over."""

    def loss(query, ids):
        out = flash_attention(query, query, query, mask_mod=mods.documents(ids), implementation="pallas")
        return out.astype(jnp.float32).sum()

    tokens = jax.ShapeDtypeStruct((1, 4096, 16, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((4096,), jnp.int32)
    kernels = lowering.triton_kernels(lowering.lower_for_gpu(jax.grad(loss), tokens, ids))
    assert len(kernels) == 3
    for name, code, *_ in kernels:
        before = lowering.triton_text(code).split("scf.while")[0]
        loads = ["tensor" in kind for kind in re.findall(r"tt\.load .* : (\S+)", before)]
        assert loads[:5] == [False] * 4 + [True], name
        assert loads[-2:] == [False] * 2, name
        assert not any(re.findall(r"scf\.(?:for|if)", before)), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_read_a_table_by_distance_themselves(dtype):
    """Not by way of shared memory, an element at a time, nor by that of other threads; and by both lowerings."""

    def call(implementation, query, table):
        options = MODS["table"](None, None, table) | dict(implementation=implementation)
        return flash_attention(query, query, query, **options)

    arrays = jax.ShapeDtypeStruct((1, 4096, 16, 128), jnp.bfloat16), jax.ShapeDtypeStruct((16, 8191), dtype)
    with triton_kernels.written() as written:
        lowering.lower_for_gpu(functools.partial(call, "triton"), *arrays)
    lowered = lowering.lower_for_gpu(functools.partial(call, "pallas"), *arrays)
    line = f"ld.global.b{8 * jnp.dtype(dtype).itemsize} "
    kernels = lowering.compile_kernels(lowered, 90)
    kernels += [one.compile(lowering.USUAL_TRITON) for one in written]
    assert len(kernels) == 2
    for kernel in kernels:
        # Two loops, with 32 scores a thread in each, at 18 distances; a line that Triton writes has braces.
        assert 2 * 18 <= len(re.findall(rf"^\s*{line}%\w+,", kernel.ptx, re.MULTILINE)) <= 2 * 32
        assert "cp.async.ca" not in kernel.ptx
        assert kernel.stack_bytes == 0


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_no_operand_is_copied(layout):
    """Layouts are read as they are, and no array of queries x keys is made."""

    def tokens(heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (2, 512, heads, 128) if layout == "BTNH" else (2, heads, 512, 128), jnp.bfloat16
        )

    call = functools.partial(flash_attention, layout=layout, causal=True)
    text = lowering.lower_for_gpu(call, tokens(8), tokens(2), tokens(2)).as_text()
    assert "transpose" not in text
    assert "512x512" not in text
