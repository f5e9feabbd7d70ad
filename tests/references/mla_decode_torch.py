"""MLA decode in float64 torch, sequence by sequence and head by head."""

import math

import numpy as np
import torch

from references import remembered


@remembered
def mla_decode(inputs, *, causal: bool, scale: float | None = None, rounding: torch.dtype | None = None):
    """(out [num_seqs, q_len, num_heads, 512], lse [num_seqs, q_len, num_heads]) as float64 numpy, from `LatentInputs`.

    `rounding` rounds the weights and the output to a dtype, as a kernel in that dtype cannot avoid.
    """
    query, cache = (torch.as_tensor(x.astype(np.float64)) for x in (inputs.query, inputs.latent_cache))
    num_seqs, q_len, num_heads, head_dim = query.shape
    page_size, num_kv_heads = cache.shape[1:3]
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    out = torch.zeros((num_seqs, q_len, num_heads, 512), dtype=torch.float64)
    lse = torch.full((num_seqs, q_len, num_heads), -math.inf, dtype=torch.float64)
    for seq in range(num_seqs):
        length = int(inputs.seq_lens[seq])
        pages = inputs.block_tables[seq, : math.ceil(length / page_size)].astype(np.int64)
        tokens = cache[torch.as_tensor(pages)].flatten(0, 1)[:length]
        for i in range(q_len):
            seen = length - (q_len - 1 - i) if causal else length
            if seen <= 0:
                continue
            for head in range(num_heads):
                keys = tokens[:seen, head * num_kv_heads // num_heads]
                logits = keys @ query[seq, i, head] * scale
                weights = torch.exp(logits - logits.max())
                total = weights.sum()
                lse[seq, i, head] = logits.max() + torch.log(total)
                if rounding is not None:
                    weights = weights.to(rounding).double()
                out[seq, i, head] = weights @ keys[:, :512] / total
    if rounding is not None:
        out = out.to(rounding).double()
    return out.numpy(), lse.numpy()
