"""Block-sparse attention in float64 torch: one sequence, one head and a whole mask over tokens at a time."""

import math

import numpy as np
import torch
from blocksparse_inputs import BlockSparseInputs, keys_and_values, visible

from pallas_attn.testing.blocksparse import BlockSparseCase


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


def gradients(case: BlockSparseCase, inputs: BlockSparseInputs, d_out: np.ndarray, d_lse: np.ndarray):
    """Of sum(out * d_out) + sum(lse * d_lse), where an lse of -inf counts as 0: {"query", "key", "value"} in float64 of
    the arrays' shapes, by torch's autograd. Keys in rows."""
    assert inputs.cu_k_lens is not None
    floats = {
        name: torch.as_tensor(np.nan_to_num(getattr(inputs, name).astype(np.float64))).requires_grad_()
        for name in ("query", "key", "value")
    }
    loss = torch.zeros((), dtype=torch.float64)
    for seq, (q_len, k_len) in enumerate(case.lens):
        token, first = int(inputs.cu_q_lens[seq]), int(inputs.cu_k_lens[seq])
        for i in range(max(q_len - k_len, 0), q_len):
            for head in range(case.num_heads):
                seen = torch.as_tensor(visible(case, head, k_len - q_len + i)).nonzero()[:, 0] + first
                if len(seen) == 0:
                    continue
                keys, values = (floats[name][seen, head // case.group] for name in ("key", "value"))
                logits = keys @ floats["query"][token + i, head] / math.sqrt(case.head_dim)
                if case.softcap is not None:
                    logits = case.softcap * torch.tanh(logits / case.softcap)
                out = torch.softmax(logits, 0) @ values
                loss = loss + out @ torch.as_tensor(d_out[token + i, head].astype(np.float64))
                loss = loss + torch.logsumexp(logits, 0) * float(d_lse[token + i, head])
    found = torch.autograd.grad(loss, list(floats.values()))
    return {name: gradient.numpy() for name, gradient in zip(floats, found, strict=True)}
