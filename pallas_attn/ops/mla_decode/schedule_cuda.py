"""The schedule of MLA decode on Hopper: one small CUDA kernel of csrc/mla/schedule, called through XLA's FFI."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import ffi, symbolic
from pallas_attn._call.device import current_device

MOST_SEQS = 4096
# Measured beside jnp (EXPERIMENTS.md of csrc/mla): about the same at 400, twice as slow at 1024.
FASTER_UP_TO = 256
METADATA_SIZE = 8


def serves(num_seqs: int) -> bool:
    """Whether the kernel makes the schedules of `num_seqs` lengths on the device a call is traced for: where it can,
    and is faster than jnp."""
    known = not symbolic.is_open(num_seqs)
    return known and num_seqs <= FASTER_UP_TO and current_device().runs_hopper_code and ffi.is_available()[0]


def mla_schedule_cuda(
    seq_lens: jax.Array, num_parts: int, overhead_blocks: int | None, rows: int
) -> tuple[jax.Array, jax.Array]:
    """[num_parts, 8] and [num_seqs + 1] int32, described in `MLASchedule`: bit for bit what `mla_schedule` gives.

    Args:
        seq_lens: [num_seqs] int32, 1 to 4096 of them.
        num_parts: parts of equal work, 1 to 4096.
        overhead_blocks: what starting on a sequence costs, in blocks of 64 tokens, 1 to 1024; None for what suits the
            lengths.
        rows: query rows of a KV head, on which that depends.

    vmap calls it once for each of the batch, one after the other.
    """
    ffi.register()
    call = jax.ffi.ffi_call(
        "pallas_attn_mla_schedule_sm90",
        (
            jax.ShapeDtypeStruct((num_parts, METADATA_SIZE), jnp.int32),
            jax.ShapeDtypeStruct((seq_lens.shape[0] + 1,), jnp.int32),
        ),
        vmap_method="sequential",
    )
    metadata, num_splits = call(
        jnp.asarray(seq_lens), overhead_blocks=np.int64(overhead_blocks or 0), rows=np.int64(rows)
    )
    return metadata, num_splits
