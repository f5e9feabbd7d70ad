"""Functions exported with sizes left open: plain jnp serves any, kernels say that they need sizes."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax import export

import pallas_attn
from pallas_attn import nn

F32, I32 = jnp.float32, jnp.int32
PAGES = 12


@pytest.fixture(autouse=True)
def as_users_have_it():
    """Without the checks of types that jaxtyping adds in tests: a symbolic size is no int."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


class Exported(NamedTuple):
    """A call, and the shapes of its arguments, of b sequences or n tokens."""

    function: Callable[..., Any]
    shapes: dict[str, str]
    options: Mapping[str, Any] = MappingProxyType({})


def values(name: str, shape: tuple[int, ...], tokens: int) -> jax.Array:
    rng = np.random.default_rng(len(name))
    match name:
        case "block_tables":
            return jnp.asarray(rng.integers(0, PAGES, shape), I32)
        case "seq_lens":
            return jnp.asarray(rng.integers(9, 16, shape), I32)
        case "cu_q_lens" | "cu_k_lens":
            return jnp.asarray(np.linspace(0, tokens, shape[0]), I32)
        case "slot_mapping":
            return jnp.asarray(rng.permutation(4 * PAGES)[: shape[0]], I32)
        case "segment_ids":
            return jnp.asarray(np.sort(rng.integers(0, 3, shape), axis=1), I32)
        case "source_pages":
            return jnp.arange(shape[0], dtype=I32)
        case "target_pages":
            return jnp.arange(6, 6 + shape[0], dtype=I32)
        case "indices" | "query_seq_lengths":
            return jnp.asarray(rng.integers(0, 6, shape), I32)
        case "positions":
            return jnp.broadcast_to(jnp.arange(shape[1], dtype=I32), shape)
        case "mask":
            return jnp.asarray(rng.random(shape) > 0.3)
    return jnp.asarray(rng.standard_normal(shape), F32)


POOLS = dict.fromkeys(("key_cache", "value_cache"), f"{PAGES}, 4, 2, 16")
LATENTS = {"latent_cache": f"{PAGES}, 4, 1, 576"}
TABLES = {"block_tables": "b, 4", "seq_lens": "b"}
RAGGED = {"cu_q_lens": "b + 1"}
NEW = dict.fromkeys(("key", "value"), "n, 2, 16")
DENSE = {"query": "b, n, 4, 16", "key": "b, n, 2, 16", "value": "b, n, 2, 16"}
PREFILL = {
    "query": "n, 2, 192", **LATENTS, **TABLES, **RAGGED, "key_up": "2, 128, 512", "value_up": "2, 128, 512",
}  # fmt: skip


def layout() -> pallas_attn.SparseLayout:
    return pallas_attn.SparseLayout(jnp.array([[0, 1, 3]], I32), jnp.array([[0, 0, 1]], I32), 16, 16)


def blocksparse(**arrays):
    if "cu_q_lens" in arrays:
        arrays["cu_k_lens"] = arrays["cu_q_lens"]
    return pallas_attn.blocksparse_attention(**arrays, layout=layout())


def gradients(function, **options):
    def of(**arrays):
        others = {name: arrays.pop(name) for name in list(arrays) if arrays[name].dtype != F32}
        return jax.grad(lambda arrays: jnp.sum(jnp.sin(function(**arrays, **others, **options))))(arrays)

    return of


def scheduled(query, latent_cache, block_tables, seq_lens):
    schedule = pallas_attn.mla_schedule(seq_lens, num_heads=4, q_len=2, num_parts=6)
    return pallas_attn.mla_decode(query, latent_cache, block_tables, seq_lens, schedule=schedule)


def bytes_and_back(latents):
    return pallas_attn.dequantize_latents(pallas_attn.quantize_latents(latents))


def module(key, value, query, block_tables, positions, *, dtype):
    cache = pallas_attn.PagedKVCache.create(
        num_layers=1, num_pages=PAGES, page_size=4, num_kv_heads=2, head_dim=16, block_tables=block_tables,
        dtype=dtype, scale_per_page=dtype == "int8",
    )  # fmt: skip
    out, cache = nn.PagedAttention()(query, key, value, cache, 0, positions)
    return out, cache.seq_lens


