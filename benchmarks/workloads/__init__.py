"""What can be measured: one file an op, each with its cells, inputs, reference, costs and ways to call ours.

A new op is a new file with a `Workload` and a line in `WORKLOADS`; run.py, the table and the plots need no change. Ops
over a paged cache share `decode.py`.
"""

from collections.abc import Callable
from typing import Any

from workloads import (
    blocksparse_attention,
    flash_attention,
    mla_decode,
    mla_step,
    paged_attention,
    ragged_attention,
    sparse_mla,
)
from workloads.base import Workload

WORKLOADS: dict[str, Callable[[Any, bool], Workload]] = {
    "paged_attention": paged_attention.PagedAttention,
    "ragged_paged_attention": ragged_attention.RaggedAttention,
    "mla_decode": mla_decode.MLADecode,
    "mla_step": mla_step.MLAStep,
    "flash_attention": flash_attention.FlashAttention,
    "flash_attention_gradients": flash_attention.FlashGradients,
    "blocksparse_attention": blocksparse_attention.BlockSparse,
    "blocksparse_attention_gradients": blocksparse_attention.BlockSparseGradients,
    "sparse_mla_decode": sparse_mla.SparseMLADecode,
    "sparse_mla_prefill": sparse_mla.SparseMLAPrefill,
}
