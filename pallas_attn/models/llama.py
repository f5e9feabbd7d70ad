"""A Llama-family decoder in Flax NNX whose attention runs on a paged KV cache.

Rotary embeddings, norms, a gated MLP or experts, grouped-query attention, optionally tied embeddings. Each difference
of another family is an option of `LlamaConfig`, and a line or two here. The layers' weights are stacked and scanned:
one layer is compiled instead of thirty, and the scan carries the one KV pool of all layers in place.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_attn import PagedKVCache, PagedLatentCache
from pallas_attn._call.checks import ArgumentChecker, fail
from pallas_attn._call.device import current_device
from pallas_attn._call.optional import needs_extra
from pallas_attn._call.pools import is_quantized
from pallas_attn.nn import LatentGQA, PagedAttention
from pallas_attn.nn._new_tokens import NewTokens, once_for_all_layers
from pallas_attn.nn.layers import PRECISION, LayerNorm, RMSNorm, advanced, linear
from pallas_attn.nn.rotary import ByLength, apply_rotary, rotary_angles, rotary_frequencies

with needs_extra("models", user="pallas_attn.models.llama"):
    from flax import nnx

from .experts import through_experts
from .llama_config import LlamaConfig as LlamaConfig

_HELD_TWICE = 2 * 2**30  # bytes

type Attending = Literal["gqa", "mla"]
type Cache = Any
"""A `PagedKVCache` or a `PagedLatentCache`, as `Llama.create_cache` makes it."""


def _norm(config: LlamaConfig, shape: int | tuple[int, ...], dtype: DTypeLike) -> RMSNorm | LayerNorm:
    if config.norm == "layer":
        return LayerNorm(shape, config.rms_norm_eps, dtype)
    assert isinstance(shape, int)
    return RMSNorm(shape, config.rms_norm_eps, dtype, around_one=config.norm == "rms_around_one")


class Attention(nnx.Module):
    """Grouped-query attention; query, key and value come out of one projection, in this order."""

    def __init__(
        self,
        config: LlamaConfig,
        dtype: DTypeLike,
        attention: Attending,
        options: dict[str, Any],
        rngs: nnx.Rngs,
    ):
        self.config = config
        num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        width = (num_heads + 2 * num_kv_heads) * head_dim
        self.qkv_proj = linear(config.hidden_size, width, dtype, rngs, bias=config.qkv_bias)
        shapes: list[Any] = [head_dim] * 2
        if config.qk_norm in ("each", "all"):
            shapes = [(num_heads, head_dim), (num_kv_heads, head_dim)]
        if config.qk_norm == "all":
            shapes = [heads * dim for heads, dim in shapes]
        self.q_norm, self.k_norm = (
            _norm(config, shape, dtype) if config.qk_norm else None for shape in shapes
        )
        self.o_proj = linear(num_heads * head_dim, config.hidden_size, dtype, rngs, bias=config.output_bias)
        if attention == "mla":
            self.attend = LatentGQA(scale=config.scale, **options)
        else:
            self.attend = PagedAttention(
                scale=config.scale,
                softcap=config.softcap,
                sliding_window=config.sliding_window,
                sinks=config.sinks,
                num_heads=num_heads if config.sinks else None,
                **options,
            )

    def __call__(self, x, rotary, cache: Cache, layer, tokens, window) -> tuple[jax.Array, Cache]:
        config = self.config
        heads = self.qkv_proj(x).reshape(*x.shape[:-1], -1, config.head_dim)
        query, key, value = jnp.split(
            heads, [config.num_heads, config.num_heads + config.num_kv_heads], axis=-2
        )
        query, key = (
            apply_rotary(self._normed(x, norm), *rotary, interleaved=config.rope_interleaved)
            for x, norm in ((query, self.q_norm), (key, self.k_norm))
        )
        options = tokens if window is None else {**tokens, "sliding_window": window}
        output, cache = self.attend(query, key, value, cache, layer, **options)
        return self.o_proj(output.reshape(*x.shape[:-1], -1)), cache

    def _normed(self, heads: jax.Array, norm: RMSNorm | LayerNorm | None) -> jax.Array:
        if norm is None:
            return heads
        if self.config.qk_norm == "all":
            return norm(heads.reshape(*heads.shape[:-2], -1)).reshape(heads.shape)
        return norm(heads)


def _gated(config: LlamaConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
    if config.activation == "clipped_swiglu":
        limit = config.swiglu_limit
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1) * gate * jax.nn.sigmoid(gate * config.swiglu_alpha)
    return (jax.nn.silu(gate) if config.activation == "silu" else jax.nn.gelu(gate, approximate=True)) * up


class MLP(nnx.Module):
    """A gated MLP; gate and up come out of one projection, in this order."""

    def __init__(self, config: LlamaConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config, bias = config, config.mlp_bias
        self.gate_up_proj = linear(config.hidden_size, 2 * config.intermediate_size, dtype, rngs, bias=bias)
        self.down_proj = linear(config.intermediate_size, config.hidden_size, dtype, rngs, bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(_gated(self.config, *jnp.split(self.gate_up_proj(x), 2, axis=-1)))


class MoE(nnx.Module):
    """Experts, of which each token has its few."""

    def __init__(self, config: LlamaConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        assert config.experts is not None
        self.config, experts = config, config.experts
        hidden, width, count = config.hidden_size, experts.width, experts.count
        init = jax.nn.initializers.normal(0.02)
        self.router = nnx.Param(init(rngs.params(), (count, hidden), jnp.float32))
        self.gate_up = nnx.Param(init(rngs.params(), (count, hidden, 2 * width), dtype))
        self.down = nnx.Param(init(rngs.params(), (count, width, hidden), dtype))
        if experts.biases:
            self.router_bias = nnx.Param(jnp.zeros(count, jnp.float32))
            self.gate_up_bias = nnx.Param(jnp.zeros((count, 2 * width), dtype))
            self.down_bias = nnx.Param(jnp.zeros((count, hidden), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        experts = self.config.experts
        assert experts is not None
        tokens, biases = x.reshape(-1, x.shape[-1]), {}
        scores = jnp.einsum("th,eh->te", tokens.astype(jnp.float32), self.router[...], precision=PRECISION)
        if experts.biases:
            scores += self.router_bias[...]
            biases = dict(gate_up_bias=self.gate_up_bias[...], down_bias=self.down_bias[...])
        best, chosen = jax.lax.top_k(scores, experts.per_token)
        among = best if experts.normalize else scores
        weights = jnp.exp(best - jax.nn.logsumexp(among, axis=-1, keepdims=True))
        gated = functools.partial(_gated, self.config)
        out = through_experts(tokens, chosen, weights, self.gate_up[...], self.down[...], gated, **biases)
        return out.reshape(x.shape)


class DecoderLayer(nnx.Module):
    """Attention and MLP, each added to the residual stream; one behind the other, or side by side."""

    def __init__(
        self,
        config: LlamaConfig,
        dtype: DTypeLike,
        attention: Attending,
        options: dict[str, Any],
        rngs: nnx.Rngs,
    ):
        self.config = config

        def norm(wanted: bool) -> RMSNorm | LayerNorm | None:
            return _norm(config, config.hidden_size, dtype) if wanted else None

        self.attention_norm = norm(config.norm_before)
        self.attention = Attention(config, dtype, attention, options, rngs)
        self.attention_output_norm = norm(config.norm_behind)
        self.mlp_norm = norm(config.norm_before and not config.parallel)
        self.mlp = (MLP if config.experts is None else MoE)(config, dtype, rngs)
        self.mlp_output_norm = norm(config.norm_behind)

    def __call__(self, x, rotary, cache: Cache, layer, tokens, window) -> tuple[jax.Array, Cache]:
        normed = self._maybe(self.attention_norm, x)
        output, cache = self.attention(normed, rotary, cache, layer, tokens, window)
        added = x + self._maybe(self.attention_output_norm, output) * self.config.residual_scale
        normed = normed if self.config.parallel else self._maybe(self.mlp_norm, added)
        output = self._maybe(self.mlp_output_norm, self.mlp(normed))
        return added + output * self.config.residual_scale, cache

    def _maybe(self, norm: RMSNorm | LayerNorm | None, x: jax.Array) -> jax.Array:
        return x if norm is None else norm(x)


class Llama(nnx.Module):
    """The decoder: tokens and a cache in, hidden states and the extended cache out.

    Args:
        config: sizes.
        dtype: of weights and activations, float32 or bfloat16; norms, softmax and logits are float32.
        attention: "gqa" decodes by `paged_attention` over a `PagedKVCache`; "mla" by `mla_decode` over a
            `PagedLatentCache`, which computes the same (see `pallas_attn.nn.LatentGQA`).
        implementation: which implementation of the attention ops to force; ``None`` picks the best.
        batch_invariant: attention whose bits do not depend on the batch (see `PagedAttention`), and an `Engine` and
            `generate` whose answers do not; a call of the model alone still has products of as many tokens as it is
            given, which XLA may round otherwise for another number.
        rngs: random weights are drawn from it. To load real ones see `pallas_attn.models.load_gguf`.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        attention: Attending = "gqa",
        implementation: str | None = None,
        batch_invariant: bool = False,
        rngs: nnx.Rngs,
    ):
        ArgumentChecker("Llama").flag("batch_invariant", batch_invariant)
        if attention not in ("gqa", "mla"):
            fail("Llama", "attention", "'gqa' or 'mla'", repr(attention))
        if attention == "mla" and 2 * config.num_kv_heads * config.head_dim > 512:
            expected = "'gqa' for a model whose keys and values of all heads are wider than 512"
            fail("Llama", "attention", expected, "'mla'")
        own = {"sliding_window": "a sliding window", "softcap": "a soft cap"}
        for name, words in (own | {"sinks": "attention sinks"}).items():
            if attention == "mla" and getattr(config, name):
                fail("Llama", "attention", f"'gqa' for a model with {words}", "'mla'")
        self.config = config
        self.attention: Attending = attention
        self.dtype = jnp.dtype(dtype)
        self.implementation, self.batch_invariant = implementation, bool(batch_invariant)
        options = dict(implementation=implementation, batch_invariant=batch_invariant)
        init = jax.nn.initializers.normal(0.02)
        self.embedding = nnx.Param(init(rngs.params(), (config.vocab_size, config.hidden_size), dtype))

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack_of_layers(rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(config, dtype, attention, options, rngs)

        # One module whose parameters have a leading axis [num_layers, ...].
        self.layers = stack_of_layers(rngs)
        self.norm = _norm(config, config.hidden_size, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Param(init(rngs.params(), (config.vocab_size, config.hidden_size), dtype))

    def create_cache(
        self, *, num_pages: int, page_size: int, block_tables: jax.Array, dtype: Any = None
    ) -> PagedKVCache | PagedLatentCache:
        """An empty cache of the kind this model's attention wants, with `num_pages` pages for each layer.

        dtype: of the cache; None means the model's. Latent caches have no other. In an 8-bit one each page has scales
            of its own (see `PagedKVCache`); with `batch_invariant` all scales are 1, and int8 is refused.
        """
        config = self.config
        sizes: dict[str, Any] = dict(
            num_layers=config.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            block_tables=block_tables,
            dtype=self.dtype if dtype is None else dtype,
        )
        if self.attention == "mla":
            if sizes["dtype"] != self.dtype:
                fail("create_cache", "dtype", f"{self.dtype} (the model's) with attention='mla'", str(dtype))
            return PagedLatentCache.create(**sizes)
        heads = dict(num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)
        if self.batch_invariant and jnp.dtype(sizes["dtype"]) == jnp.int8:
            fail(
                "create_cache",
                "dtype",
                "a floating-point one with batch_invariant (its scales are 1)",
                "int8",
            )
        by_page = is_quantized(sizes["dtype"]) and not self.batch_invariant
        return PagedKVCache.create(**heads, **sizes, scale_per_page=by_page)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: Cache,
        *,
        cu_q_lens: jax.Array | None = None,
        unstacked: Sequence[Any] | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Runs new tokens of every sequence through the layers: prompts, chunks of them, tokens of answers.

        Args:
            tokens: ``[num_seqs, n]`` int32 token ids in ``[0, vocab_size)``, or ragged ``[total_tokens]``, all
                sequences' end to end.
            positions: int32, of the same shape; those of a sequence follow each other. Negative marks padding and
                finished sequences, which write nothing (see `PagedAttention`).
            cache: pages of `config.num_layers` layers.
            cu_q_lens: ``[num_seqs + 1]`` int32, for the ragged form: where each sequence's tokens begin and end.
            unstacked: `unstacked()`, to compute layers one after the other instead of in a scan.

        Returns:
            Normalised hidden states ``[..., hidden_size]`` for `logits`, and the cache holding the new tokens, with
            `seq_lens` advanced to the last of them.
        """
        config = self.config
        graph, stacked = nnx.split(self.layers)
        new = once_for_all_layers("Llama", positions, cu_q_lens)
        whose: dict[str, Any] = {"positions": new}
        rotary = self._rotary(positions, new)

        def one_layer(carry, xs):
            x, cache = carry
            weights, layer, window, rotation = xs
            turned = rotary if rotation is None else tuple(angles[rotation] for angles in rotary)
            return nnx.merge(graph, weights)(x, turned, cache, layer, whose, window), None

        layers = jnp.arange(config.num_layers, dtype=jnp.int32)
        windows, rotations = (
            None if of is None else jnp.array(of, jnp.int32)
            for of in (config.layer_windows, config.layer_rotations)
        )
        carry = (self.embedding[...][tokens] * config.embedding_scale, cache)
        if unstacked is None:
            carry, _ = jax.lax.scan(one_layer, carry, (stacked, layers, windows, rotations))
        else:
            for layer, weights in enumerate(unstacked):
                own = (None if of is None else of[layer] for of in (windows, rotations))
                carry, _ = one_layer(carry, (weights, layer, *own))
        x, cache = carry
        return self.norm(x), cache.replace(seq_lens=advanced(cache.seq_lens, positions, cu_q_lens))

    def _rotary(self, positions: jax.Array, new: jax.Array | NewTokens) -> tuple[jax.Array, jax.Array]:
        """Cosines and sines [..., 1, rotary_dim // 2]; of every rotation, stacked, if layers have different ones."""
        config, stretch, lengths = self.config, self.config.rope_stretch, None
        dim = config.rotary_dim or config.head_dim
        if isinstance(stretch, ByLength):
            if config.rope_length is not None:
                lengths = jnp.full_like(positions, config.rope_length)
            elif positions.ndim == 2:
                lengths = jnp.broadcast_to(positions.max(axis=1, keepdims=True) + 1, positions.shape)
            else:
                assert isinstance(new, NewTokens)
                lengths = new.seq_lens[new.rows]
        frequencies = rotary_frequencies(dim, config.rope_theta, stretch, lengths)
        usual = rotary_angles(positions, frequencies, stretch.rotary_scale if stretch else 1.0)
        if config.layer_rotations is None:
            return usual
        theta = config.window_rope_theta or config.rope_theta
        in_windows = rotary_angles(positions, rotary_frequencies(dim, theta))
        none = jnp.ones_like(usual[0]), jnp.zeros_like(usual[1])
        cosines, sines = zip(usual, in_windows, none, strict=True)
        return jnp.stack(cosines), jnp.stack(sines)

    def unstacked(self) -> list[Any]:
        """The weights of each layer by itself."""
        _, stacked = nnx.split(self.layers)
        return [
            jax.tree.map(lambda x, layer=layer: x[layer], stacked) for layer in range(self.config.num_layers)
        ]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Scores of every token: ``[..., hidden_size]`` to float32 ``[..., vocab_size]``."""
        config = self.config
        table = self.embedding if config.tie_word_embeddings else self.lm_head
        scores = jnp.einsum(
            "...h,vh->...v", hidden, table[...], precision=PRECISION, preferred_element_type=jnp.float32
        )
        if config.logit_scale != 1:
            scores *= config.logit_scale
        cap = config.logit_softcap
        return scores if cap is None else cap * jnp.tanh(scores / cap)


def for_a_loop[Model: nnx.Module](model: Model) -> Model | Callable[..., Any]:
    """The model's call, for the steps of a loop that starts after this.

    On a GPU a scan copies each layer's weights out of the stack in every step, a quarter of a small model's time; here
    that is done once, unless holding all weights twice would matter."""
    if not isinstance(model, Llama) or current_device().platform != "gpu":
        return model
    _, stacked = nnx.split(model.layers)
    if sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(stacked)) > _HELD_TWICE:
        return model
    return functools.partial(model, unstacked=model.unstacked())


def invariant(function: str, model: Any) -> Any:
    """The same weights, with attention whose bits do not depend on the batch."""
    if not hasattr(model, "batch_invariant"):
        fail(
            function,
            "batch_invariant",
            f"False for a {type(model).__name__}, which has no such option",
            "True",
        )
    if getattr(model.config, "indexer", None) is not None:
        fail(function, "batch_invariant", "False for a model with indexers", "True")
    model = nnx.merge(*nnx.split(model))
    model.set_attributes(batch_invariant=True)
    return model


def for_lengths[Model: nnx.Module](model: Model, most: int) -> Model:
    """The model for texts of up to `most` tokens: if rotary frequencies depend on the length, those of that length are
    used throughout, since keys are shared and read in chunks."""
    if not isinstance(model, Llama) or not isinstance(model.config.rope_stretch, ByLength):
        return model
    pinned = nnx.merge(*nnx.split(model))
    pinned.config = dataclasses.replace(model.config, rope_length=most)
    return pinned
