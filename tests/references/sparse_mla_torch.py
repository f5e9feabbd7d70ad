"""Sparse MLA in float64 torch: one query token and one head at a time, over the list of rows that ids lead to."""

import math

import numpy as np
import torch


def sparse_mla(query, rows, ids, *, scale=None, sinks=None, rounding=None):
    """(out [tokens, heads, 512], max_logits, lse [tokens, heads]) float64 of queries [tokens, heads, 576].

    rows: float64 [num_rows, 576]. ids: for each token the list of rows that it attends to; None gives NaN.
    rounding: of weights and output, to a dtype.
    """
    query, rows = torch.as_tensor(np.asarray(query, np.float64)), torch.as_tensor(rows)
    tokens, heads, dim = query.shape
    scale = dim**-0.5 if scale is None else scale
    out = torch.zeros(tokens, heads, 512, dtype=torch.float64)
    top, lse = (torch.full((tokens, heads), -math.inf, dtype=torch.float64) for _ in range(2))
    for token, listed in enumerate(ids):
        if listed is None:
            out[token], top[token], lse[token] = math.nan, math.nan, math.nan
        if not listed:
            continue
        keys = rows[listed]
        for head in range(heads):
            logits = keys @ query[token, head] * scale
            top[token, head] = logits.max()
            weights = torch.exp(logits - logits.max())
            total = weights.sum()
            lse[token, head] = logits.max() + torch.log(total)
            if rounding is not None:
                weights = weights.to(rounding).double()
            out[token, head] = weights @ keys[:, :512] / total
            if rounding is not None:
                out[token, head] = out[token, head].to(rounding).double()
            if sinks is not None:
                out[token, head] /= 1 + torch.exp(float(sinks[head]) - lse[token, head])
    if rounding is not None:
        out = out.to(rounding).double()
    return out.numpy(), top.numpy(), lse.numpy()
