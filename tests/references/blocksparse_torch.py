"""Block-sparse attention in float64 torch: one sequence, one head and a whole mask over tokens at a time."""

import math

import numpy as np
import torch

from pallas_attn.testing.blocksparse import BlockSparseCase, BlockSparseInputs, keys_and_values, visible


def blocksparse_attention(
    case: BlockSparseCase,
    inputs: BlockSparseInputs,
    *,
    dense: bool = False,
    rounding: torch.dtype | None = None,
):
    """(out [num_tokens, num_heads, head_dim], lse [num_tokens, num_heads]) as float64 numpy.

    `dense` forgets the pattern. `rounding` rounds the weights and the output, as a kernel in that dtype cannot avoid.
    """
    out = torch.zeros(inputs.query.shape, dtype=torch.float64)
    lse = torch.full(inputs.query.shape[:2], -math.inf, dtype=torch.float64)
    for seq, (q_len, k_len) in enumerate(case.lens):
        keys, values = (torch.as_tensor(x) for x in keys_and_values(case, inputs, seq))
        token = int(inputs.cu_q_lens[seq])
        before = k_len - q_len
        for head in range(case.num_heads):
            mask = torch.zeros(q_len, k_len, dtype=torch.bool)
            for i in range(max(-before, 0), q_len):
                row = np.ones(before + i + 1, bool) if dense else visible(case, head, before + i)
                mask[i, : len(row)] = torch.as_tensor(row)
            query = torch.as_tensor(inputs.query[token : token + q_len, head].astype(np.float64))
            logits = query @ keys[:, head // case.group].T / math.sqrt(case.head_dim)
            if case.softcap is not None:
                logits = case.softcap * torch.tanh(logits / case.softcap)
            logits = logits.masked_fill(~mask, -math.inf)
            lse[token : token + q_len, head] = torch.logsumexp(logits, 1)
            weights = torch.exp(logits - logits.amax(1, keepdim=True)).nan_to_num(0) if k_len else logits
            total = weights.sum(1, keepdim=True)
            if rounding is not None:
                weights = weights.to(rounding).double()
            sums = weights @ values[:, head // case.group]
            out[token : token + q_len, head] = sums / total.where(total > 0, 1)
    if rounding is not None:
        out = out.to(rounding).double()
    return out.numpy(), lse.numpy()
