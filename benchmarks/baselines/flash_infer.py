"""FlashInfer's MLA kernel for Hopper ("fa3"), package `flashinfer`."""

from collections.abc import Callable
from typing import Any

import torch
from mla_decode import DIM, LATENT, Inputs

WORKSPACE_BYTES = 128 << 20  # FlashInfer's recommendation


def prepare(package: Any, inputs: Inputs) -> Callable[[int], torch.Tensor]:
    batch, q_len, heads, _ = inputs.query.shape
    page_size, width = inputs.cache.shape[1], inputs.tables[0].shape[1]
    device = inputs.query.device

    pages = -(-inputs.lengths // page_size)
    used = torch.arange(width, device=device) < pages[:, None]
    indices = [table[used] for table in inputs.tables]  # of all requests, one after the other
    page_starts = torch.zeros(batch + 1, dtype=torch.int32)
    page_starts[1:] = pages.cpu().cumsum(0)
    query_starts = torch.arange(batch + 1, dtype=torch.int32) * q_len

    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.int8, device=device)
    wrapper = package.mla.BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
    wrapper.plan(
        query_starts,
        page_starts,
        indices[0],
        inputs.lengths,
        heads,
        LATENT,
        DIM - LATENT,
        page_size,
        True,  # causal
        DIM**-0.5,
        inputs.query.dtype,
        inputs.cache.dtype,
    )
    query = inputs.query.reshape(-1, heads, DIM)
    query_latent, query_rope = (part.contiguous() for part in query.split([LATENT, DIM - LATENT], -1))
    latents, ropes = inputs.cache[:, :, 0].split([LATENT, DIM - LATENT], -1)
    out = torch.empty_like(query_latent)

    def call(index: int) -> torch.Tensor:
        # One plan serves all tables, whose requests are as long; the wrapper has no public way to be told the next.
        wrapper._kv_indices_buf = indices[index]
        wrapper.run(query_latent, query_rope, latents, ropes, out=out)
        return out.view(batch, q_len, heads, LATENT)

    return call
