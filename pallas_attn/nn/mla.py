"""Multi-head latent attention as a Flax NNX module, in its two forms."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_attn import MLASchedule, PagedLatentCache, mla_decode
from pallas_attn._call.checks import fail
from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="pallas_attn.nn"):
    from flax import nnx

from .rotary import Yarn, apply_rotary, rotary_angles, rotary_frequencies

# float32 weights mean float32 products (a GPU would take TF32 by default); bfloat16 weights are not affected.
_PRECISION = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Sizes of a multi-head latent attention layer.

    Attributes:
        hidden_size: width of the residual stream.
        num_heads: query heads.
        q_lora_rank: width that queries are compressed to on their way; None projects them directly.
        kv_lora_rank: latent elements of a token; 512 is what the kernel serves.
        qk_nope_head_dim, qk_rope_head_dim: elements of a head's query and key without and with rotary embedding.
        v_head_dim: elements of a head's value.
        rope_theta: base of the rotary frequencies.
        yarn: how the frequencies are stretched; None leaves them.
        rope_interleaved: whether rotary pairs are neighbours in the weights (DeepSeek's are) or half a head apart.
        rms_norm_eps: of the norms of the two latents.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_theta: float = 10000.0
    yarn: Yarn | None = None
    rope_interleaved: bool = True
    rms_norm_eps: float = 1e-6

    def __post_init__(self):
        for name, size in (("kv_lora_rank", 512), ("qk_rope_head_dim", 64)):
            if getattr(self, name) != size:
                fail("MLAConfig", name, str(size), str(getattr(self, name)))

    @property
    def scale(self) -> float:
        """Factor of the logits: that of the heads before absorption, and YaRN's."""
        head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        return head_dim**-0.5 * (self.yarn.logit_scale if self.yarn else 1.0)


