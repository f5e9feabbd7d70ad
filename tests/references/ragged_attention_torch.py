"""Ragged attention over pages in float64 torch: one sequence, one head and one query token at a time."""

import math

import numpy as np
import torch

from pallas_attn.testing.cases import RaggedCase
from pallas_attn.testing.inputs import RaggedInputs
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
            low = 0 if case.sliding_window is None else max(at - case.sliding_window + 1, 0)
            high = min(at + 1, length) if case.causal else length
            span = torch.arange(low, max(high, low))
            for head in range(case.num_heads):
                kv_head = head // case.group
                logits = k[span, kv_head] @ query[token, head] * scale
                if case.softcap is not None:
                    logits = case.softcap * torch.tanh(logits / case.softcap)
                if slopes is not None:
                    logits = logits + float(slopes[head]) * (span - at)
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
