"""The model of shared memory and registers: what compilers make of drawn calls, and what follows from the sizes."""

import dataclasses
import functools
from typing import Any

import drawn_shapes
import jax
import jax.numpy as jnp
import lowering
import measured_budget
import pytest
import test_mla_lowering

import pallas_attn
from pallas_attn._call import budget
from pallas_attn._call.architecture import REGISTERS
from pallas_attn._call.device import Device
from pallas_attn._split import latent_problem
from pallas_attn.ops.mla_decode.config import MLADecodeConfig

struct = jax.ShapeDtypeStruct
H100 = Device("gpu", "NVIDIA H100 80GB HBM3", 132, 90)
A100, RTX = (dataclasses.replace(H100, compute_capability=capability) for capability in (80, 120))
TILE = budget.Tile(
    rows=128, tokens=128, held=(128,), walked=(128, 128), itemsize=2, num_warps=8, num_stages=3
)
# Each op for two architectures, of seeds without a meaning.
DRAWN = [
    (op, seed, sm)
    for seed, op in enumerate(drawn_shapes.OPS)
    for sm in (90, (80, 120)[seed % 2])
    if drawn_shapes.draw(op, seed).serves(sm)
]


@pytest.mark.once
@pytest.mark.parametrize(("op", "seed", "sm"), DRAWN)
def test_drawn_calls_fit(op, seed, sm):
    """`python tests/measured_budget.py` draws more of them."""
    drawn = drawn_shapes.draw(op, seed)
    for kernel in measured_budget.measured(drawn, sm):
        assert kernel.wrong is None, f"{kernel}\n{drawn}"


struct = jax.ShapeDtypeStruct


def prompts(dim: int, stored: str = "bfloat16", *, tree: bool = False) -> drawn_shapes.Drawn:
    tokens, num_seqs = 64, 3
    query, keys = (struct((tokens, heads, dim), jnp.bfloat16) for heads in (32, 2))
    pool, mask = struct((900, 1, 2, dim), stored), struct((tokens, 16), jnp.bool_) if tree else None
    lens = [struct(sizes, jnp.int32) for sizes in ((num_seqs, 4096), (num_seqs,), (num_seqs + 1,))]

    def call(mask, *arrays, implementation):
        return pallas_attn.prefix_prefill(*arrays, tree_mask=mask, implementation=implementation)

    return drawn_shapes.Drawn("prefix", 0, call, (mask, query, keys, keys, pool, pool, *lens), {})


def gradient_of_bias(dims: tuple[int, int]) -> drawn_shapes.Drawn:
    def call(bias, *arrays, implementation):
        def loss(bias):
            out: Any = pallas_attn.flash_attention(*arrays, bias=bias, implementation=implementation)
            return out.astype(jnp.float32).sum()

        return jax.grad(loss)(bias)

    sizes = ((8, dims[0]), (2, dims[0]), (2, dims[1]))
    arrays = [struct((2, 2048, *size), jnp.bfloat16) for size in sizes]
    return drawn_shapes.Drawn("flash", 0, call, (struct((1, 8, 2048, 2048), jnp.bfloat16), *arrays), {})


def decode(dim: int, dtype: str) -> drawn_shapes.Drawn:
    query, pool = struct((4, 8, dim), dtype), struct((900, 16, 2, dim), dtype)
    lens = struct((4, 512), jnp.int32), struct((4,), jnp.int32)
    return drawn_shapes.Drawn("paged", 0, pallas_attn.paged_attention, (query, pool, pool, *lens), {})


FORMERLY = {
    # Logits change their layout to meet a mask, through memory that buffers had all of.
    "mask of drafts": (prompts(120, tree=True), 90),
    # Beside a narrow cache new tokens are as wide as queries.
    "new tokens": (prompts(256, "float8_e4m3fn"), 90),
    # Neither side stays where it is, where a batch shares the bias: both take buffers.
    "gradient of a bias": (gradient_of_bias((128, 128)), 90),
    "gradient of a bias, wider values": (gradient_of_bias((96, 128)), 90),
    # The smallest tile had as many stages as any.
    "widest heads": (decode(512, "float32"), 120),
}


