"""Ragged attention over pages in float64 torch: one sequence, one head and one query token at a time."""

import math

import numpy as np
import torch
from inputs import RaggedInputs

from pallas_attn.testing.cases import RaggedCase
from references import remembered
from references.paged_attention_torch import _dequantised, _tensor


@remembered
def ragged_paged_attention(
    case: RaggedCase, inputs: RaggedInputs, *, scale: float | None = None, rounding: torch.dtype | None = None
):
    """(out [num_tokens, num_heads, value_dim], lse [num_tokens, num_heads]) as float64 numpy, from the very bytes of
    `inputs`. `rounding` rounds the weights and the output to a dtype, as a kernel in that dtype cannot avoid."""
    query = _tensor(inputs.query)
    keys = _dequantised(inputs.key_cache, case, "key", inputs.extras.get("k_scale"))
    values = _dequantised(inputs.value_cache, case, "value", inputs.extras.get("v_scale"))
    scale = 1.0 / math.sqrt(case.head_dim) if scale is None else scale
    slopes, sinks = inputs.extras.get("alibi_slopes"), inputs.extras.get("sinks")
    out = torch.zeros((*query.shape[:2], values.shape[-1]), dtype=torch.float64)
    lse = torch.full(query.shape[:2], -math.inf, dtype=torch.float64)
    for seq in range(int(inputs.num_seqs)):
        length, first, end = (
            int(x) for x in (inputs.seq_lens[seq], inputs.cu_q_lens[seq], inputs.cu_q_lens[seq + 1])
        )
        if length == 0:
            continue
        pages = torch.as_tensor(
            inputs.block_tables[seq, : math.ceil(length / case.page_size)].astype(np.int64)
        )
        k, v = (pool[pages].flatten(0, 1)[:length] for pool in (keys, values))
        for token in range(first, end):
            at = length - (end - token)
            position = torch.arange(length)
            seen = position <= at if case.causal else position >= 0
            if case.tree and end - first <= case.max_tree:
                at, position, seen = _in_tree(inputs, token, first, end, length)
            if case.sliding_window is not None:
                seen = seen & (at - position < case.sliding_window)
            span = torch.nonzero(seen).flatten()
            for head in range(case.num_heads):
                kv_head = head // case.group
                logits = k[span, kv_head] @ query[token, head] * scale
                if case.softcap is not None:
                    logits = case.softcap * torch.tanh(logits / case.softcap)
                if slopes is not None:
                    logits = logits + float(slopes[head]) * (position[span] - at)
                if sinks is not None:  # a key with this logit and no value
                    logits = torch.cat([logits, torch.tensor([float(sinks[head])], dtype=torch.float64)])
                if len(logits) == 0:
                    continue
                lse[token, head] = torch.logsumexp(logits, 0)
                weights = torch.exp(logits - logits.max())
                total = weights.sum()
                if rounding is not None:
                    weights = weights.to(rounding).double()
                out[token, head] = weights[: len(span)] @ v[span, kv_head] / total
    if rounding is not None:
        out = out.to(rounding).double()
    return out.numpy(), lse.numpy()


def _in_tree(inputs: RaggedInputs, token: int, first: int, end: int, length: int):
    """(position of a draft, of its sequence's tokens, which of them it sees)."""
    slots = range(length - (end - first), length)
    position, seen = torch.arange(length), torch.ones(length, dtype=torch.bool)
    own = length - (end - token)
    for row, slot in zip(range(first, end), slots, strict=True):
        if slot >= 0:
            seen[slot] = bool(inputs.extras["tree_mask"][token, row - first])
            if "query_positions" in inputs.extras:
                position[slot] = int(inputs.extras["query_positions"][row])
    if own < 0:
        return own, position, torch.zeros(length, dtype=torch.bool)
    return int(position[own]), position, seen
