"""A DeepSeek-V2/V3/V3.2 decoder in Flax NNX: multi-head latent attention, shared and routed experts; in V3.2 every
layer has an indexer, which chooses the tokens that attention is about.

Attention runs on a `PagedLatentCache`; the tile schedule of a decode step is made once for all layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_attn import PagedLatentCache, mla_schedule
from pallas_attn._call.checks import ArgumentChecker, fail
from pallas_attn._call.optional import needs_extra
from pallas_attn._tile.latents import FP8, Scales
from pallas_attn.nn._new_tokens import once_for_all_layers
from pallas_attn.nn.indexer import Indexer
from pallas_attn.nn.layers import PRECISION, RMSNorm, advanced, linear
from pallas_attn.nn.mla import MultiHeadLatentAttention

with needs_extra("models", user="pallas_attn.models.deepseek"):
    from flax import nnx

from .deepseek_config import DeepSeekConfig as DeepSeekConfig
from .experts import through_experts


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, width: int, dtype: DTypeLike, rngs: nnx.Rngs):
        self.gate_proj = linear(hidden_size, width, dtype, rngs)
        self.up_proj = linear(hidden_size, width, dtype, rngs)
        self.down_proj = linear(width, hidden_size, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


def route(
    logits: jax.Array, choice_bias: jax.Array | None, config: DeepSeekConfig
) -> tuple[jax.Array, jax.Array]:
    """(expert ids, weights) [num_tokens, experts_per_token] from router logits [num_tokens, num_experts] float32."""
    scores = jax.nn.sigmoid(logits) if config.sigmoid_routing else jax.nn.softmax(logits, axis=-1)
    merit = scores if choice_bias is None else scores + choice_bias
    if config.num_expert_groups > 1:
        grouped = merit.reshape(merit.shape[0], config.num_expert_groups, -1)
        judges = 2 if config.sigmoid_routing else 1
        group_merit = jax.lax.top_k(grouped, judges)[0].sum(axis=-1)
        best = jax.lax.top_k(group_merit, config.groups_per_token)[1]
        allowed = jax.nn.one_hot(best, config.num_expert_groups, dtype=jnp.bool_).any(axis=1)
        merit = jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(merit.shape)
    experts = jax.lax.top_k(merit, config.experts_per_token)[1]
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if config.normalize_weights:
        weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
    return experts, weights * config.routed_scale


class MoE(nnx.Module):
    """Shared experts for every token, and routed ones by grouped matrix products over tokens sorted by expert."""

    def __init__(self, config: DeepSeekConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        hidden, width, experts = (
            config.attention.hidden_size,
            config.expert_intermediate_size,
            config.num_experts,
        )
        init = jax.nn.initializers.normal(0.02)
        self.router = nnx.Param(init(rngs.params(), (experts, hidden), jnp.float32))
        if config.sigmoid_routing:
            self.choice_bias = nnx.Param(jnp.zeros(experts, jnp.float32))
        self.gate_up = nnx.Param(init(rngs.params(), (experts, hidden, 2 * width), dtype))
        self.down = nnx.Param(init(rngs.params(), (experts, width, hidden), dtype))
        self.shared = MLP(hidden, config.num_shared_experts * width, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        tokens = x.reshape(-1, x.shape[-1])
        logits = jnp.einsum("th,eh->te", tokens.astype(jnp.float32), self.router[...], precision=PRECISION)
        bias = self.choice_bias[...] if config.sigmoid_routing else None
        experts, weights = route(logits, bias, config)

        routed = through_experts(
            tokens,
            experts,
            weights,
            self.gate_up[...],
            self.down[...],
            lambda gate, up: jax.nn.silu(gate) * up,
        )
        return routed.reshape(x.shape) + self.shared(x)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP or experts, each added to the residual stream."""

    def __init__(
        self,
        config: DeepSeekConfig,
        dense: bool,
        dtype: DTypeLike,
        options: dict[str, Any],
        rngs: nnx.Rngs,
    ):
        hidden, eps = config.attention.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(hidden, eps, dtype)
        self.attention = MultiHeadLatentAttention(config.attention, dtype=dtype, **options, rngs=rngs)
        if config.indexer is not None:
            self.indexer = Indexer(config.indexer, config.attention, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(hidden, eps, dtype)
        self.mlp = MLP(hidden, config.intermediate_size, dtype, rngs) if dense else MoE(config, dtype, rngs)

    def __call__(self, x, cache, layer, tokens) -> tuple[jax.Array, PagedLatentCache]:
        normed, chosen = self.attention_norm(x), {}
        if hasattr(self, "indexer"):
            compressed = self.attention.compressed_query(normed)
            chosen["indices"], cache = self.indexer(normed, compressed, cache, layer, tokens["positions"])
        output, cache = self.attention(normed, cache, layer, **tokens, **chosen)
        x = x + output
        return x + self.mlp(self.mlp_norm(x)), cache


class DeepSeek(nnx.Module):
    """The decoder: tokens and a cache in, hidden states and the extended cache out.

    Args:
        config: sizes.
        dtype: of weights and activations; norms, softmax, routing and logits are float32.
        implementation: which implementation of `mla_decode`, or `sparse_mla_decode`, to force; None picks the best.
        batch_invariant: as of a `Llama`; not for a model with indexers, whose choice of tokens is not.
        rngs: random weights are drawn from it; `load_transformers_weights` replaces them.
    """

    def __init__(
        self,
        config: DeepSeekConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        batch_invariant: bool = False,
        rngs: nnx.Rngs,
    ):
        ArgumentChecker("DeepSeek").flag("batch_invariant", batch_invariant)
        if batch_invariant and config.indexer is not None:
            fail("DeepSeek", "batch_invariant", "False for a model with indexers", "True")
        self.batch_invariant = bool(batch_invariant)
        options = dict(implementation=implementation, batch_invariant=batch_invariant)
        self.config, self.dtype = config, jnp.dtype(dtype)
        hidden = config.attention.hidden_size
        init = jax.nn.initializers.normal(0.02)
        self.embedding = nnx.Param(init(rngs.params(), (config.vocab_size, hidden), dtype))
        self.layers = nnx.List(
            DecoderLayer(config, layer < config.num_dense_layers, dtype, options, rngs)
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(hidden, config.rms_norm_eps, dtype)
        self.lm_head = nnx.Param(init(rngs.params(), (config.vocab_size, hidden), dtype))

    def create_cache(
        self,
        *,
        num_pages: int,
        page_size: int,
        block_tables: jax.Array,
        dtype: Any = None,
        scales: Scales = "power_of_two",
    ) -> PagedLatentCache:
        """An empty cache with `num_pages` pages for each layer, of the model's dtype or (float8_e4m3fn) of fp8 latents,
        whose `scales` are "power_of_two" or "exact"; with index keys where the model has indexers."""
        dtype = self.dtype if dtype is None else jnp.dtype(dtype)
        if dtype not in (self.dtype, FP8):
            fail("create_cache", "dtype", f"{self.dtype} (the model's) or {jnp.dtype(FP8)}", str(dtype))
        indexer = self.config.indexer
        return PagedLatentCache.create(
            num_layers=self.config.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            block_tables=block_tables,
            dtype=dtype,
            scales=scales,
            index_dim=None if indexer is None else indexer.head_dim,
        )

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: PagedLatentCache | Any,
        *,
        cu_q_lens: jax.Array | None = None,
    ) -> tuple[jax.Array, PagedLatentCache]:
        """Runs new tokens of every sequence through the layers: prompts, chunks of them, tokens of answers.

        Args:
            tokens: [num_seqs, n] int32 token ids in [0, vocab_size), or ragged [total_tokens], all sequences' end to
                end.
            positions: int32, of the same shape; those of a sequence follow each other. Negative marks padding and
                finished sequences, which write nothing.
            cache: pages of `config.num_layers` layers.
            cu_q_lens: [num_seqs + 1] int32, for the ragged form: where each sequence's tokens begin and end.

        Returns:
            Normalised hidden states [..., hidden_size] for `logits`, and the cache holding the new tokens, with
            `seq_lens` advanced to the last of them.
        """
        whose: dict[str, Any] = {"positions": once_for_all_layers("DeepSeek", positions, cu_q_lens)}
        scheduled = self.config.indexer is None and not self.batch_invariant
        if cu_q_lens is None and tokens.shape[1] == 1 and scheduled:
            num_heads = self.config.attention.num_heads
            whose["schedule"] = mla_schedule(positions[:, 0] + 1, num_heads=num_heads)
        x = self.embedding[...][tokens]
        for index, layer in enumerate(self.layers):
            x, cache = layer(x, cache, index, whose)
        return self.norm(x), cache.replace(seq_lens=advanced(cache.seq_lens, positions, cu_q_lens))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Scores of every token: [..., hidden_size] to float32 [..., vocab_size]."""
        return jnp.einsum(
            "...h,vh->...v",
            hidden,
            self.lm_head[...],
            precision=PRECISION,
            preferred_element_type=jnp.float32,
        )
