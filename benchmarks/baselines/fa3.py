"""FlashAttention-3 as vLLM ships and calls it: paged, with its scheduler's metadata made beforehand.

From package `vllm`, or from its library `_vllm_fa3_C*.so` alone, in a folder of BENCH_PEERS.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import costs

import baselines

TITLE = "FA3 (vLLM)"
OPS = ("mla_decode", "paged_attention", "ragged_paged_attention")
LIBRARY = "_vllm_fa3_C"
# Its own choice; and for small batches an upper bound, which vLLM sets under CUDA graphs.
SPLITS, MORE_SPLITS, FEW_SEQS = 0, 32, 16


def available() -> str | None:
    if reason := baselines.torch_on_gpu():
        return reason
    try:
        _operators()
    except Exception as error:
        return f"cannot be loaded: {type(error).__name__}: {baselines.first_line(error)}"
    return None


def supports(case: Any) -> str | None:
    return baselines.plain_only(case)


@functools.cache
def _operators() -> Any:
    torch = importlib.import_module("torch")
    found = [path for folder in baselines.folders() for path in sorted(folder.glob(f"{LIBRARY}*.so"))]
    if found:
        torch.ops.load_library(str(found[0]))
    else:
        importlib.import_module(f"vllm.vllm_flash_attn.{LIBRARY}")
    return getattr(torch.ops, LIBRARY)


def build(case: Any, inputs: Any) -> dict[str, Callable[[int], Any]]:
    choices = {"": SPLITS}
    if case.num_seqs <= FEW_SEQS:
        choices[f"up to {MORE_SPLITS} splits"] = MORE_SPLITS
    return {variant: _call(case, inputs, splits) for variant, splits in choices.items()}


def _call(case: Any, inputs: Any, splits: int) -> Callable[[int], Any]:
    operators = _operators()
    query = inputs.query.reshape(-1, case.num_heads, case.head_dim)
    latent_query = None
    if case.op == "mla_decode":
        # "qv": a second part of the query, which meets the values' columns as keys.
        (cache,) = inputs.caches
        values, keys = cache.split([costs.LATENT_DIM, costs.ROPE_DIM], -1)
        latent_query, query = (
            part.contiguous() for part in query.split([costs.LATENT_DIM, costs.ROPE_DIM], -1)
        )
    else:
        keys, values = inputs.caches
    longest = max(case.seq_lens)
    query_starts, most_queries = (
        baselines.query_starts(case, device=query.device),
        max(baselines.q_lens(case)),
    )
    no_window = (-1, -1)
    metadata = operators.get_scheduler_metadata(
        case.num_seqs,
        most_queries,
        longest,
        case.num_heads,
        case.num_kv_heads,
        keys.shape[-1],
        values.shape[-1],
        query.dtype,
        inputs.lengths,
        query_starts,
        None,  # cu_seqlens_k
        None,  # cu_seqlens_k_new
        None,  # seqused_q
        None,  # leftpad_k
        case.page_size,
        0,  # new keys
        True,  # causal
        *no_window,
        False,  # soft cap
        splits,
        None,  # pack_gqa: its choice
        0,  # multiprocessors left to others
    )
    unused = dict(before=(None,) * 3, after=(None,) * 8)

    def call(index: int) -> Any:
        results = operators.fwd(
            query,
            keys,
            values,
            None,  # new keys
            None,  # new values
            latent_query,
            None,  # out: a new one
            query_starts,
            *unused["before"],  # cu_seqlens_k, cu_seqlens_k_new, seqused_q
            inputs.lengths,
            most_queries,
            longest,
            inputs.tables[index],
            *unused["after"],  # batch index, left padding, rotary (3), scales of 8-bit inputs (3)
            case.head_dim**-0.5,
            True,  # causal
            *no_window,
            0.0,  # soft cap
            True,  # rotary interleaved
            metadata,
            splits,
            None,  # pack_gqa
            0,
            None,  # sinks
            1,  # context parallelism: world size, rank, lengths
            0,
            None,
        )
        return results[0]

    return call
