"""Paged decode attention in float64 torch."""

import math

import numpy as np
import torch


def paged_attention(inputs, *, layout: str, scale: float | None = None, rounding: torch.dtype | None = None):
    """(out [num_seqs, num_heads, head_dim], lse [num_seqs, num_heads]) as float64 numpy, from a `PagedInputs`.

    `rounding` rounds the weights and the output to a dtype, as a kernel in that dtype cannot avoid.
    """
    query = _tensor(inputs.query)
    keys, values = _tensor(inputs.key_cache), _tensor(inputs.value_cache)
    if layout == "HND":
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    num_seqs, num_heads, head_dim = query.shape
    page_size, num_kv_heads = keys.shape[1:3]
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    out = torch.zeros(query.shape, dtype=torch.float64)
    lse = torch.full((num_seqs, num_heads), -math.inf, dtype=torch.float64)
    for seq in range(num_seqs):
        length = int(inputs.seq_lens[seq])
        if length == 0:
            continue
        pages = torch.as_tensor(inputs.block_tables[seq, : math.ceil(length / page_size)].astype(np.int64))
        k, v = (pool[pages].flatten(0, 1)[:length] for pool in (keys, values))
        for head in range(num_heads):
            kv_head = head * num_kv_heads // num_heads
            logits = k[:, kv_head] @ query[seq, head] * scale
            peak = logits.max()
            weights = torch.exp(logits - peak)
            lse[seq, head] = peak + torch.log(weights.sum())
            total = weights.sum()
            if rounding is not None:
                weights = weights.to(rounding).double()
            out[seq, head] = weights @ v[:, kv_head] / total
    if rounding is not None:
        out = out.to(rounding).double()
    return out.numpy(), lse.numpy()


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.as_tensor(array.astype(np.float64))
