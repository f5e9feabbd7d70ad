"""FlashAttention-3 as vLLM ships and calls it: with its scheduler's metadata made beforehand where keys lie in pages.

From package `vllm`, or from its library `_vllm_fa3_C*.so` alone, in a folder of BENCH_PEERS.
"""

import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any

import costs

import baselines

TITLE = "FA3 (vLLM)"
OPS = ("mla_decode", "paged_attention", "ragged_paged_attention", "flash_attention")
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
    if case.op == "flash_attention" and case.layout != "BTNH":
        return "is set up for BTNH here"
    return baselines.plain_only(case, but=("sliding_window", "documents"))  # sequences to it


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
    if case.op == "flash_attention":
        return {"": _dense(case, inputs)}
    choices = {"": SPLITS}
    if case.num_seqs <= FEW_SEQS:
        choices[f"up to {MORE_SPLITS} splits"] = MORE_SPLITS
    return {variant: _call(case, inputs, splits) for variant, splits in choices.items()}


def _dense(case: Any, inputs: Any) -> Callable[[int], Any]:
    """Rows of the batch, or documents, end to end: what it is given for prompts."""
    torch = importlib.import_module("torch")
    sides = [case.documents or (length,) for length in (case.q_len, case.kv_len)]
    starts = [
        torch.tensor(
            [0, *itertools.accumulate(side * case.batch)],
            dtype=torch.int32,
            device=inputs.tables[0][0].device,
        )
        for side in sides
    ]

    def call(index: int) -> Any:
        query, keys, values = inputs.tables[index]
        out = _attend(
            *(x.flatten(0, 1) for x in (query, keys, values)),
            query_starts=starts[0],
            key_starts=starts[1],
            longest=tuple(map(max, sides)),
            scale=case.head_dim**-0.5,
            window=baselines.window(case),
            causal=case.causal,
        )
        return out.view(*query.shape[:-1], values.shape[-1])

    return call


def _attend(
    query: Any,
    keys: Any,
    values: Any,
    *,
    query_starts: Any,
    longest: tuple[int, int],
    scale: float,
    window: tuple[int, int],
    causal: bool = True,
    latent_query: Any = None,
    key_starts: Any = None,
    lengths: Any = None,
    table: Any = None,
    metadata: Any = None,
    splits: int = SPLITS,
) -> Any:
    """Keys lie in rows and have `key_starts`, or in pages and have `lengths` and a `table`."""
    before = (None, None)  # cu_seqlens_k_new, seqused_q
    after = (None,) * 8  # batch index, left padding, rotary (3), scales of 8-bit inputs (3)
    results = _operators().fwd(
        query,
        keys,
        values,
        None,  # new keys
        None,  # new values
        latent_query,
        None,  # out: a new one
        query_starts,
        key_starts,
        *before,
        lengths,
        *longest,
        table,
        *after,
        scale,
        causal,
        *window,
        0.0,  # soft cap
        True,  # rotary interleaved
        metadata,
        splits,
        None,  # pack_gqa: its choice
        0,  # multiprocessors left to others
        None,  # sinks
        1,  # context parallelism: world size, rank, lengths
        0,
        None,
    )
    return results[0]


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
        *baselines.window(case),
        False,  # soft cap
        splits,
        None,  # pack_gqa: its choice
        0,  # multiprocessors left to others
    )

    def call(index: int) -> Any:
        return _attend(
            query,
            keys,
            values,
            latent_query=latent_query,
            query_starts=query_starts,
            longest=(most_queries, longest),
            lengths=inputs.lengths,
            table=inputs.tables[index],
            scale=case.head_dim**-0.5,
            window=baselines.window(case),
            metadata=metadata,
            splits=splits,
        )

    return call
