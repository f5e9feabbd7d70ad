"""Decoders as plain JAX forwards whose attention is ours, by its ops alone: what their options mean to a whole model.

A forward (weights, config, tokens, positions, attend) gives logits [num_tokens, vocab] float32 of tokens that lie one
after the other. weights: a transformers state dict as arrays, and "windows", each layer's, or, for ALiBi, "slopes".
config: its config. attend(layer, query, key, value, **options) writes keys and values and attends, all
[num_tokens, heads, head_dim].
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn.nn.rotary import apply_rotary, rotary_angles, rotary_frequencies

NO_WINDOW = 1 << 30


def dense(weights, name: str, x: jax.Array) -> jax.Array:
    out = jnp.einsum("ti,oi->to", x, weights[f"{name}.weight"], precision="highest")
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def layer_norm(weights, name: str, x: jax.Array, eps: float) -> jax.Array:
    normed = jax.nn.standardize(x, epsilon=eps)
    return normed * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def heads_of(weights, name: str, x: jax.Array, config) -> list[jax.Array]:
    """Query, key and value."""
    projected = (dense(weights, f"{name}.{part}_proj", x) for part in "qkv")
    return [part.reshape(len(x), -1, config.head_dim) for part in projected]


def windows_of(config) -> np.ndarray:
    """[num_layers] int32."""
    kinds = getattr(config, "layer_types", None) or ()
    return np.array([config.sliding_window if "sliding" in kind else NO_WINDOW for kind in kinds], np.int32)


def gpt_oss(weights, config, tokens, positions, attend) -> jax.Array:
    """A sink for each head, windows in every other layer, YaRN without rounding, experts with biases."""
    frequencies, scale = _yarn(config.head_dim, config.rope_parameters)
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config.num_hidden_layers):
        name = f"model.layers.{layer}"
        y = rms_norm(x, weights[f"{name}.input_layernorm.weight"], config.rms_norm_eps)
        query, key, value = heads_of(weights, f"{name}.self_attn", y, config)
        angles = rotary_angles(positions, frequencies, scale)
        out = attend(
            layer,
            apply_rotary(query, *angles),
            apply_rotary(key, *angles),
            value,
            sinks=weights[f"{name}.self_attn.sinks"],
            sliding_window=weights["windows"][layer],
        )
        x = x + dense(weights, f"{name}.self_attn.o_proj", out.reshape(len(x), -1))
        y = rms_norm(x, weights[f"{name}.post_attention_layernorm.weight"], config.rms_norm_eps)
        x = x + _experts(weights, f"{name}.mlp", config, y)
    return dense(weights, "lm_head", rms_norm(x, weights["model.norm.weight"], config.rms_norm_eps))


def _yarn(dim: int, rope) -> tuple[np.ndarray, float]:
    """(frequencies, factor of cosines and sines). `nn.Yarn` rounds the pairs between which it blends, as DeepSeek's
    models do; these are trained without."""
    plain = rotary_frequencies(dim, rope["rope_theta"]).astype(np.float64)
    turns_of_first = rope["original_max_position_embeddings"] / (2 * math.pi)
    # The (fractional) pairs that make so many turns over the original context.
    first, last = (
        dim * math.log(turns_of_first / rope[beta]) / (2 * math.log(rope["rope_theta"]))
        for beta in ("beta_fast", "beta_slow")
    )
    first, last = max(first, 0), min(last, dim - 1)
    slowed = np.clip((np.arange(dim // 2) - first) / (last - first), 0, 1)
    frequencies = plain * (1 - slowed) + plain / rope["factor"] * slowed
    return frequencies.astype(np.float32), 0.1 * math.log(rope["factor"]) + 1


def _experts(weights, name: str, config, x: jax.Array) -> jax.Array:
    """All experts for every token: there are few."""
    best, chosen = jax.lax.top_k(dense(weights, f"{name}.router", x), config.num_experts_per_tok)
    share = jax.nn.one_hot(chosen, config.num_local_experts) * jax.nn.softmax(best)[..., None]
    name = f"{name}.experts"
    both = jnp.einsum("ti,eio->teo", x, weights[f"{name}.gate_up_proj"], precision="highest")
    both += weights[f"{name}.gate_up_proj_bias"]
    limit = config.swiglu_limit
    gate, up = jnp.minimum(both[..., ::2], limit), jnp.clip(both[..., 1::2], -limit, limit)
    gated = (up + 1) * gate * jax.nn.sigmoid(gate * config.swiglu_alpha)
    out = jnp.einsum("tei,eio->teo", gated, weights[f"{name}.down_proj"], precision="highest")
    return jnp.einsum("teo,tke->to", out + weights[f"{name}.down_proj_bias"], share, precision="highest")


def bloom(weights, config, tokens, positions, attend) -> jax.Array:
    """ALiBi instead of positions in queries and keys."""
    eps = config.layer_norm_epsilon
    x = weights["transformer.word_embeddings.weight"][tokens]
    x = layer_norm(weights, "transformer.word_embeddings_layernorm", x, eps)
    for layer in range(config.n_layer):
        name = f"transformer.h.{layer}"
        y = layer_norm(weights, f"{name}.input_layernorm", x, eps)
        both = dense(weights, f"{name}.self_attention.query_key_value", y)
        query, key, value = jnp.unstack(both.reshape(len(x), config.n_head, 3, -1), axis=2)
        out = attend(layer, query, key, value, alibi_slopes=weights["slopes"])
        x = x + dense(weights, f"{name}.self_attention.dense", out.reshape(len(x), -1))
        y = layer_norm(weights, f"{name}.post_attention_layernorm", x, eps)
        y = jax.nn.gelu(dense(weights, f"{name}.mlp.dense_h_to_4h", y), approximate=True)
        x = x + dense(weights, f"{name}.mlp.dense_4h_to_h", y)
    return dense(weights, "lm_head", layer_norm(weights, "transformer.ln_f", x, eps))
