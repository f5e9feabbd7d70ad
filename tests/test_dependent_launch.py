"""What `paged_attention`'s kernel says and asks for early: who is launched before it ends, and the block tables."""

import jax
import jax.numpy as jnp
import lowering
import numpy as np
import pytest
import triton_kernels

import pallas_attn
from pallas_attn import PagedAttentionConfig
from pallas_attn._lowering import dependent_launch, private
from pallas_attn._tile import pages, triton

TOUCHED = "isVolatile = true"
struct = jax.ShapeDtypeStruct


def lowered(implementation: str, *, num_seqs: int = 4, columns: int = 64, device=lowering.H100, **options):
    query, pool = struct((num_seqs, 8, 128), jnp.bfloat16), struct((900, 16, 2, 128), jnp.bfloat16)
    lengths = struct((num_seqs, columns), jnp.int32), struct((num_seqs,), jnp.int32)

    def call(*arrays):
        return pallas_attn.paged_attention(*arrays, implementation=implementation, **options)

    return lowering.lower_for_gpu(call, query, pool, pool, *lengths, device=device)


def by_pallas(**options) -> dict[str, str]:
    """Triton IR of each kernel."""
    kernels = lowering.triton_kernels(lowered("pallas", **options))
    return {name: lowering.triton_text(bytecode) for name, bytecode, *_ in kernels}


def test_the_merge_is_launched_while_its_kernel_runs():
    kernels = by_pallas()
    assert set(kernels) == {"pallas_attn_paged_attention", "pallas_attn_paged_attention_combine"}
    for name, text in kernels.items():
        # What reads the merge's results is anyone's.
        first = not name.endswith("combine")
        assert (dependent_launch.INSTRUCTION in text) == first, name
        assert (TOUCHED in text) == first, name


def test_what_anyone_may_read_lets_nobody_start():
    (kernel,) = by_pallas(config=PagedAttentionConfig(16, 32, num_splits=1)).values()
    assert dependent_launch.INSTRUCTION not in kernel
    assert TOUCHED in kernel


def test_before_hopper_there_is_no_such_instruction():
    for name, text in by_pallas(device=lowering.DEVICES[80]).items():
        assert dependent_launch.INSTRUCTION not in text, name


def test_the_instruction_arrives_at_the_assembler():
    for kernel in lowering.compile_kernels(lowered("pallas"), 90, lowering.NEWEST_TRITON):
        first = not kernel.name.endswith("combine")
        assert kernel.ptx.count("griddepcontrol.launch_dependents") == first, kernel.name
        assert kernel.ptx.count("ld.volatile.global") == first, kernel.name


def test_without_the_private_name_nothing_is_early(monkeypatch):
    monkeypatch.setattr(private, "_pallas_rules", None)
    # A config of its own, so that it is traced anew.
    for name, text in by_pallas(config=PagedAttentionConfig(16, 64)).items():
        assert dependent_launch.INSTRUCTION not in text, name
        assert TOUCHED not in text, name


def test_by_triton_tables_are_touched():
    with triton_kernels.written() as found:
        lowered("triton")
    assert [(TOUCHED in kernel.text, dependent_launch.INSTRUCTION in kernel.text) for kernel in found] == [
        (True, False),
        (False, False),
    ]


class Tables:
    """Stands for a ref: what is asked of it is written down."""

    dtype = jnp.dtype("int32")

    def __init__(self, shape):
        self.shape, self.at = shape, self

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("shape", "programs"), [((1, 64), 144), ((3, 37), 5), ((64, 512), 2552), ((5, 1), 700), ((7, 1000), 32)]
)
def test_programs_together_ask_for_every_sector(monkeypatch, shape, programs):
    asked = np.zeros(shape, int)

    def touch(place, *, mask):
        row, column = (np.asarray(i)[np.asarray(mask)] for i in place)
        np.add.at(asked, (row, column), 1)

    monkeypatch.setattr(triton, "touch", touch)
    for program in range(programs):
        pages.touch(Tables(shape), np.int32(program), programs)
    flat, ids = asked.ravel(), pages.SECTOR_BYTES // 4
    assert all(one == 1 for one in flat[::ids])
    assert flat.sum() == len(flat[::ids])


def test_wide_tables_are_left_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(triton, "touch", lambda place, **_: asked.append(place))
    pages.touch(Tables((4096, 65536)), np.int32(0), 8192)
    assert len(asked) == 0
    # The same tables, which so many programs can ask for.
    pages.touch(Tables((4096, 65536)), np.int32(0), 1 << 20)
    assert len(asked) == 1
