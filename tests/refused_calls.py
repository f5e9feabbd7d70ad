"""Every public function and method, with arguments that it takes, and of which kind those are that can be wrong."""

from typing import Any

import jax.numpy as jnp
import refusals as kinds
from flax import nnx
from refusals import (
    ARRAY,
    COUNT,
    DTYPE,
    FLAG,
    FUNCTION,
    INSTANCE,
    LAYER,
    NAME,
    NUMBER,
    PAGES,
    SCALES,
    SLOPES,
    SOFTCAP,
    Kind,
    ones,
    zeros,
)  # fmt: skip
from refused_ragged_calls import ragged_calls
from refused_values import (
    BIAS,
    COUNTS,
    FIXED_SPLITS,
    I32,
    MASK,
    MASKS,
    MLA_CONFIG,
    NEAR_ZERO,
    NEW,
    SIDES,
    SIGNED,
    SIZES,
    SLOPES_OR_SINKS,
    TABLES,
    TREE,
    WINDOW,
    WRONG_BIAS,
    Call,
    attended,
    attended_ragged,
    attention,
    dense_attention,
    flash_mla,
    latent_attention,
    latent_cache,
    latent_layer,
    linen_call,
    new_latents,
    new_tokens,
    page_scales,
    ragged,
)
from support import small_cache

import pallas_attn
from pallas_attn import nn

MODS = dict.fromkeys(("score_mod", "mask_mod"), FUNCTION.or_none())


