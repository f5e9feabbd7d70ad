"""Public functions over ragged queries, with arguments that they take: see refused_calls."""

import jax.numpy as jnp
from refusals import ARRAY, DTYPE, FLAG, INSTANCE, NAME, NUMBER, SCALES, Kind, ones
from refused_values import (
    ANY_RANK,
    I32,
    MASKS,
    NUM_SEQS,
    OUT_SCALE,
    RAGGED_TREE,
    SLOPES_OR_SINKS,
    TILES,
    WINDOW,
    Call,
    attention,
    latent_prefill,
    ragged,
)

import pallas_attn


def ragged_calls() -> dict[str, Call]:
    config = pallas_attn.RaggedAttentionConfig(pallas_attn.RaggedTiles(16, 16, 1))
    every = {
        **dict.fromkeys(ragged(), ARRAY),
        **dict.fromkeys((*SLOPES_OR_SINKS, "query_positions"), ARRAY.or_none()),
        "tree_mask": Kind((1.5, "x", ones((5, 2), I32), ones((4, 2), bool))).or_none(),
        **dict(MASKS, sliding_window=WINDOW),
        "num_seqs": NUM_SEQS,
        "scale": NUMBER.or_none(),
        **dict.fromkeys(("causal", "return_lse"), FLAG),
        "layout": NAME,
        "implementation": NAME.or_none(),
        "config": INSTANCE.or_none(),
        "k_scale": Kind((1.0, "x")).or_none(),
        "out_dtype": DTYPE.or_none(),
        "out_scale": OUT_SCALE,
    }
    new = dict.fromkeys(("key", "value"), ones((5, 2, 16)))
    out = dict(out=ones((5, 4, 16), jnp.float8_e5m2), out_scale=1.0)
    state = dict(out_a=ones((5, 4, 16)), lse_a=ones((5, 4)))
    states = {**state, **{name.replace("_a", "_b"): array for name, array in state.items()}}
    return {
        "ragged_paged_attention": Call(
            pallas_attn.ragged_paged_attention,
            {**ragged(), **SLOPES_OR_SINKS, **RAGGED_TREE, "out_dtype": jnp.float8_e5m2, "out_scale": 1.0},
            every,
        ),
        "ragged_paged_attention, quantised": Call(
            pallas_attn.ragged_paged_attention,
            dict(ragged(), **{n: attention(jnp.int8)[n] for n in ("key_cache", "value_cache")}),
            dict.fromkeys(("k_scale", "v_scale"), SCALES.or_none()),
        ),
        "prefix_prefill": Call(
            pallas_attn.prefix_prefill,
            {**ragged(), **new, **SLOPES_OR_SINKS, **RAGGED_TREE, **out},
            {
                **every,
                **dict.fromkeys(new, ARRAY),
                "skip_decode": FLAG,
                "out": ARRAY.or_none(),
            },
        ),
        "mla_prefill": Call(
            pallas_attn.mla_prefill,
            latent_prefill(),
            {
                **dict.fromkeys(latent_prefill(), ARRAY),
                "num_seqs": NUM_SEQS,
                "scale": NUMBER.or_none(),
                "form": NAME.or_none(),
                "return_lse": FLAG,
                "implementation": NAME.or_none(),
            },
        ),
        "merge_states": Call(
            pallas_attn.merge_states,
            dict(states, sinks=ones(4)),
            {**dict.fromkeys(states, ARRAY), "out_a": ANY_RANK, "sinks": ARRAY.or_none()},
        ),
        "RaggedTiles": Call(pallas_attn.RaggedTiles, dict(block_q=16, block_kv=16, num_splits=1), TILES),
        "RaggedAttentionConfig": Call(
            pallas_attn.RaggedAttentionConfig,
            dict(long=config.long, widened_bytes=0),
            dict(
                long=INSTANCE,
                short=INSTANCE.or_none(),
                widened_bytes=Kind(("1", 1.5, True, -1, [1], ones(1))),
            ),
        ),
    }
