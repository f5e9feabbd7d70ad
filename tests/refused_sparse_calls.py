"""Calls of test_refusals.py about attention that reads chosen tokens, and about fp8 latents."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from refusals import ARRAY, COUNT, DTYPE, FLAG, INSTANCE, LAYER, NAME, NUMBER, SOFTCAP, Kind, ones, zeros
from refused_values import I32, TABLES, TILES, Call, flash_mla, latent_attention

import pallas_attn
from pallas_attn import nn

IDS = zeros((2, 1, 6), I32)
SPARSE = {
    **dict.fromkeys(("topk_length", "sinks"), ARRAY.or_none()),
    "scale": NUMBER.or_none(),
    "implementation": NAME.or_none(),
}


def sparse(**options: Any) -> dict[str, Any]:
    arrays = latent_attention()
    return dict(
        query=arrays["query"],
        latent_cache=arrays["latent_cache"],
        indices=IDS,
        topk_length=ones(2, I32),
        sinks=ones(4),
        **options,
    )


def blocksparse() -> dict[str, Any]:
    layout = pallas_attn.SparseLayout(jnp.array([[0, 1]], I32), jnp.array([[0]], I32), 16, 16)
    rows = {name: ones((5, 2, 16)) for name in ("query", "key", "value")}
    return dict(rows, layout=layout, cu_q_lens=jnp.array([0, 5], I32), cu_k_lens=jnp.array([0, 5], I32))


def indexer() -> dict[str, Any]:
    attention = nn.MLAConfig(hidden_size=8, num_heads=2, q_lora_rank=4)
    return dict(config=nn.IndexerConfig(2, 64, 4), attention=attention, dtype="float32", rngs=nnx.Rngs(0))


def sparse_calls() -> dict[str, Call]:
    keys = pallas_attn.PagedLatentCache.create(
        num_layers=2, num_pages=4, page_size=8, block_tables=TABLES, dtype=jnp.float32, index_dim=64
    )
    positions = jnp.array([[0, 1, 2]] * 2, I32)
    return {
        "PagedLatentCache.write_index_keys": Call(
            keys.write_index_keys,
            dict(layer=0, keys=ones((2, 3, 64)), positions=positions),
            dict(layer=LAYER, keys=ARRAY, positions=ARRAY),
        ),
        "IndexerConfig": Call(nn.IndexerConfig, {}, dict.fromkeys(("num_heads", "head_dim", "top_k"), COUNT)),
        "Indexer": Call(
            nn.Indexer,
            indexer(),
            dict(config=INSTANCE, attention=INSTANCE, dtype=DTYPE, rngs=INSTANCE),
        ),
        "Indexer, called": Call(
            nn.Indexer(**indexer()),
            dict(
                x=ones((2, 3, 8)),
                compressed_query=ones((2, 3, 4)),
                cache=keys,
                layer=0,
                positions=positions,
            ),
            dict(x=ARRAY, compressed_query=ARRAY, cache=INSTANCE, layer=LAYER, positions=ARRAY),
        ),
        "blocksparse_attention": Call(
            pallas_attn.blocksparse_attention,
            blocksparse(),
            {
                **dict.fromkeys(("query", "key", "value"), ARRAY),
                **dict.fromkeys(("cu_q_lens", "cu_k_lens"), ARRAY.or_none()),
                "layout": INSTANCE,
                "scale": NUMBER.or_none(),
                "softcap": SOFTCAP,
                "return_lse": FLAG,
                "cache_layout": NAME,
                "implementation": NAME.or_none(),
                "config": INSTANCE.or_none(),
            },
        ),
        "BlockSparseConfig": Call(
            pallas_attn.BlockSparseConfig,
            dict(block_q=16, block_kv=16),
            dict.fromkeys(("block_q", "block_kv", "num_warps", "num_stages", "num_splits"), COUNT),
        ),
        "flash_mla_with_kvcache, sparse": Call(
            pallas_attn.flash_mla_with_kvcache,
            dict(flash_mla(), indices=IDS, attn_sink=ones(4), topk_length=ones(2, I32)),
            {
                **dict.fromkeys(("q", "k_cache"), ARRAY),
                **dict.fromkeys(("indices", "attn_sink", "topk_length"), ARRAY.or_none()),
                "head_dim_v": COUNT,
                "softmax_scale": NUMBER.or_none(),
                "causal": FLAG._replace(values=(*FLAG.values, True)),
                "is_fp8_kvcache": FLAG,
                "implementation": NAME.or_none(),
            },
        ),
        "sparse_mla_decode": Call(
            pallas_attn.sparse_mla_decode,
            sparse(addressing="positions", block_tables=TABLES),
            {
                **dict.fromkeys(("query", "latent_cache", "indices", "block_tables"), ARRAY),
                "addressing": NAME,
                "return_lse": FLAG,
                "config": INSTANCE.or_none(),
                **SPARSE,
            },
        ),
        "sparse_mla_prefill": Call(
            pallas_attn.sparse_mla_prefill,
            dict(
                query=ones((2, 4, 576)),
                latents=ones((9, 1, 576)),
                indices=IDS,
                topk_length=ones(2, I32),
                sinks=ones(4),
            ),
            {
                **dict.fromkeys(("query", "latents", "indices"), ARRAY),
                "config": INSTANCE.or_none(),
                **SPARSE,
            },
        ),
        "flash_mla_sparse_fwd": Call(
            pallas_attn.flash_mla_sparse_fwd,
            dict(
                q=ones((2, 4, 576)),
                kv=ones((9, 1, 576)),
                indices=IDS,
                sm_scale=1.0,
                attn_sink=ones(4),
                topk_length=ones(2, I32),
            ),
            {
                **dict.fromkeys(("q", "kv", "indices"), ARRAY),
                **dict.fromkeys(("attn_sink", "topk_length"), ARRAY.or_none()),
                "sm_scale": NUMBER.or_none(),
                "d_v": COUNT,
                "implementation": NAME.or_none(),
            },
        ),
        "write_latents": Call(
            pallas_attn.write_latents,
            dict(
                latents=ones((3, 576)),
                latent_cache=latent_attention()["latent_cache"],
                slot_mapping=zeros(3, I32),
            ),
            {
                **dict.fromkeys(("latents", "latent_cache", "slot_mapping"), ARRAY),
                "scales": NAME,
                "implementation": NAME.or_none(),
            },
        ),
        # Any axes before the last will do.
        "quantize_latents": Call(
            pallas_attn.quantize_latents,
            dict(latents=ones((3, 576))),
            dict(
                latents=Kind((*ARRAY.values, ones(()), ones((3, 656)), ones(576, I32))),
                scales=NAME,
            ),
        ),
        "dequantize_latents": Call(
            pallas_attn.dequantize_latents,
            dict(tokens=zeros((3, 656), jnp.uint8)),
            dict(tokens=Kind((*ARRAY.values, zeros((3, 576), jnp.uint8), ones((3, 656)))), dtype=DTYPE),
        ),
        "SparseMLAConfig": Call(
            pallas_attn.SparseMLAConfig, dict(block_q=16, block_kv=16), TILES | dict(num_splits=COUNT)
        ),
    }
