"""Dense attention in float64 torch, one head at a time; gradients are torch's own."""

import math

import numpy as np
import torch
from flash_inputs import visible

from pallas_attn.testing.flash_attention import FlashCase

GRADIENTS = ("query", "key", "value", "sinks", "bias")


def flash_attention(
    case: FlashCase, data: dict[str, np.ndarray], *, rounding: torch.dtype | None = None
) -> dict[str, np.ndarray]:
    """{"out", "lse" and, as "d_query" and so on, gradients of sum(out * d_out) + sum(lse * d_lse)} in float64, in the
    shapes of the op. A log-sum-exp of -inf counts as 0 in that sum. "sink_terms" [batch, num_heads, q_len] are what
    "d_sinks" is the sum of: each row's own.

    `rounding` rounds weights and output to a dtype, as a kernel in that dtype cannot avoid.
    """
    floats = {name: _tensor(data[name]).requires_grad_() for name in GRADIENTS if name in data}
    by_head = {name: _heads_first(case, floats[name]) for name in ("query", "key", "value")}
    wanted = dict(floats)
    if "sinks" in floats:
        rows = (case.batch, case.num_heads, case.q_len)
        wanted["sinks_by_row"] = floats["sinks"][None, :, None].expand(rows)
    place = torch.as_tensor(visible(case))
    outs, lses = [], []
    for batch in range(case.batch):
        for head in range(case.num_heads):
            query = by_head["query"][batch, head]
            key, value = (by_head[name][batch, head // case.group] for name in ("key", "value"))
            logits = query @ key.T / math.sqrt(case.head_dim)
            if case.softcap is not None:
                logits = case.softcap * torch.tanh(logits / case.softcap)
            if "bias" in floats:
                logits = logits + _pair(floats["bias"], batch, head)
            seen = place
            if "mask" in data:
                seen = seen & _pair(torch.as_tensor(data["mask"]), batch, head)
            if "q_ids" in data:
                same = data["q_ids"][batch][:, None] == data["kv_ids"][batch][None, :]
                seen = seen & torch.as_tensor(same)
            logits = logits.masked_fill(~seen, -math.inf)
            if "sinks" in floats:  # a key with this logit and no value
                logits = torch.cat([logits, wanted["sinks_by_row"][batch, head][:, None]], dim=1)
            nothing = torch.isneginf(logits).all(1, keepdim=True)
            safe = logits.masked_fill(nothing, 0.0)
            lses.append(torch.logsumexp(safe, 1).masked_fill(nothing[:, 0], -math.inf))
            weights = torch.softmax(safe, 1).masked_fill(nothing, 0.0)[:, : case.kv_len]
            if rounding is not None:
                weights = weights.to(rounding).double()
            outs.append(weights @ value)
    shape = (case.batch, case.num_heads, case.q_len)
    out, lse = torch.stack(outs).reshape(*shape, -1), torch.stack(lses).reshape(shape)
    if case.layout == "BTNH":
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    loss = (out * _tensor(data["d_out"])).sum()
    loss = loss + (lse.masked_fill(torch.isneginf(lse), 0.0) * _tensor(data["d_lse"])).sum()
    gradients = torch.autograd.grad(loss, list(wanted.values()))
    if rounding is not None:
        out = out.to(rounding).double()
    results = {"out": out.detach(), "lse": lse.detach()}
    results |= {f"d_{name}": grad for name, grad in zip(wanted, gradients, strict=True)}
    return {name: result.numpy() for name, result in results.items()}


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.as_tensor(array.astype(np.float64))


def _heads_first(case: FlashCase, array: torch.Tensor) -> torch.Tensor:
    return array.transpose(1, 2) if case.layout == "BTNH" else array


def _pair(array: torch.Tensor, batch: int, head: int) -> torch.Tensor:
    return array[batch if len(array) > 1 else 0][head if array.shape[1] > 1 else 0]
