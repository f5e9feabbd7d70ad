"""A Llama-family decoder in Flax NNX whose attention runs on a paged KV cache.

Rotary embeddings, RMSNorm, SwiGLU, grouped-query attention, optionally tied embeddings. The layers' weights
are stacked and scanned: one layer is compiled instead of thirty, and the scan carries the one KV pool of all
layers in place.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_attn import PagedKVCache, PagedLatentCache
from pallas_attn._call.checks import check_int, fail
from pallas_attn._call.device import current_device
from pallas_attn._call.optional import needs_extra
from pallas_attn._tile.quantization import is_quantized
from pallas_attn.nn import LatentGQA, PagedAttention
from pallas_attn.nn._new_tokens import once_for_all_layers
from pallas_attn.nn.layers import PRECISION, RMSNorm, advanced, linear
from pallas_attn.nn.rotary import Stretch, apply_rotary, rotary_angles, rotary_frequencies

with needs_extra("models", user="pallas_attn.models.llama"):
    from flax import nnx

_HELD_TWICE = 2 * 2**30  # bytes

type Attending = Literal["gqa", "mla"]
type Cache = Any
"""A `PagedKVCache` or a `PagedLatentCache`, as `Llama.create_cache` makes it."""


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama-family decoder.

    Attributes:
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP.
        num_layers: decoder layers.
        num_heads: query heads; a multiple of `num_kv_heads`.
        num_kv_heads: key and value heads.
        head_dim: width of one head; even, since rotary embeddings turn pairs.
        context_length: most tokens, prompt and answer together, that the model was trained on.
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: added to the mean square before its root is taken.
        tie_word_embeddings: whether the embedding is also the output projection.
        qkv_bias: whether the projections of query, key and value have biases (Qwen 2).
        qk_norm: whether each head of query and key is normalised before the rotary embedding (Qwen 3).
        sliding_window: tokens that a query sees, itself included, in the layers that have a window; None for all.
        full_layers: layers that see everything all the same.
        rope_stretch: how the rotary frequencies are stretched for a context longer than trained, if they are.

    Raises:
        TypeError: a size that is no int.
        ValueError: a size below 1, `num_heads` is no multiple of `num_kv_heads`, or `head_dim` is odd.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    full_layers: tuple[int, ...] = ()
    rope_stretch: Stretch | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if field.type is int:
                check_int("LlamaConfig", field.name, getattr(self, field.name), least=1)
        if self.num_heads % self.num_kv_heads:
            expected = f"a multiple of num_kv_heads ({self.num_kv_heads})"
            fail("LlamaConfig", "num_heads", expected, str(self.num_heads))
        if self.head_dim % 2:
            fail("LlamaConfig", "head_dim", "an even number", str(self.head_dim))
        if self.sliding_window is not None:
            check_int("LlamaConfig", "sliding_window", self.sliding_window, least=1)
        for layer in self.full_layers:
            check_int("LlamaConfig", "full_layers", layer, least=0, most=self.num_layers - 1)

    @property
    def layer_windows(self) -> tuple[int, ...] | None:
        """Of each layer, all tokens where it has none; None if one window, or none, serves all layers."""
        if self.sliding_window is None or not self.full_layers:
            return None
        every = int(np.iinfo(np.int32).max)
        return tuple(
            every if layer in self.full_layers else self.sliding_window for layer in range(self.num_layers)
        )


class Attention(nnx.Module):
    """Grouped-query attention; query, key and value come out of one projection, in this order."""

    def __init__(
        self,
        config: LlamaConfig,
        dtype: DTypeLike,
        attention: Attending,
        implementation: Any,
        rngs: nnx.Rngs,
    ):
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        all_heads = config.num_heads + 2 * config.num_kv_heads
        width = all_heads * config.head_dim
        self.qkv_proj = linear(config.hidden_size, width, dtype, rngs, bias=config.qkv_bias)
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None for _ in range(2)
        )
        self.o_proj = linear(config.num_heads * config.head_dim, config.hidden_size, dtype, rngs)
        if attention == "mla":
            self.attend = LatentGQA(implementation=implementation)
        else:
            self.attend = PagedAttention(sliding_window=config.sliding_window, implementation=implementation)

    def __call__(self, x, rotary, cache: Cache, layer, tokens, window) -> tuple[jax.Array, Cache]:
        heads = self.qkv_proj(x).reshape(*x.shape[:-1], -1, self.head_dim)
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        query, key, value = jnp.split(heads, [num_heads, num_heads + num_kv_heads], axis=-2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = apply_rotary(query, *rotary), apply_rotary(key, *rotary)
        options = tokens if window is None else {**tokens, "sliding_window": window}
        output, cache = self.attend(query, key, value, cache, layer, **options)
        return self.o_proj(output.reshape(*x.shape[:-1], -1)), cache


class MLP(nnx.Module):
    """SwiGLU; gate and up come out of one projection, in this order."""

    def __init__(self, config: LlamaConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        self.gate_up_proj = linear(config.hidden_size, 2 * config.intermediate_size, dtype, rngs)
        self.down_proj = linear(config.intermediate_size, config.hidden_size, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(jax.nn.silu(gate) * up)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(
        self,
        config: LlamaConfig,
        dtype: DTypeLike,
        attention: Attending,
        implementation: str | None,
        rngs: nnx.Rngs,
    ):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, dtype, attention, implementation, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(self, x, rotary, cache: Cache, layer, tokens, window) -> tuple[jax.Array, Cache]:
        output, cache = self.attention(self.attention_norm(x), rotary, cache, layer, tokens, window)
        x = x + output
        return x + self.mlp(self.mlp_norm(x)), cache


class Llama(nnx.Module):
    """The decoder: tokens and a cache in, hidden states and the extended cache out.

    Args:
        config: sizes.
        dtype: of weights and activations, float32 or bfloat16; norms, softmax and logits are float32.
        attention: "gqa" decodes by `paged_attention` over a `PagedKVCache`; "mla" by `mla_decode` over a
            `PagedLatentCache`, which computes the same (see `pallas_attn.nn.LatentGQA`).
        implementation: which implementation of the attention ops to force; ``None`` picks the best.
        rngs: random weights are drawn from it. To load real ones see `pallas_attn.models.load_gguf`.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        attention: Attending = "gqa",
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        if attention not in ("gqa", "mla"):
            fail("Llama", "attention", "'gqa' or 'mla'", repr(attention))
        if attention == "mla" and 2 * config.num_kv_heads * config.head_dim > 512:
            expected = "'gqa' for a model whose keys and values of all heads are wider than 512"
            fail("Llama", "attention", expected, "'mla'")
        if attention == "mla" and config.sliding_window is not None:
            fail("Llama", "attention", "'gqa' for a model with a sliding window", "'mla'")
        self.config = config
        self.attention: Attending = attention
        self.dtype = jnp.dtype(dtype)
        self.implementation = implementation
        init = jax.nn.initializers.normal(0.02)
        self.embedding = nnx.Param(init(rngs.params(), (config.vocab_size, config.hidden_size), dtype))

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack_of_layers(rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(config, dtype, attention, implementation, rngs)

        # One module whose parameters have a leading axis [num_layers, ...].
        self.layers = stack_of_layers(rngs)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Param(init(rngs.params(), (config.vocab_size, config.hidden_size), dtype))

    def create_cache(
        self, *, num_pages: int, page_size: int, block_tables: jax.Array, dtype: Any = None
    ) -> PagedKVCache | PagedLatentCache:
        """An empty cache of the kind this model's attention wants, with `num_pages` pages for each layer.

        dtype: of the cache; None means the model's. Latent caches have no other. In an 8-bit one each page has scales
            of its own (see `PagedKVCache`).
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
        return PagedKVCache.create(**heads, **sizes, scale_per_page=is_quantized(sizes["dtype"]))

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
        config, stretch = self.config, self.config.rope_stretch
        frequencies = rotary_frequencies(config.head_dim, config.rope_theta, stretch)
        rotary = rotary_angles(positions, frequencies, stretch.rotary_scale if stretch else 1.0)
        graph, stacked = nnx.split(self.layers)
        whose: dict[str, Any] = {"positions": once_for_all_layers("Llama", positions, cu_q_lens)}

        def one_layer(carry, xs):
            x, cache = carry
            weights, layer, window = xs
            return nnx.merge(graph, weights)(x, rotary, cache, layer, whose, window), None

        layers = jnp.arange(config.num_layers, dtype=jnp.int32)
        windows = None if config.layer_windows is None else jnp.array(config.layer_windows, jnp.int32)
        carry = (self.embedding[...][tokens], cache)
        if unstacked is None:
            carry, _ = jax.lax.scan(one_layer, carry, (stacked, layers, windows))
        else:
            for layer, weights in enumerate(unstacked):
                carry, _ = one_layer(carry, (weights, layer, None if windows is None else windows[layer]))
        x, cache = carry
        return self.norm(x), cache.replace(seq_lens=advanced(cache.seq_lens, positions, cu_q_lens))

    def unstacked(self) -> list[Any]:
        """The weights of each layer by itself."""
        _, stacked = nnx.split(self.layers)
        return [
            jax.tree.map(lambda x, layer=layer: x[layer], stacked) for layer in range(self.config.num_layers)
        ]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Scores of every token: ``[..., hidden_size]`` to float32 ``[..., vocab_size]``."""
        table = self.embedding if self.config.tie_word_embeddings else self.lm_head
        return jnp.einsum(
            "...h,vh->...v", hidden, table[...], precision=PRECISION, preferred_element_type=jnp.float32
        )


def for_a_loop[Model: nnx.Module](model: Model) -> Model | Callable[..., Any]:
    """The model's call, for the steps of a loop that begins behind this.

    On a GPU a scan copies each layer's weights out of the stack in every step, which takes a quarter of a small model's
    time; here it is done once. Not where holding all weights twice would matter."""
    if not isinstance(model, Llama) or current_device().platform != "gpu":
        return model
    _, stacked = nnx.split(model.layers)
    if sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(stacked)) > _HELD_TWICE:
        return model
    return functools.partial(model, unstacked=model.unstacked())