@pytest.mark.once
@pytest.mark.sweep(name=None)
@pytest.mark.parametrize("name", FORMERLY)
def test_what_did_not_fit(name):
    drawn, sm = FORMERLY[name]
    for kernel in measured_budget.measured(drawn, sm):
        assert kernel.wrong is None, str(kernel)


@pytest.mark.once
@pytest.mark.control
def test_what_is_forgotten_of_a_tile_is_caught(monkeypatch):
    """Negative control, in pages of one token: logits change their layout, and no bytes were left for that."""
    monkeypatch.setattr(budget.Tile, "exchanged_bytes", lambda tile, device: 0)
    jax.clear_caches()
    drawn, sm = FORMERLY["mask of drafts"]
    assert any(kernel.wrong for kernel in measured_budget.measured(drawn, sm))


def test_knows_what_compilers_make_of_it():
    """Figures of XLA's Triton and of pip's, which agreed."""
    assert TILE.shared_bytes(H100) == 229376
    assert TILE.fits(H100)
    assert not dataclasses.replace(TILE, exchanges_pairs=True).fits(H100)
    few = dataclasses.replace(TILE, rows=16, num_warps=4)
    assert few.shared_bytes(H100) == 139264
    # Ids that a loop loads leave keys every other stage.
    assert dataclasses.replace(few, looks_up=True).buffers(H100) == 1
    assert dataclasses.replace(few, looks_up=True, num_stages=5).buffers(H100) == 2


@pytest.mark.once
def test_a_single_stage_converts_in_registers():
    """Over bytes of MLA: figures of Triton, which has no room for as much in a second stage."""
    tile = latent_problem.needs(16, 128, 8, 1, fp8=True)
    assert tile.operand_bytes(H100) == 165888
    assert not dataclasses.replace(tile, num_stages=2).fits(H100)
    [kernel, *_] = lowering.compile_kernels(
        test_mla_lowering.lowered_call(
            *(1, 1, 128, jnp.bfloat16, False),
            cache_dtype=jnp.uint8,
            config=MLADecodeConfig(16, 128, num_splits=1, num_stages=1),
        ),
        90,
    )
    assert 165888 <= kernel.shared_bytes <= tile.shared_bytes(H100) + budget.OTHER_BYTES


@pytest.mark.parametrize("device", [A100, H100, RTX])
@pytest.mark.parametrize("stored", [1, 2])
def test_less_takes_less(device, stored):
    tile = dataclasses.replace(TILE, stored=stored)
    smaller = [
        dataclasses.replace(tile, rows=64),
        dataclasses.replace(tile, tokens=64),
        dataclasses.replace(tile, num_stages=2),
        dataclasses.replace(tile, held=(64,)),
    ]
    for one in smaller:
        assert one.shared_bytes(device) <= tile.shared_bytes(device)
        assert one.resident(device) >= tile.resident(device)


@pytest.mark.parametrize("device", [A100, H100, RTX])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("width", [16, 128, 256])
def test_what_is_fitted_fits(device, itemsize, width):
    tile = dataclasses.replace(TILE, itemsize=itemsize, held=(width, width), walked=(width, width))
    fitted = budget.fitted(tile, device)
    assert fitted.fits(device)
    assert budget.fitted(fitted, device) is fitted
    assert min(fitted.rows, fitted.tokens) >= 16


@pytest.mark.parametrize(
    ("capability", "kib"),
    [
        *((80, 163), (86, 99), (87, 163), (89, 99), (90, 227), (100, 227), (120, 99)),
        # Those that are not known have what the newest before them has, or the oldest that kernels run on.
        *((107, 227), (88, 163), (125, 99), (60, 163), (None, 227)),
    ],
)
def test_shared_memory_of_gpus(capability, kib):
    assert dataclasses.replace(H100, compute_capability=capability).architecture.shared_bytes == 1024 * kib


def test_programs_that_share_a_multiprocessor():
    small = functools.partial(dataclasses.replace, TILE, rows=16, num_warps=4, tokens=32)
    by_memory = small(num_stages=3).resident(H100)
    assert by_memory > small(num_stages=7).resident(H100) >= 1
    wide = small(num_stages=1, tokens=16)
    assert wide.resident(H100) <= REGISTERS // (wide.registers * wide.threads), "by registers"
    assert dataclasses.replace(TILE, num_stages=3).resident(H100) == 1
