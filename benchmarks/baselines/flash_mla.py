"""FlashMLA's dense decode kernel, package `flash_mla`."""

import importlib
from collections.abc import Callable
from typing import Any

import costs

import baselines

TITLE = "FlashMLA"
OPS = ("mla_decode",)


def available() -> str | None:
    return baselines.torch_on_gpu("flash_mla")


def supports(case: Any) -> str | None:
    return None if case.page_size == 64 else f"has pages of 64 tokens, not {case.page_size}"


def build(case: Any, inputs: Any) -> dict[str, Callable[[int], Any]]:
    package = importlib.import_module("flash_mla")
    (cache,) = inputs.caches
    # Up to 2025 two arrays; since then an object, which the first call fills, and None, and the arguments go unread.
    rows = case.q_len * case.num_heads // case.num_kv_heads
    metadata, num_splits = package.get_mla_metadata(inputs.lengths, rows, case.num_kv_heads)

    def call(index: int) -> Any:
        out, _ = package.flash_mla_with_kvcache(
            inputs.query,
            cache,
            inputs.tables[index],
            inputs.lengths,
            costs.LATENT_DIM,
            metadata,
            num_splits,
            costs.MLA_DIM**-0.5,
            causal=True,
        )
        return out

    return {"": call}
