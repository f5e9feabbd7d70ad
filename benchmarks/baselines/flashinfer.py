"""FlashInfer: for MLA and ragged queries its Hopper and its mma.sync kernels, for paged decoding tensor cores and CUDA
cores."""

import importlib
from collections.abc import Callable
from typing import Any

import costs

import baselines

TITLE = "FlashInfer"
OPS = ("mla_decode", "paged_attention", "ragged_paged_attention")
WORKSPACE_BYTES = 512 << 20


def available() -> str | None:
    return baselines.torch_on_gpu("flashinfer")


def supports(case: Any) -> str | None:
    if case.op == "paged_attention" and case.q_len > 1:
        return "its decode wrapper takes one query token a sequence"
    return baselines.other_values(case) or baselines.plain_only(case, but=("sliding_window",))


def build(case: Any, inputs: Any) -> dict[str, Callable[[int], Any]]:
    package = importlib.import_module("flashinfer")
    plan = _Plan(case, inputs)
    make: Callable[..., Callable[[int], Any]]
    if case.op == "paged_attention":
        make, kinds = _paged, {"tensor cores": True, "CUDA cores": False}
    else:
        make = _mla if case.op == "mla_decode" else _ragged
        kinds = {"fa3": "fa3", "fa2": "fa2"}
    calls, problem = {}, None
    for variant, kind in kinds.items():
        try:
            calls[variant] = make(package, kind, case, inputs, plan)
        except Exception as error:  # not every kernel has every head size and group, or was compiled for it
            problem = error
    if problem and not calls:
        raise problem
    return calls


class _Plan:
    """Tables as FlashInfer has them: the page ids of all sequences in a row, and where each sequence's begin."""

    def __init__(self, case: Any, inputs: Any):
        torch = importlib.import_module("torch")
        pages = -(-inputs.lengths // case.page_size)
        used = torch.arange(inputs.tables[0].shape[1], device=pages.device) < pages[:, None]
        self.indices = [table[used] for table in inputs.tables]
        self.starts = torch.zeros(case.num_seqs + 1, dtype=torch.int32)
        self.starts[1:] = pages.cpu().cumsum(0)
        self.last_page_lengths = (inputs.lengths - (pages - 1) * case.page_size).cpu()
        self.query_starts = baselines.query_starts(case)
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=pages.device)


def _mla(package: Any, kind: str, case: Any, inputs: Any, plan: _Plan) -> Callable[[int], Any]:
    torch = importlib.import_module("torch")
    latent, rope = costs.LATENT_DIM, costs.ROPE_DIM
    wrapper = package.mla.BatchMLAPagedAttentionWrapper(plan.workspace, backend=kind)
    wrapper.plan(
        plan.query_starts,
        plan.starts,
        plan.indices[0],
        inputs.lengths,
        case.num_heads,
        latent,
        rope,
        case.page_size,
        True,  # causal
        costs.MLA_DIM**-0.5,
        inputs.query.dtype,
        inputs.caches[0].dtype,
    )
    query = inputs.query.reshape(-1, case.num_heads, costs.MLA_DIM)
    queries = [part.contiguous() for part in query.split([latent, rope], -1)]
    keys = inputs.caches[0][:, :, 0].split([latent, rope], -1)
    out = torch.empty_like(queries[0])

    def call(index: int) -> Any:
        # One plan serves all tables, whose sequences are as long; no public way leads to the next table.
        wrapper._kv_indices_buf = plan.indices[index]
        wrapper.run(*queries, *keys, out=out)
        return out

    return call


def _paged(package: Any, tensor_cores: bool, case: Any, inputs: Any, plan: _Plan) -> Callable[[int], Any]:
    torch = importlib.import_module("torch")
    wrapper = package.BatchDecodeWithPagedKVCacheWrapper(plan.workspace, "NHD", use_tensor_cores=tensor_cores)
    wrapper.plan(
        plan.starts,
        plan.indices[0],
        plan.last_page_lengths,
        case.num_heads,
        case.num_kv_heads,
        case.head_dim,
        case.page_size,
        window_left=baselines.window(case)[0],
        q_data_type=inputs.query.dtype,
        kv_data_type=inputs.caches[0].dtype,
        sm_scale=case.head_dim**-0.5,
    )
    query = inputs.query[:, 0].contiguous()
    out = torch.empty_like(query)

    def call(index: int) -> Any:
        wrapper._paged_kv_indices_buf = plan.indices[index]
        wrapper.run(query, inputs.caches, out=out)
        return out

    return call


def _ragged(package: Any, kind: str, case: Any, inputs: Any, plan: _Plan) -> Callable[[int], Any]:
    torch = importlib.import_module("torch")
    wrapper = package.BatchPrefillWithPagedKVCacheWrapper(plan.workspace, "NHD", backend=kind)
    wrapper.plan(
        plan.query_starts,
        plan.starts,
        plan.indices[0],
        plan.last_page_lengths,
        case.num_heads,
        case.num_kv_heads,
        case.head_dim,
        case.page_size,
        causal=True,
        window_left=baselines.window(case)[0],
        sm_scale=case.head_dim**-0.5,
        q_data_type=inputs.query.dtype,
        kv_data_type=inputs.caches[0].dtype,
    )
    out = torch.empty_like(inputs.query)

    def call(index: int) -> Any:
        wrapper._paged_kv_indices_buf = plan.indices[index]
        wrapper.run(inputs.query, inputs.caches, out=out)
        return out

    return call
