"""A DeepSeek-V2/V3/V3.2 decoder in Flax NNX: multi-head latent attention, shared and routed experts; in V3.2 every
layer has an indexer, which chooses the tokens that attention is about.

Attention runs on a `PagedLatentCache`; the tile schedule of a decode step is made once for all layers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_attn import PagedLatentCache, mla_schedule
from pallas_attn._call.checks import fail
from pallas_attn._call.optional import needs_extra
from pallas_attn._tile.latents import FP8, Scales
from pallas_attn.nn._new_tokens import once_for_all_layers
from pallas_attn.nn.indexer import Indexer, IndexerConfig
from pallas_attn.nn.layers import PRECISION, RMSNorm, advanced, linear
from pallas_attn.nn.mla import MLAConfig, MultiHeadLatentAttention
from pallas_attn.nn.rotary import Yarn

with needs_extra("models", user="pallas_attn.models.deepseek"):
    from flax import nnx

# Kimi K2 is a V3 of other sizes.
DEEPSEEK_LIKE = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2")
# Settings of a config.json that have no default here.
REQUIRED_SETTINGS = (
    *(
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "moe_intermediate_size",
        "rms_norm_eps",
    ),
    *("num_hidden_layers", "num_attention_heads", "first_k_dense_replace"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("n_routed_experts", "num_experts_per_tok", "n_shared_experts"),
)
# Of V3.2, by `IndexerConfig`'s names.
INDEXER_SETTINGS = {"num_heads": "index_n_heads", "head_dim": "index_head_dim", "top_k": "index_topk"}


@dataclasses.dataclass(frozen=True)
class DeepSeekConfig:
    """Sizes of a DeepSeek decoder.

    Attributes:
        vocab_size: rows of the embedding.
        num_layers: decoder layers; the first `num_dense_layers` have an ordinary MLP, the others experts.
        intermediate_size: width of the ordinary MLP.
        expert_intermediate_size: width of an expert.
        num_experts, experts_per_token: routed experts, and how many a token goes to.
        num_shared_experts: experts' widths that every token goes through.
        num_expert_groups, groups_per_token: a token chooses only among the experts of its best groups.
        sigmoid_routing: V3's routing: sigmoid scores, a bias that only the choice sees, groups judged by their two
            best; otherwise V2's: softmax scores, groups judged by their best.
        normalize_weights: whether a token's expert weights are made to sum to 1.
        routed_scale: factor of the routed experts' sum.
        rms_norm_eps: of the decoder's own norms.
        attention: sizes of the attention layers.
        indexer: sizes of the indexers, for sparse attention (V3.2); None for dense attention.
        context_length: most tokens, prompt and answer together, that the model was trained on.
    """

    vocab_size: int
    num_layers: int
    num_dense_layers: int
    intermediate_size: int
    expert_intermediate_size: int
    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    attention: MLAConfig
    num_expert_groups: int = 1
    groups_per_token: int = 1
    sigmoid_routing: bool = False
    normalize_weights: bool = False
    routed_scale: float = 1.0
    rms_norm_eps: float = 1e-6
    context_length: int = 4096
    indexer: IndexerConfig | None = None

    @classmethod
    def from_transformers(cls, config: Any) -> "DeepSeekConfig":
        """From a transformers config of model type "deepseek_v2", "deepseek_v3", "deepseek_v32" or "kimi_k2", or its
        `config.json` as a mapping.

        Raises:
            TypeError: neither of these.
            ValueError: another model type, a setting that is missing, or one that this decoder does not have.
        """
        function = "DeepSeekConfig.from_transformers"
        if hasattr(config, "to_dict"):
            config = config.to_dict()
        if not isinstance(config, Mapping):
            expected = "a transformers config, or a mapping"
            fail(function, "config", expected, f"{config!r:.40} of type {type(config).__name__}", TypeError)
        sparse = config.get("model_type") == "deepseek_v32"
        for setting in (*REQUIRED_SETTINGS, *(INDEXER_SETTINGS.values() if sparse else ())):
            if config.get(setting) is None:
                fail(function, setting, "a value", "none")
        kind = config["model_type"]
        if kind not in DEEPSEEK_LIKE:
            fail(function, "model_type", " or ".join(map(repr, DEEPSEEK_LIKE)), repr(kind))
        v3 = kind != "deepseek_v2"
        methods = ("noaux_tc",) if v3 else ("greedy", "group_limited_greedy")
        dense = config["first_k_dense_replace"]
        layer_types = ["dense"] * dense + ["sparse"] * (config["num_hidden_layers"] - dense)
        # Newer configs say rope_parameters, older ones rope_scaling beside rope_theta.
        rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
        for settings, setting, able in (
            (config, "attention_bias", (False,)),
            (config, "mlp_bias", (False,)),
            (config, "tie_word_embeddings", (False,)),
            (config, "hidden_act", ("silu",)),
            (config, "moe_layer_freq", (1,)),
            (config, "mlp_layer_types", (layer_types,)),
            (config, "scoring_func", ("sigmoid" if v3 else "softmax",)),
            (config, "topk_method", methods),
            (config, "norm_topk_prob", (False, True) if v3 else (False,)),
            # fp8 checkpoints keep scales beside their weights: multiply them in, and drop the setting.
            (config, "quantization_config", (None,)),
            (rope, "attention_factor", (None,)),
            (rope, "truncate", (True,)),
        ):
            if (found := settings.get(setting)) is not None and found not in able:
                fail(function, setting, " or ".join(map(repr, able)), repr(found))
        grouped = v3 or config.get("topk_method") == "group_limited_greedy"
        yarn = None
        if (rope_type := rope.get("rope_type", rope.get("type", "default"))) == "yarn":
            for setting in ("factor", "original_max_position_embeddings"):
                if rope.get(setting) is None:
                    fail(function, f"rope_parameters.{setting}", "a value with rope type 'yarn'", "none")
            yarn = Yarn(
                factor=float(rope["factor"]),
                original_context=int(rope["original_max_position_embeddings"]),
                beta_fast=float(rope.get("beta_fast") or 32.0),
                beta_slow=float(rope.get("beta_slow") or 1.0),
                mscale=float(rope.get("mscale") or 0.0),
                mscale_all_dim=float(rope.get("mscale_all_dim") or 0.0),
            )
        elif rope_type != "default":
            fail(function, "rope_type", "'default' or 'yarn'", repr(rope_type))
        attention = MLAConfig(
            hidden_size=config["hidden_size"],
            num_heads=config["num_attention_heads"],
            q_lora_rank=config.get("q_lora_rank"),
            kv_lora_rank=config["kv_lora_rank"],
            qk_nope_head_dim=config["qk_nope_head_dim"],
            qk_rope_head_dim=config["qk_rope_head_dim"],
            v_head_dim=config["v_head_dim"],
            rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
            yarn=yarn,
            rope_interleaved=bool(config.get("rope_interleave", True)),
        )
        return cls(
            vocab_size=config["vocab_size"],
            num_layers=config["num_hidden_layers"],
            num_dense_layers=config["first_k_dense_replace"],
            intermediate_size=config["intermediate_size"],
            expert_intermediate_size=config["moe_intermediate_size"],
            num_experts=config["n_routed_experts"],
            experts_per_token=config["num_experts_per_tok"],
            num_shared_experts=config["n_shared_experts"],
            attention=attention,
            num_expert_groups=(config.get("n_group") or 1) if grouped else 1,
            groups_per_token=(config.get("topk_group") or 1) if grouped else 1,
            sigmoid_routing=v3,
            normalize_weights=v3 and bool(config.get("norm_topk_prob")),
            routed_scale=float(config.get("routed_scaling_factor", 1.0)),
            rms_norm_eps=config["rms_norm_eps"],
            context_length=config.get("max_position_embeddings") or cls.context_length,
            indexer=IndexerConfig(**{ours: config[theirs] for ours, theirs in INDEXER_SETTINGS.items()})
            if sparse
            else None,
        )


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

        order = jnp.argsort(experts.reshape(-1))
        sizes = jnp.bincount(experts.reshape(-1), length=config.num_experts).astype(jnp.int32)
        source = order // config.experts_per_token
        gate_up = jax.lax.ragged_dot(tokens[source], self.gate_up[...], sizes, precision=PRECISION)
        gate, up = jnp.split(gate_up, 2, axis=-1)
        out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, self.down[...], sizes, precision=PRECISION)
        out = out * weights.reshape(-1)[order][:, None].astype(out.dtype)
        routed = jnp.zeros_like(tokens).at[source].add(out)
        return routed.reshape(x.shape) + self.shared(x)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP or experts, each added to the residual stream."""

    def __init__(
        self,
        config: DeepSeekConfig,
        dense: bool,
        dtype: DTypeLike,
        implementation: Any,
        rngs: nnx.Rngs,
    ):
        hidden, eps = config.attention.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(hidden, eps, dtype)
        self.attention = MultiHeadLatentAttention(
            config.attention, dtype=dtype, implementation=implementation, rngs=rngs
        )
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
        rngs: random weights are drawn from it; `load_transformers_weights` replaces them.
    """

    def __init__(
        self,
        config: DeepSeekConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.config, self.dtype = config, jnp.dtype(dtype)
        hidden = config.attention.hidden_size
        init = jax.nn.initializers.normal(0.02)
        self.embedding = nnx.Param(init(rngs.params(), (config.vocab_size, hidden), dtype))
        self.layers = nnx.List(
            DecoderLayer(config, layer < config.num_dense_layers, dtype, implementation, rngs)
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
        if cu_q_lens is None and tokens.shape[1] == 1 and self.config.indexer is None:
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