def calls() -> dict[str, Call]:
    cache, quantised, latents = small_cache(block_tables=TABLES), small_cache(dtype="int8"), latent_cache()
    layer, config = latent_layer(), nn.MLAConfig(8, 2)
    lens = attention()["seq_lens"]
    return {
        "paged_attention": Call(
            pallas_attn.paged_attention,
            {**attention(), **SLOPES_OR_SINKS, **TREE},
            {
                **dict.fromkeys(attention(), ARRAY),
                **dict.fromkeys((*SLOPES_OR_SINKS, "query_positions"), ARRAY.or_none()),
                "tree_mask": Kind((1.5, "x", ones((2, 1, 1), I32), ones((2, 2, 1), bool))).or_none(),
                **dict(MASKS, sliding_window=WINDOW),
                "scale": NUMBER.or_none(),
                "block_sparse": INSTANCE.or_none(),
                "return_lse": FLAG,
                "batch_invariant": FLAG,
                "layout": NAME,
                "implementation": NAME.or_none(),
                "config": INSTANCE.or_none(),
                "k_scale": Kind((1.0, "x")).or_none(),
            },
        ),
        "paged_attention, mods": Call(pallas_attn.paged_attention, attention(), MODS),
        "mla_decode, mods": Call(pallas_attn.mla_decode, latent_attention(), MODS),
        "ragged_paged_attention, mods": Call(pallas_attn.ragged_paged_attention, ragged(), MODS),
        "paged_attention, quantised": Call(
            pallas_attn.paged_attention,
            attention(jnp.int8),
            dict.fromkeys(("k_scale", "v_scale"), SCALES.or_none()),
        ),
        "paged_attention, config": Call(
            pallas_attn.paged_attention,
            dict(attention(), implementation="interpret"),
            dict(config=INSTANCE.or_none()),
        ),
        **ragged_calls(),
        "write_kv": Call(
            pallas_attn.write_kv,
            dict(
                key=ones((3, 2, 16)),
                value=ones((3, 2, 16)),
                slot_mapping=zeros(3, I32),
                **{n: attention(jnp.int8)[n] for n in ("key_cache", "value_cache")},
            ),
            {
                **dict.fromkeys(("key", "value", "key_cache", "value_cache", "slot_mapping"), ARRAY),
                **dict.fromkeys(("k_scale", "v_scale"), SCALES.or_none()),
                "layout": NAME,
                "implementation": NAME.or_none(),
            },
        ),
        "convert_layout": Call(
            pallas_attn.convert_layout,
            dict({n: attention()[n] for n in ("key_cache", "value_cache")}, source="NHD", target="PACKED"),
            dict(key_cache=ARRAY, value_cache=ARRAY, source=NAME, target=NAME),
        ),
        "copy_pages": Call(
            pallas_attn.copy_pages,
            dict(cache=zeros((4, 8)), source_pages=[0], target_pages=[1]),
            dict(
                cache=Kind(("x", 1.0, [1.0], cache, {}, ones(()), ones(3), ones((0, 2)))),
                source_pages=PAGES,
                target_pages=PAGES,
            ),
        ),
        "PagedKVCache.create": Call(
            pallas_attn.PagedKVCache.create,
            dict(SIZES, num_kv_heads=2, head_dim=16, block_tables=TABLES, seq_lens=lens),
            dict(
                COUNTS,
                num_kv_heads=COUNT,
                head_dim=COUNT,
                block_tables=ARRAY,
                seq_lens=ARRAY.or_none(),
                dtype=DTYPE,
                layout=NAME,
                scale_per_page=FLAG,
            ),
        ),
        "page_scales": Call(
            pallas_attn.page_scales,
            dict(page_scales(), page_size=8, dtype=jnp.int8),
            dict(dict.fromkeys(page_scales(), ARRAY), page_size=COUNT, dtype=DTYPE, margin=NUMBER),
        ),
        "PagedKVCache.layer_tables": Call(cache.layer_tables, {}, dict(layer=LAYER)),
        "PagedKVCache.scales": Call(quantised.scales, {}, dict(layer=LAYER)),
        "PagedKVCache.slots": Call(
            cache.slots, dict(layer=0, positions=zeros((2, 1), I32)), dict(layer=LAYER, positions=ARRAY)
        ),
        "PagedKVCache.write": Call(cache.write, new_tokens(), dict(NEW, implementation=NAME.or_none())),
        "PagedKVCache.calibrate": Call(quantised.calibrate, new_tokens(), dict(NEW, margin=NUMBER)),
        "PagedKVCache.saturation": Call(quantised.saturation, new_tokens(), NEW),
        "PagedKVCache.copy_pages": Call(
            cache.copy_pages,
            dict(source_pages=[0], target_pages=[1]),
            dict(source_pages=PAGES, target_pages=PAGES),
        ),
        "PagedKVCache.replace": Call(cache.replace, {}, dict(pages=Kind((1,)))),
        "PagedLatentCache.create": Call(
            pallas_attn.PagedLatentCache.create,
            dict(SIZES, block_tables=TABLES),
            dict(COUNTS, block_tables=ARRAY, dtype=DTYPE),
        ),
        "PagedLatentCache.layer_tables": Call(latents.layer_tables, {}, dict(layer=LAYER)),
        "PagedLatentCache.write": Call(
            latents.write, new_latents(), dict(layer=LAYER, latents=ARRAY, positions=ARRAY)
        ),
        "PagedLatentCache.copy_pages": Call(
            latents.copy_pages,
            dict(source_pages=[0], target_pages=[1]),
            dict(source_pages=PAGES, target_pages=PAGES),
        ),
        "PagedLatentCache.replace": Call(latents.replace, {}, dict(key_cache=Kind((1,)))),
        "mla_decode": Call(
            pallas_attn.mla_decode,
            latent_attention(),
            {
                **dict.fromkeys(latent_attention(), ARRAY),
                "schedule": INSTANCE.or_none(),
                "scale": NUMBER.or_none(),
                "causal": FLAG,
                "return_lse": FLAG,
                "batch_invariant": FLAG,
                "implementation": NAME.or_none(),
                "config": INSTANCE.or_none(),
            },
        ),
        "mla_schedule": Call(
            pallas_attn.mla_schedule,
            dict(seq_lens=lens, num_heads=4),
            dict(
                seq_lens=ARRAY,
                num_heads=COUNT,
                num_kv_heads=COUNT,
                q_len=COUNT,
                num_parts=COUNT.or_none(),
                overhead_blocks=COUNT.or_none(),
            ),
        ),
        "get_mla_metadata": Call(
            pallas_attn.get_mla_metadata,
            dict(cache_seqlens=lens, num_heads_per_head_k=4, num_heads_k=1),
            dict(
                cache_seqlens=ARRAY,
                num_heads_per_head_k=COUNT,
                num_heads_k=COUNT,
                num_heads_q=COUNT.or_none(),
                is_fp8_kvcache=FLAG,
                topk=COUNT.or_none(),
            ),
        ),
        "flash_mla_with_kvcache": Call(
            pallas_attn.flash_mla_with_kvcache,
            flash_mla(),
            {
                **dict.fromkeys(flash_mla(), ARRAY),
                "head_dim_v": COUNT._replace(values=(*COUNT.values, 511, 576)),
                "softmax_scale": NUMBER.or_none(),
                "causal": FLAG,
                "implementation": NAME.or_none(),
            },
        ),
        "flash_attention": Call(
            pallas_attn.flash_attention,
            dict(dense_attention(), bias=BIAS, sinks=ones(4), segment_ids=zeros((2, 3), I32)),
            {
                **dict.fromkeys(("query", "key", "value"), ARRAY),
                **dict.fromkeys(("bias", "sinks", "segment_ids"), ARRAY.or_none()),
                "mask": MASK,
                "scale": NUMBER.or_none(),
                "softcap": SOFTCAP,
                "sliding_window": SIDES,
                "q_offset": Kind(("3", 2.5, True, [1], ones((), int), 2**31, -(10**20), {})),
                "causal": FLAG,
                "return_lse": FLAG,
                "layout": NAME,
                "implementation": NAME.or_none(),
                "config": INSTANCE.or_none(),
            },
        ),
        "flash_attention, mods": Call(
            pallas_attn.flash_attention,
            dense_attention(),
            {
                **MODS,
                "block_mask": INSTANCE.or_none(),
            },
        ),
        "block_mask": Call(
            pallas_attn.block_mask,
            dict(mask_mod=pallas_attn.mods.causal(), q_len=3, kv_len=5),
            {
                "mask_mod": FUNCTION,
                **dict.fromkeys(("q_len", "kv_len", "batch", "num_heads"), COUNT),
                **dict.fromkeys(("block_q", "block_kv"), COUNT),
                "exact": FLAG,
                "max_partial": COUNT.or_none(),
            },
        ),
        "not_mask": Call(pallas_attn.not_mask, dict(mask=pallas_attn.mods.causal()), dict(mask=FUNCTION)),
        "flash_attention, packed": Call(
            pallas_attn.flash_attention,
            dict({n: x[:1] for n, x in dense_attention().items()}, cu_q_lens=zeros(2, I32)),
            dict(cu_q_lens=ARRAY.or_none()),
        ),
        "dot_product_attention": Call(
            pallas_attn.dot_product_attention,
            dict(
                dense_attention(),
                bias=BIAS,
                query_seq_lengths=ones(2, I32),
                key_value_seq_lengths=ones(2, I32),
            ),
            {
                **dict.fromkeys(("query", "key", "value"), ARRAY),
                **dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), ARRAY.or_none()),
                "bias": WRONG_BIAS,
                "mask": MASK,
                "scale": SIGNED,
                "local_window_size": SIDES._replace(values=[v for v in SIDES.values if v != 0]),
                "is_causal": FLAG,
                "return_residual": FLAG,
                "implementation": NAME.or_none(),
            },
        ),
        "attention_fn": Call(
            nn.attention_fn,
            dense_attention(),
            dict(
                mask=Kind((1.5, "x", [True], {}), optional=True),
                dtype=DTYPE.or_none(),
                dropout_rate=Kind(("x", 0.1, 1, True, kinds.NAN, [0.0])),
                deterministic=FLAG,
                module=Kind((1, "x"), optional=True),
                qk_attn_weights_einsum=Kind((jnp.einsum,), optional=True),
                attn_weights_value_einsum=Kind((jnp.einsum,), optional=True),
            ),
        ),
        "FlashAttentionTiles": Call(
            pallas_attn.FlashAttentionTiles,
            dict(block_q=16, block_kv=16),
            dict.fromkeys(("block_q", "block_kv", "num_warps", "num_stages"), COUNT),
        ),
        "FlashAttentionConfig": Call(
            pallas_attn.FlashAttentionConfig,
            dict.fromkeys(("forward", "query", "key_value"), pallas_attn.FlashAttentionTiles(16, 16)),
            dict.fromkeys(("forward", "query", "key_value"), INSTANCE),
        ),
        "FlashAttentionCudaConfig": Call(
            pallas_attn.FlashAttentionCudaConfig, dict(backward="cuda"), dict(backward=NAME.or_none())
        ),
        "BlockSparseCudaConfig": Call(
            pallas_attn.BlockSparseCudaConfig, dict(backward="cuda"), dict(backward=NAME.or_none())
        ),
        "LocalStride": Call(
            pallas_attn.LocalStride,
            dict(block_size=16, local_blocks=1, vert_stride=1),
            dict.fromkeys(("block_size", "local_blocks", "vert_stride"), COUNT),
        ),
        "PagedAttentionConfig": Call(
            pallas_attn.PagedAttentionConfig, dict(block_q=16, block_kv=16, num_splits=1), FIXED_SPLITS
        ),
        "MLADecodeConfig": Call(pallas_attn.MLADecodeConfig, dict(block_q=16, block_kv=16), FIXED_SPLITS),
        "alibi_slopes": Call(nn.alibi_slopes, {}, dict(num_heads=COUNT)),
        "PagedAttention": Call(
            nn.PagedAttention,
            dict(sinks=True, num_heads=4),
            dict(
                MASKS,
                scale=NUMBER.or_none(),
                alibi_slopes=SLOPES.or_none(),
                sinks=FLAG,
                num_heads=COUNT,
                implementation=NAME.or_none(),
            ),
        ),
        "PagedAttention, called": Call(
            nn.PagedAttention(),
            attended(cache),
            dict(NEW, query=ARRAY, cache=_caches(latents), sliding_window=WINDOW),
        ),
        "PagedAttention, decoding": Call(
            nn.PagedAttention(), attended(cache, 1), dict(NEW, query=ARRAY, cache=_caches(latents))
        ),
        "PagedAttention, ragged": Call(
            nn.PagedAttention(),
            attended_ragged(cache),
            dict(NEW, query=ARRAY, cache=_caches(latents), cu_q_lens=ARRAY.or_none()),
        ),
        "PagedAttention, of Linen": Call(
            linen_call,
            attended(cache),
            dict(
                NEW,
                **MASKS,
                query=ARRAY,
                cache=_caches(latents),
                scale=NUMBER.or_none(),
                alibi_slopes=Kind(("x", 1.0, ("1",), (kinds.NAN,), (1.0,)), optional=True),
                sinks=FLAG,
                implementation=NAME._replace(values=(1, "foo", b"xla"), optional=True),
            ),
        ),
        "LatentGQA": Call(nn.LatentGQA, {}, dict(scale=NUMBER.or_none(), implementation=NAME.or_none())),
        "LatentGQA, called": Call(
            nn.LatentGQA(), attended(latents), dict(NEW, query=ARRAY, cache=_caches(cache))
        ),
        "LatentGQA, decoding": Call(
            nn.LatentGQA(), attended(latents, 1), dict(NEW, query=ARRAY, cache=_caches(cache))
        ),
        "LatentGQA, ragged": Call(
            nn.LatentGQA(),
            attended_ragged(latents),
            dict(NEW, query=ARRAY, cache=_caches(cache), cu_q_lens=ARRAY.or_none()),
        ),
        "MultiHeadLatentAttention": Call(
            nn.MultiHeadLatentAttention,
            dict(config=config, rngs=nnx.Rngs(0)),
            dict(config=INSTANCE, dtype=DTYPE, implementation=NAME.or_none(), rngs=INSTANCE),
        ),
        "MultiHeadLatentAttention, called": Call(
            layer,
            dict(x=ones((2, 3, 8)), cache=latents, layer=0, positions=new_tokens()["positions"]),
            dict(
                x=ARRAY,
                cache=_caches(cache),
                layer=LAYER,
                positions=ARRAY,
                schedule=INSTANCE.or_none(),
                absorbed=FLAG.or_none(),
            ),
        ),
        "MultiHeadLatentAttention, ragged": Call(
            layer,
            dict(
                x=ones((5, 8)),
                **{n: attended_ragged(latents)[n] for n in ("cache", "layer", "positions", "cu_q_lens")},
            ),
            dict(x=ARRAY, positions=ARRAY, cu_q_lens=ARRAY.or_none()),
        ),
        "MLAConfig": Call(
            nn.MLAConfig,
            MLA_CONFIG,
            dict(
                **dict.fromkeys(
                    (
                        *("hidden_size", "num_heads", "kv_lora_rank", "qk_nope_head_dim"),
                        *("qk_rope_head_dim", "v_head_dim"),
                    ),
                    COUNT,
                ),
                q_lora_rank=COUNT.or_none(),
                rope_theta=NUMBER,
                yarn=INSTANCE.or_none(),
                rope_interleaved=FLAG,
                rms_norm_eps=NUMBER,
            ),
        ),
        "Yarn": Call(
            nn.Yarn,
            dict(factor=4.0, original_context=64),
            dict(
                factor=NUMBER,
                original_context=COUNT,
                beta_fast=NUMBER,
                beta_slow=NUMBER,
                mscale=NEAR_ZERO,
                mscale_all_dim=NEAR_ZERO,
                attention_factor=NUMBER.or_none(),
                truncate=FLAG,
            ),
        ),
    }


def _caches(other: Any) -> Kind:
    return Kind((*INSTANCE.values, other))
