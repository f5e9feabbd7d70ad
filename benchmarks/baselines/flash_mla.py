"""FlashMLA, package `flash_mla`: dense decode over bf16, sparse decode over its fp8 format, sparse prefill.

Its sparse kernels have 64 or 128 heads: fewer are padded with heads of zeros, as engines do. They also decode over
fp8 latents densely, for which it has no kernel of its own on Hopper: all tokens are named.
"""

import importlib
from collections.abc import Callable
from typing import Any

import costs

import baselines

TITLE = "FlashMLA"
OPS = ("mla_decode", "sparse_mla_decode", "sparse_mla_prefill")
HEADS = (64, 128)
IDS = {"mla_decode": 64, "sparse_mla_decode": 64, "sparse_mla_prefill": 128}  # counts of ids are multiples


def available() -> str | None:
    return baselines.torch_on_gpu("flash_mla")


def supports(case: Any) -> str | None:
    fp8 = bool(case.cache_dtype)
    if case.op == "mla_decode" and not fp8:
        return None if case.page_size == 64 else f"has pages of 64 tokens, not {case.page_size}"
    if fp8 == (case.op == "sparse_mla_prefill"):
        return "decodes sparsely over fp8 latents alone" if not fp8 else "prefills over bf16 latents alone"
    if case.num_heads > max(HEADS) or case.num_kv_heads > 1:
        return f"has up to {max(HEADS)} heads, and one KV head"
    if case.op != "mla_decode" and case.topk % IDS[case.op]:
        return f"names a multiple of {IDS[case.op]} tokens, not {case.topk}"
    return None


def build(case: Any, inputs: Any) -> dict[str, Callable[[int], Any]]:
    package = importlib.import_module("flash_mla")
    if case.op == "sparse_mla_prefill":
        return {"": _prefill(package, case, inputs)}
    if case.op == "sparse_mla_decode":
        return {"": _sparse(package, case, inputs, inputs.tables)}
    if case.cache_dtype:
        ids = [_all_tokens(case, inputs, table) for table in inputs.tables]
        return {"its sparse kernel, all tokens": _sparse(package, case, inputs, ids)}
    return {"": _dense(package, case, inputs)}


def _dense(package: Any, case: Any, inputs: Any) -> Callable[[int], Any]:
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

    return call


def _sparse(package: Any, case: Any, inputs: Any, ids: Any) -> Callable[[int], Any]:
    """Of ids [num_seqs, q_len, topk] for each table: page * page_size + offset, -1 for none."""
    (cache,), query = inputs.caches, _padded(case, inputs.query)
    metadata, _ = package.get_mla_metadata()

    def call(index: int) -> Any:
        out, _ = package.flash_mla_with_kvcache(
            query,
            cache,
            None,
            None,
            costs.LATENT_DIM,
            metadata,
            None,
            costs.MLA_DIM**-0.5,
            is_fp8_kvcache=True,
            indices=ids[index],
        )
        return out[:, :, : case.num_heads]

    return call


def _prefill(package: Any, case: Any, inputs: Any) -> Callable[[int], Any]:
    (cache,), query = inputs.caches, _padded(case, inputs.query)
    latents = cache.reshape(-1, 1, cache.shape[-1])

    def call(index: int) -> Any:
        ids = inputs.tables[index][0][:, None]
        out, _, _ = package.flash_mla_sparse_fwd(
            query[0], latents, ids, costs.MLA_DIM**-0.5, costs.LATENT_DIM
        )
        return out[None, :, : case.num_heads]

    return call


def _padded(case: Any, query: Any) -> Any:
    functional = importlib.import_module("torch").nn.functional
    heads = next(heads for heads in HEADS if heads >= case.num_heads)
    return functional.pad(query, (0, 0, 0, heads - case.num_heads)).contiguous()


def _all_tokens(case: Any, inputs: Any, table: Any) -> Any:
    """[num_seqs, q_len, topk]: what each query token sees in the causal order."""
    torch = importlib.import_module("torch")
    multiple = IDS["mla_decode"]
    position = torch.arange(-(-max(case.seq_lens) // multiple) * multiple, device=table.device)
    column = (position // case.page_size).clamp(max=table.shape[1] - 1)
    slots = table[:, column] * case.page_size + position % case.page_size
    ahead = torch.arange(case.q_len, device=table.device) - (case.q_len - 1)
    seen = position < inputs.lengths[:, None, None] + ahead[:, None]
    return torch.where(seen, slots[:, None], -1).to(torch.int32)
