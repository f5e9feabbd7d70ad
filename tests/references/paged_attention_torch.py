"""Paged decode attention in float64 torch: one sequence and one head at a time."""

import math

import numpy as np
import torch
from inputs import PagedInputs

from pallas_attn.testing.cases import DecodeCase
from references import remembered


@remembered
def paged_attention(
    case: DecodeCase, inputs: PagedInputs, *, scale: float | None = None, rounding: torch.dtype | None = None
):
    """(out, lse) as float64 numpy, in the shapes of the op, from the very bytes of `inputs`.

    `rounding` rounds the weights and the output to a dtype, as a kernel in that dtype cannot avoid.
    """
    query = _tensor(inputs.query).reshape(case.num_seqs, case.q_len, case.num_heads, case.head_dim)
    keys = _dequantised(inputs.key_cache, case, "key", inputs.extras.get("k_scale"))
    values = _dequantised(inputs.value_cache, case, "value", inputs.extras.get("v_scale"))
    scale = 1.0 / math.sqrt(case.head_dim) if scale is None else scale
    slopes, sinks = inputs.extras.get("alibi_slopes"), inputs.extras.get("sinks")
    out = torch.zeros(query.shape, dtype=torch.float64)
    lse = torch.full(query.shape[:-1], -math.inf, dtype=torch.float64)
    for seq in range(case.num_seqs):
        length = int(inputs.seq_lens[seq])
        if length == 0:
            continue
        pages = torch.as_tensor(
            inputs.block_tables[seq, : math.ceil(length / case.page_size)].astype(np.int64)
        )
        k, v = (pool[pages].flatten(0, 1)[:length] for pool in (keys, values))
        mask = torch.as_tensor(inputs.seen(case, seq))
        for head in range(case.num_heads):
            kv_head = head // case.group
            logits = query[seq, :, head] @ k[:, kv_head].T * scale  # [q_len, length]
            if case.softcap is not None:
                logits = case.softcap * torch.tanh(logits / case.softcap)
            if slopes is not None:
                query_position, position = (
                    length - case.q_len + torch.arange(case.q_len),
                    torch.arange(length),
                )
                if "query_positions" in inputs.extras:
                    query_position = torch.as_tensor(inputs.extras["query_positions"][seq])
                    position[max(length - case.q_len, 0) :] = query_position[max(case.q_len - length, 0) :]
                logits = logits + float(slopes[head]) * (position - query_position[:, None])
            logits = logits.masked_fill(~mask[:, head], -math.inf)
            if sinks is not None:  # a key with this logit and no value
                sink = torch.full((case.q_len, 1), float(sinks[head]), dtype=torch.float64)
                logits = torch.cat([logits, sink], dim=1)
            lse[seq, :, head] = torch.logsumexp(logits, 1)
            weights = torch.exp(logits - logits.amax(1, keepdim=True)).nan_to_num(0)  # nothing seen: all 0
            total = weights.sum(1, keepdim=True)
            if rounding is not None:
                weights = weights.to(rounding).double()
            out[seq, :, head] = weights[:, :length] @ v[:, kv_head] / total.where(total > 0, 1)
    if rounding is not None:
        out = out.to(rounding).double()
    return out.numpy().reshape(inputs.query.shape), lse.numpy().reshape(inputs.query.shape[:-1])


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.as_tensor(array.astype(np.float64))


def _dequantised(cache: np.ndarray, case: DecodeCase, which: str, scale: np.ndarray | None) -> torch.Tensor:
    """The pool as [num_pages, page_size, num_kv_heads, head_dim]."""
    pool = _tensor(cache)
    if case.layout == "HND":
        pool = pool.permute(0, 2, 1, 3)
    elif case.layout == "PACKED" and which == "key":
        pages, heads, groups, page_size, x = pool.shape
        pool = pool.permute(0, 3, 1, 2, 4).reshape(pages, page_size, heads, groups * x)
    elif case.layout == "PACKED":
        pool = pool.permute(0, 3, 1, 2)
    if scale is not None and case.scale_per_page:
        pool = pool * torch.as_tensor(scale.astype(np.float64))[:, None, :, None]
    elif scale is not None:
        pool = (
            pool * torch.as_tensor(np.broadcast_to(scale, (case.num_kv_heads,)).astype(np.float64))[:, None]
        )
    return pool
