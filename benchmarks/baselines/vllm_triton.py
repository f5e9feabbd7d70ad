"""vLLM's Triton kernels: unified attention for paged decoding, its split decode kernel for MLA. Package `vllm`."""

import importlib
from collections.abc import Callable
from typing import Any

import costs

import baselines

TITLE = "vLLM's Triton"
OPS = ("mla_decode", "paged_attention", "ragged_paged_attention")
OPERATORS = "vllm.v1.attention.ops"
SEGMENTS = 16  # of a sequence, where few programs would run otherwise
PROGRAMS = 128
SPLIT_TOKENS, MOST_SPLITS = 512, 256


def available() -> str | None:
    modules = ("triton_unified_attention", "triton_decode_attention")
    return baselines.torch_on_gpu(*(f"{OPERATORS}.{module}" for module in modules))


def supports(case: Any) -> str | None:
    if case.op == "mla_decode" and case.q_len > 1:
        return "its MLA kernel takes one query token a sequence"
    return baselines.other_values(case) or baselines.plain_only(case, but=("sliding_window",))


def build(case: Any, inputs: Any) -> dict[str, Callable[[int], Any]]:
    return {"": (_mla if case.op == "mla_decode" else _paged)(case, inputs)}


def _paged(case: Any, inputs: Any) -> Callable[[int], Any]:
    torch = importlib.import_module("torch")
    attend = importlib.import_module(f"{OPERATORS}.triton_unified_attention").unified_attention
    query = inputs.query.reshape(-1, case.num_heads, case.head_dim)
    out = torch.empty_like(query)
    query_starts = baselines.query_starts(case, device=query.device)
    threshold = PROGRAMS // case.num_kv_heads
    segments = dict(dtype=torch.float32, device=query.device)
    sums = [torch.empty(threshold, case.num_heads, SEGMENTS, **segments) for _ in range(2)]
    outputs = torch.empty(threshold, case.num_heads, SEGMENTS, case.head_dim, **segments)

    def call(index: int) -> Any:
        attend(
            query,
            *inputs.caches,
            out,
            query_starts,
            max(baselines.q_lens(case)),
            inputs.lengths,
            max(case.seq_lens),
            case.head_dim**-0.5,
            True,  # causal
            baselines.window(case),
            inputs.tables[index],
            0,  # soft cap
            None,  # scales
            None,
            None,
            seq_threshold_3D=threshold,
            num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=outputs,
            softmax_segm_max=sums[0],
            softmax_segm_expsum=sums[1],
        )
        return out

    return call


def _mla(case: Any, inputs: Any) -> Callable[[int], Any]:
    torch = importlib.import_module("torch")
    attend = importlib.import_module(f"{OPERATORS}.triton_decode_attention").decode_attention_fwd
    (cache,) = inputs.caches
    query = inputs.query[:, 0].contiguous()
    splits = 1
    while splits < MOST_SPLITS and splits * SPLIT_TOKENS < max(case.seq_lens):
        splits *= 2
    options = dict(device=query.device)
    rows = query.shape[:2]
    out = torch.empty(*rows, costs.LATENT_DIM, dtype=query.dtype, **options)
    lse = torch.empty(*rows, dtype=query.dtype, **options)
    partial = torch.empty(*rows, splits, costs.LATENT_DIM + 1, dtype=torch.float32, **options)
    one = torch.ones((), **options)

    def call(index: int) -> Any:
        attend(
            query,
            cache,
            cache[..., : costs.LATENT_DIM],
            out,
            lse,
            inputs.tables[index],
            inputs.lengths,
            partial,
            splits,
            costs.MLA_DIM**-0.5,
            case.page_size,
            k_scale=one,
            v_scale=one,
            is_mla=True,
        )
        return out

    return call
