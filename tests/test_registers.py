"""A limit on a thread's registers: it reaches both compilers, and who cannot have it gets tiles that need none."""

import dataclasses

import jax
import jax.numpy as jnp
import lowering
import pytest
import triton_kernels

import pallas_attn
from pallas_attn import BlockSparseConfig, SparseLayout
from pallas_attn._call.device import Device
from pallas_attn._lowering import cache, private, registers
from pallas_attn._tile import triton
from pallas_attn.ops.blocksparse_attention.config import PAIRED, TILES, heuristic

HELD = f"{registers.ATTRIBUTE} = 128 : i32"
struct = jax.ShapeDtypeStruct


def lowered(implementation: str, row_blocks: int = 4, **options):
    """Block-sparse prefill of 8192 tokens, of which a row sees `row_blocks` blocks of 128."""
    layout = SparseLayout(struct((32, 65), jnp.int32), struct((32, 64 * row_blocks), jnp.int32), 128, 128)
    keys, ends = struct((8192, 8, 128), jnp.bfloat16), struct((2,), jnp.int32)

    def call(q, k, v, layout, ends):
        return pallas_attn.blocksparse_attention(
            q, k, v, layout, cu_k_lens=ends, implementation=implementation, **options
        )

    return lowering.lower_for_gpu(call, struct((8192, 32, 128), jnp.bfloat16), keys, keys, layout, ends)


def by_pallas(**options) -> tuple[str, int]:
    """(Triton IR, stages) of the one kernel."""
    ((_, bytecode, _, stages),) = lowering.triton_kernels(lowered("pallas", **options))
    return lowering.triton_text(bytecode), stages


def by_triton(**options) -> triton_kernels.Written:
    with triton_kernels.written() as found:
        lowered("triton", **options)
    (kernel,) = found
    return kernel


def test_short_rows_are_limited_by_either_compiler():
    text, stages = by_pallas()
    assert HELD in text
    assert stages == 2
    kernel = by_triton()
    assert (kernel.max_registers, kernel.num_stages) == (128, 2)


def test_programs_that_share_read_no_key_early():
    """Own keys behind the look-up of the row, and queries, which nobody else reads, first out of the cache."""

    def loads(text: str) -> str:
        """What stands between the loop over own tiles, or for a single one the queries, and its branch."""
        text = text[text.index("tensor<128x128x!tt.ptr<bf16>>") :]
        return text[: text.index("scf.if")]

    text, _ = by_pallas()
    assert "evict_first" in text
    assert "tensor<64x128x!tt.ptr<bf16>>" not in loads(text)
    other, _ = by_pallas(row_blocks=32)
    assert "evict_first" not in other
    assert loads(other).count("tt.load") > loads(text).count("tt.load")


def test_others_are_not():
    assert registers.ATTRIBUTE not in by_pallas(row_blocks=32)[0]
    assert registers.ATTRIBUTE not in by_pallas(softcap=30.0)[0]
    assert by_triton(row_blocks=32).max_registers == 0


@pytest.mark.once
@pytest.mark.parametrize("version", lowering.TRITON_ENDS)
def test_two_programs_fit_a_multiprocessor(version):
    """By registers and shared memory. Rows of the output, kept through the walk, would be on the stack."""
    (by_xla,) = lowering.compile_kernels(lowered("pallas"), 90, version)
    ours = by_triton().compile(version)
    assert ours.stack_bytes == 0
    for kernel in (by_xla, ours):
        assert ".maxnreg 128" in kernel.ptx
        assert kernel.registers == 128
        assert kernel.stack_bytes <= 48
        assert 2 * (kernel.shared_bytes + 1024) <= 228 * 1024
    free = dict(PAIRED, max_registers=0)
    (free_by_xla,) = lowering.compile_kernels(
        lowered("pallas", config=BlockSparseConfig(**free)), 90, version
    )
    assert free_by_xla.registers > 128, "the limit is needed"


def test_a_limit_survives_vmap():
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] + triton.program_id(0)

    def call(x):
        return triton.kernel_call(
            body, x, name="limited", grid=(2,), out_shape=[struct(x.shape, x.dtype)], num_warps=4, num_stages=1,
            max_registers=64, lowering="pallas",
        )  # fmt: skip

    made = lowering.lower_for_gpu(jax.vmap(call), struct((3, 16), jnp.float32))
    ((_, bytecode, _, _),) = lowering.triton_kernels(made)
    assert f"{registers.ATTRIBUTE} = 64" in lowering.triton_text(bytecode)


def test_kernels_that_differ_by_their_limit_are_kept_apart():
    request = cache.Request("text", 90, 8, 2, 80)
    assert dataclasses.replace(request, max_registers=128).digest != request.digest


def test_without_the_private_name_tiles_need_no_limit(monkeypatch):
    assert private._found("jax._src.pallas.triton.lowering.no_such_name") is None
    monkeypatch.setattr(private, "_pallas_rules", None)
    text, stages = by_pallas()
    assert registers.ATTRIBUTE not in text
    assert stages == 3
    assert by_triton().max_registers == 128, "ours can still"
    with pytest.raises(ValueError, match=r"'config': expected max_registers 0, .* 'pallas' cannot limit"):
        by_pallas(config=BlockSparseConfig(**PAIRED))


SIZES = dict(head_dim=128, itemsize=2, block_size=128, q_block_size=128, row_blocks=4.0, streams=32)
HOPPER = Device("gpu", "", 132, 90)


def tile(**changes) -> dict[str, int]:
    about = dict(plain=True, limits_registers=True, device=HOPPER)
    config = dataclasses.asdict(heuristic(**{**SIZES, **about, **changes}))
    return {name: config[name] for name in TILES["prefill"]}


@pytest.mark.once
def test_the_heuristic_pairs_programs_where_that_was_measured():
    assert tile() == PAIRED
    assert tile(head_dim=96, block_size=64) == PAIRED
    elsewhere = [
        dict(plain=False), dict(limits_registers=False), dict(device=Device("gpu", "", 148, 100)),
        dict(device=Device("gpu", "", 108, 80)), dict(row_blocks=32.0), dict(head_dim=64), dict(head_dim=256),
        dict(itemsize=4), dict(q_block_size=64), dict(block_size=32),
    ]  # fmt: skip
    for change in elsewhere:
        chosen = tile(**change)
        assert chosen["max_registers"] == 0, change
        assert chosen != PAIRED | {"max_registers": 0}, change


@pytest.mark.once
def test_a_measured_tile_has_its_own_limit():
    assert tile(block_q=64, num_warps=4)["max_registers"] == 0
    assert tile(row_blocks=32.0, **PAIRED) == PAIRED
    assert tile(limits_registers=False, **PAIRED) == tile(limits_registers=False)
