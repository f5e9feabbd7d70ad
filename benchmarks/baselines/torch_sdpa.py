"""torch's scaled_dot_product_attention over pages gathered beforehand: what torch gives without a kernel for pages."""

import importlib
from collections.abc import Callable
from typing import Any

import costs

import baselines

TITLE = "torch SDPA, pages gathered"
OPS = ("mla_decode", "paged_attention")


def available() -> str | None:
    return baselines.torch_on_gpu()


def supports(case: Any) -> str | None:
    return baselines.plain_only(case)


def build(case: Any, inputs: Any) -> dict[str, Callable[[int], Any]]:
    torch = importlib.import_module("torch")
    attend = torch.nn.functional.scaled_dot_product_attention
    width = inputs.tables[0].shape[1] * case.page_size
    query = inputs.query.transpose(1, 2)
    places = torch.arange(width, device=query.device)
    positions = inputs.lengths[:, None] - case.q_len + torch.arange(case.q_len, device=query.device)
    seen = (places <= positions[..., None])[:, None]
    tables = [table.long() for table in inputs.tables]

    def call(index: int) -> Any:
        rows = [
            cache[tables[index]].view(case.num_seqs, width, *cache.shape[2:]).transpose(1, 2)
            for cache in inputs.caches
        ]
        values = rows[-1] if len(rows) == 2 else rows[0][..., : costs.LATENT_DIM]
        scale = case.head_dim**-0.5
        return attend(query, rows[0], values, attn_mask=seen, scale=scale, enable_gqa=True).transpose(1, 2)

    return {"": call}