class RMSNorm(nnx.Module):
    """Divides by the root mean square over the last axis, in float32, and scales."""

    def __init__(self, size: int, eps: float, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * self.weight[...]


def linear(in_size: int, out_size: int, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        in_size, out_size, use_bias=False, dtype=dtype, param_dtype=dtype, precision=_PRECISION, rngs=rngs
    )


class MultiHeadLatentAttention(nnx.Module):
    """Projections, rotary embedding and attention of one layer over a `PagedLatentCache`.

    A token is cached as a normalised latent c of 512 elements and a rotary key of 64 that all heads share. A head's
    key is [W_k c, rotary] and its value W_v c. The two forms compute the same:

    - naive: expand c to keys and values of every head, then attend. Cheap per (query, token) pair, 192 + 128 products,
      but the expansion of every token must be paid: right for prompts, which expand each of theirs once.
    - absorbed: (W_k c) . q = c . (W_k^T q), so multiply W_k into the query instead and attend over the latents
      themselves; sum_j p_j W_v c_j = W_v sum_j p_j c_j, so W_v comes after. Costs 576 + 512 products a pair but
      reads 1152 bytes a token for all heads: right for decoding.

    Args:
        config: sizes.
        dtype: of weights and activations.
        implementation: which implementation of `mla_decode` to force; None picks the best.
        rngs: random weights are drawn from it.
    """

    def __init__(
        self,
        config: MLAConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.config, self.implementation = config, implementation
        heads, nope, rope = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        latent, value = config.kv_lora_rank, config.v_head_dim
        if config.q_lora_rank is None:
            self.q_proj = linear(config.hidden_size, heads * (nope + rope), dtype, rngs)
        else:
            self.q_a_proj = linear(config.hidden_size, config.q_lora_rank, dtype, rngs)
            self.q_a_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps, dtype)
            self.q_b_proj = linear(config.q_lora_rank, heads * (nope + rope), dtype, rngs)
        self.kv_a_proj = linear(config.hidden_size, latent + rope, dtype, rngs)
        self.kv_a_norm = RMSNorm(latent, config.rms_norm_eps, dtype)
        init = jax.nn.initializers.normal(0.02)
        # The halves of what DeepSeek calls kv_b_proj, by head.
        self.key_up = nnx.Param(init(rngs.params(), (heads, nope, latent), dtype))
        self.value_up = nnx.Param(init(rngs.params(), (heads, value, latent), dtype))
        self.o_proj = linear(heads * value, config.hidden_size, dtype, rngs)

    def __call__(
        self,
        x: jax.Array,
        cache: PagedLatentCache,
        layer: jax.Array | int,
        positions: jax.Array,
        *,
        schedule: MLASchedule | None = None,
        absorbed: bool | None = None,
    ) -> tuple[jax.Array, PagedLatentCache]:
        """Attends from `n` new tokens of every sequence.

        Args:
            x: [num_seqs, n, hidden_size].
            cache: the latents of all layers. Donate it to the surrounding jit, or the write copies it.
            layer: index of this layer in the cache; may be traced.
            positions: [num_seqs, n] int32 position of each token in its sequence. Negative marks padding or a
                finished sequence: nothing is written and the output is not meaningful (zeros before `o_proj` when
                absorbed).
            schedule: from `mla_schedule` for `num_heads` heads, `q_len = n` and the lengths after this step; used by
                the absorbed form. Make it once for all layers.
            absorbed: which form. Absorbed needs consecutive positions, the newest of each sequence, and attends to
                all that the pages hold; naive needs fresh, right-padded prompts whose positions count from 0. None
                is absorbed for one token and naive for more.

        Returns:
            The output [num_seqs, n, hidden_size] and the cache with the new tokens in it; its `seq_lens` are left
            for the model to advance.
        """
        config = self.config
        q_nope, q_rope = jnp.split(self._queries(x), [config.qk_nope_head_dim], axis=-1)
        latent, k_rope = jnp.split(self.kv_a_proj(x), [config.kv_lora_rank], axis=-1)
        latent = self.kv_a_norm(latent)
        frequencies = rotary_frequencies(config.qk_rope_head_dim, config.rope_theta, config.yarn)
        angles = rotary_angles(positions, frequencies, config.yarn.rotary_scale if config.yarn else 1.0)
        q_rope = apply_rotary(q_rope, *angles, interleaved=config.rope_interleaved)
        k_rope = apply_rotary(k_rope[:, :, None], *angles, interleaved=config.rope_interleaved)[:, :, 0]
        cache = cache.write(layer, jnp.concatenate([latent, k_rope], axis=-1), positions)

        if x.shape[1] == 1 if absorbed is None else absorbed:
            out = self._absorbed(q_nope, q_rope, cache, layer, positions, schedule)
        else:
            out = self._naive(q_nope, q_rope, latent, k_rope, positions)
        return self.o_proj(out.reshape(*x.shape[:2], -1)), cache

    def _queries(self, x: jax.Array) -> jax.Array:
        """[num_seqs, n, num_heads, nope + rope]."""
        compressed = self.config.q_lora_rank is not None
        flat = self.q_b_proj(self.q_a_norm(self.q_a_proj(x))) if compressed else self.q_proj(x)
        return flat.reshape(*x.shape[:2], self.config.num_heads, -1)

    def _absorbed(self, q_nope, q_rope, cache: PagedLatentCache, layer, positions, schedule) -> jax.Array:
        q_latent = jnp.einsum("bshn,hnc->bshc", q_nope, self.key_up[...], precision=_PRECISION)
        out = mla_decode(
            jnp.concatenate([q_latent, q_rope], axis=-1),
            cache.latent_cache,
            cache.layer_tables(layer),
            # A row whose positions are all negative has length 0: it reads no page and gets zeros.
            jnp.max(positions, axis=1) + 1,
            schedule=schedule,
            scale=self.config.scale,
            causal=True,
            implementation=self.implementation,
        )
        return jnp.einsum("bshc,hvc->bshv", out, self.value_up[...], precision=_PRECISION)

    def _naive(self, q_nope, q_rope, latent, k_rope, positions) -> jax.Array:
        """Causal attention of right-padded prompts over themselves; padding comes after every real token, so the
        causal mask alone keeps it out of every real row."""
        del positions
        keys = jnp.einsum("btc,hnc->bthn", latent, self.key_up[...], precision=_PRECISION)
        values = jnp.einsum("btc,hvc->bthv", latent, self.value_up[...], precision=_PRECISION)
        k_rope = jnp.broadcast_to(k_rope[:, :, None], (*keys.shape[:3], k_rope.shape[-1]))
        # One width for keys and values is what fused attention wants; zeros change nothing.
        width = max(keys.shape[-1] + k_rope.shape[-1], values.shape[-1])
        padded = [
            jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - x.shape[-1])))
            for x in (
                jnp.concatenate([q_nope, q_rope], axis=-1),
                jnp.concatenate([keys, k_rope], axis=-1),
                values,
            )
        ]
        with jax.default_matmul_precision("highest"):
            out = jax.nn.dot_product_attention(*padded, scale=self.config.scale, is_causal=True)
        return out[..., : values.shape[-1]]