NN = dict(DENSE, block_tables="b, 4", positions="b, n")
SCALES = {"k_scale": "12, 2", "v_scale": "12, 2"}
CASES = {
    "paged": Exported(pallas_attn.paged_attention, {"query": "b, 2, 4, 16", **POOLS, **TABLES}),
    "ragged": Exported(
        pallas_attn.ragged_paged_attention, {"query": "n, 4, 16", **POOLS, **TABLES, **RAGGED}
    ),
    "prefix": Exported(pallas_attn.prefix_prefill, {"query": "n, 4, 16", **NEW, **POOLS, **TABLES, **RAGGED}),
    "mla": Exported(
        pallas_attn.mla_decode, {"query": "b, 2, 4, 576", **LATENTS, **TABLES}, dict(causal=True)
    ),
    "mla, scheduled": Exported(scheduled, {"query": "b, 2, 4, 576", **LATENTS, **TABLES}),
    **{
        f"mla_prefill, {form}": Exported(pallas_attn.mla_prefill, PREFILL, dict(form=form))
        for form in (None, "absorbed", "projected")
    },
    "sparse": Exported(
        pallas_attn.sparse_mla_decode, {"query": "b, 2, 4, 576", **LATENTS, "indices": "b, 2, 8"}
    ),
    "flash": Exported(pallas_attn.flash_attention, DENSE, dict(causal=True, return_lse=True)),
    "flash, batch": Exported(
        pallas_attn.flash_attention, {name: shape.replace("n", "7") for name, shape in DENSE.items()}
    ),
    "flash, packed": Exported(
        pallas_attn.flash_attention,
        {**{name: shape.replace("b", "1") for name, shape in DENSE.items()}, **RAGGED},
    ),
    "flash, mask": Exported(
        pallas_attn.flash_attention, {**DENSE, "bias": "1, 4, n, n", "mask": "b, 1, n, n"}
    ),
    "flash, gradients": Exported(gradients(pallas_attn.flash_attention), {**DENSE, "segment_ids": "b, n"}),
    "jax.nn": Exported(pallas_attn.dot_product_attention, {**DENSE, "query_seq_lengths": "b"}),
    "blocksparse": Exported(blocksparse, {"query": "n, 4, 16", **NEW, **RAGGED}),
    "blocksparse, gradients": Exported(gradients(blocksparse), {"query": "n, 4, 16", **NEW, **RAGGED}),
    "blocksparse, decode": Exported(
        lambda key_cache, value_cache, **arrays: blocksparse(key=key_cache, value=value_cache, **arrays),
        {"query": "b, 4, 16", **POOLS, **TABLES},
    ),
    "write_kv": Exported(pallas_attn.write_kv, {**NEW, **POOLS, "slot_mapping": "n"}),
    "write_latents": Exported(
        pallas_attn.write_latents, {"latents": "n, 576", **LATENTS, "slot_mapping": "n"}
    ),
    "quantize_latents": Exported(bytes_and_back, {"latents": "n, 576"}),
    "page_scales": Exported(
        pallas_attn.page_scales, {**NEW, **SCALES, "slot_mapping": "n"}, dict(page_size=4, dtype=jnp.int8)
    ),
    "merge_states": Exported(
        pallas_attn.merge_states,
        {"out_a": "n, 4, 16", "lse_a": "n, 4", "out_b": "n, 4, 16", "lse_b": "n, 4"},
    ),
    "copy_pages": Exported(
        pallas_attn.copy_pages, {"cache": f"{PAGES}, 4", "source_pages": "b", "target_pages": "b"}
    ),
    **{f"module, {dtype}": Exported(module, NN, dict(dtype=dtype)) for dtype in ("float32", "int8")},
}


def exported(case: Exported, **more) -> export.Exported:
    scope = export.SymbolicScope()
    arguments = {
        name: jax.ShapeDtypeStruct(
            export.symbolic_shape(shape, scope=scope), values(name, (1, 1, 1, 1), 1).dtype
        )
        for name, shape in case.shapes.items()
    }
    return export.export(jax.jit(functools.partial(case.function, **case.options, **more)))(**arguments)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sweep(name=lambda name: [name.partition(",")[:1]])
def test_any_size_is_served(name):
    """Exported, serialised, and called with two sizes: what the call by itself gives."""
    case = CASES[name]
    again = export.deserialize(exported(case).serialize())
    for sizes in ({"b": 2, "n": 12}, {"b": 3, "n": 9}):
        arrays = {
            which: values(which, tuple(eval(size, dict(sizes)) for size in shape.split(",")), sizes["n"])
            for which, shape in case.shapes.items()
        }
        expected = jax.jit(functools.partial(case.function, **case.options))(**arrays)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-4),
            again.call(**arrays),
            expected,
        )


KERNELS = {
    "paged": "query",
    "ragged": "query",
    "prefix": "query",
    "mla": "query",
    "mla_prefill, None": "query",
    "sparse": "query",
    "flash": "query",
    "write_kv": "key",
    "write_latents": "latents",
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_need_sizes(name):
    message = (
        rf"implementation 'interpret' cannot serve this call: argument '{KERNELS[name]}' has the symbolic dimension "
        r"[bn] in \[[bn], .*export with implementation='xla', or with concrete sizes"
    )
    with pytest.raises(ValueError, match=message):
        exported(CASES[name], implementation="interpret")


def test_block_sparse_kernels_need_sizes():
    def call(**arrays):
        return pallas_attn.blocksparse_attention(
            **arrays, cu_k_lens=arrays["cu_q_lens"], layout=layout(), implementation="interpret"
        )

    with pytest.raises(
        ValueError, match=r"blocksparse_attention: .* 'query' has the symbolic dimension n in"
    ):
        exported(CASES["blocksparse"]._replace(function=call))
