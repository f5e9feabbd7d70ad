"""Multi-head latent attention as a Flax NNX module, in its two forms."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_attn import MLASchedule, PagedLatentCache, mla_decode, mla_prefill, sparse_mla_decode
from pallas_attn._call import dispatch
from pallas_attn._call.checks import ArgumentChecker, shown
from pallas_attn._call.optional import needs_extra
from pallas_attn._call.options import DTYPES
from pallas_attn._tile.latents import BYTES, LATENT_DIM, ROPE_DIM
from pallas_attn._types import ImplementationOrCuda
from pallas_attn.ops.kv_cache.addressing import check_layer

with needs_extra("models", user="pallas_attn.nn"):
    from flax import nnx

from ._new_tokens import NewTokens, is_ragged, poison_unless_newest
from ._paged import check_positions, leading
from .layers import PRECISION, RMSNorm, linear
from .rotary import Yarn, apply_rotary, rotary_angles, rotary_frequencies


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

    Raises:
        TypeError, ValueError: a size that is no int of at least 1, or that the kernel does not serve; a number that is
            not above 0.
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
        check = ArgumentChecker("MLAConfig")
        for name in ("hidden_size", "num_heads", "qk_nope_head_dim", "v_head_dim"):
            check.count(name, getattr(self, name))
        if self.q_lora_rank is not None:
            check.count("q_lora_rank", self.q_lora_rank)
        # The sizes that the kernel serves.
        for name, size in (("kv_lora_rank", LATENT_DIM), ("qk_rope_head_dim", ROPE_DIM)):
            check.count(name, getattr(self, name))
            if getattr(self, name) != size:
                check.fail(name, str(size), str(getattr(self, name)))
        for name in ("rope_theta", "rms_norm_eps"):
            check.positive_float(name, getattr(self, name), optional=False)
        check.instance("yarn", self.yarn, Yarn, optional=True)
        check.flag("rope_interleaved", self.rope_interleaved)

    @property
    def scale(self) -> float:
        """Factor of the logits: by the head size before absorption, times YaRN's."""
        head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        return head_dim**-0.5 * (self.yarn.logit_scale if self.yarn else 1.0)


class MultiHeadLatentAttention(nnx.Module):
    """Projections, rotary embedding and attention of one layer over a `PagedLatentCache`.

    A token is cached as a normalised latent c of 512 elements and a rotary key of 64 that all heads share. A head's
    key is [W_k c, rotary] and its value W_v c. The two forms compute the same:

    - projected: expand c to keys and values of every head, then attend. Cheap per (query, token) pair, 192 + 128
      products, but the expansion of every token must be paid: right for prompts, whose many queries share it.
    - absorbed: (W_k c) . q = c . (W_k^T q), so multiply W_k into the query instead and attend over the latents
      themselves; sum_j p_j W_v c_j = W_v sum_j p_j c_j, so W_v comes after. Costs 576 + 512 products a pair but
      reads 1152 bytes a token for all heads: right for decoding.

    With `indices`, from an `Indexer`, attention is sparse and absorbed: one path for prompts, chunks and decoding.

    Args:
        config: sizes.
        dtype: of weights and activations, bfloat16, float16 or float32: the cache's, unless that is fp8.
        implementation: which implementation of `mla_decode`, `mla_prefill` and `sparse_mla_decode` to force; None picks
            the best. `mla_prefill` takes "cuda" as None.
        batch_invariant: a token's attention has the same bits, given the same query and latents, whatever else is in
            the batch, and in whichever form and chunks its sequence came: `mla_decode(batch_invariant=True)` serves
            each token by itself, in the absorbed form. Neither with "cuda" nor with "xla", nor with indices. The
            projections are XLA's products, whose bits may depend on how many tokens there are.
        rngs: random weights are drawn from it.

    Raises:
        TypeError, ValueError: an argument of the wrong type, or a dtype or implementation that there is not.
    """

    def __init__(
        self,
        config: MLAConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        implementation: ImplementationOrCuda | None = None,
        batch_invariant: bool = False,
        rngs: nnx.Rngs,
    ):
        check = ArgumentChecker("MultiHeadLatentAttention")
        check.instance("config", config, MLAConfig)
        check.dtype("dtype", dtype, DTYPES)
        dispatch.check_name(check.function, "mla_decode", implementation)
        check.flag("batch_invariant", batch_invariant)
        check.instance("rngs", rngs, nnx.Rngs)
        self.config, self.dtype, self.batch_invariant = config, jnp.dtype(dtype), bool(batch_invariant)
        self.implementation: ImplementationOrCuda | None = implementation
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
        # The two halves of DeepSeek's kv_b_proj, by head.
        self.key_up = nnx.Param(init(rngs.params(), (heads, nope, latent), dtype))
        self.value_up = nnx.Param(init(rngs.params(), (heads, value, latent), dtype))
        self.o_proj = linear(heads * value, config.hidden_size, dtype, rngs)

    def __call__(
        self,
        x: jax.Array,
        cache: PagedLatentCache,
        layer: jax.Array | int,
        positions: jax.Array | NewTokens,
        *,
        cu_q_lens: jax.Array | None = None,
        schedule: MLASchedule | None = None,
        absorbed: bool | None = None,
        indices: jax.Array | None = None,
    ) -> tuple[jax.Array, PagedLatentCache]:
        """Attends from the new tokens of every sequence to what its pages hold, these tokens included.

        Args:
            x: [num_seqs, n, hidden_size], or ragged [total_tokens, hidden_size], all sequences' tokens end to end;
                bfloat16, float16 or float32; cast to the module's dtype.
            cache: the latents of all layers, in the module's dtype, or fp8 (656 bytes a token), which is read as it was
                rounded, by queries rounded to bf16. Donate it to the surrounding jit, or the write copies it.
            layer: index of this layer in the cache; an int or an integer scalar that may be traced.
            positions: [num_seqs, n] or [total_tokens] int32 position of each token in its sequence; a sequence's follow
                each other. Negative marks padding or a finished sequence: nothing is written and the output before
                `o_proj` is zeros. Other positions give NaN in the tokens of their sequence if they are traced; known
                ones are checked, which outside jit reads them from the device.
            cu_q_lens: [num_seqs + 1] int32, for the ragged form: where each sequence's tokens begin, from 0, and where
                the last one's end; tokens behind are padding, and all are where a traced array descends.
            schedule: from `mla_schedule` for `num_heads` heads, `q_len = n` and the lengths after this step; for
                `absorbed` alone. Make it once for all layers.
            absorbed: None is True for one token of each sequence, else False. True takes `mla_decode`, for a few tokens
                of each sequence, [num_seqs, n], the newest in the last column and padding before them. False takes
                `mla_prefill`, for any number, chunks of prompts among tokens of answers; it chooses the form.
            indices: [num_seqs, n, top_k] or [total_tokens, top_k] int32 positions in its sequence that each token
                attends to, in any order, instead of all up to its own; -1 is skipped, and there is no causal mask.

        Returns:
            The output in x's shape and the cache with the new tokens in it; its `seq_lens` are left for the model to
            advance.

        Raises:
            TypeError: another cache, or an argument of the wrong type or dtype.
            ValueError: shapes that do not fit each other, a layer out of range, positions that the form cannot serve,
                a schedule or `cu_q_lens` that the form does not take, a schedule or a form beside indices, or a
                forced implementation that cannot serve, with its reason.
        """
        config = self.config
        check = ArgumentChecker("MultiHeadLatentAttention")
        check.instance("cache", cache, PagedLatentCache)
        layer = check_layer(check, layer, cache.num_layers)
        check.bind("cache", num_seqs=cache.shared_tables.shape[0])
        check.array("x", x, (*leading(positions, cu_q_lens), config.hidden_size), DTYPES)
        check_positions(check, positions, cu_q_lens)
        check.non_empty("x", x)
        check.instance("schedule", schedule, MLASchedule, optional=True)
        if absorbed is not None:
            check.flag("absorbed", absorbed)
        if indices is not None:
            check.array("indices", indices, (*leading(positions, cu_q_lens), "top_k"), [jnp.int32])
            check.non_empty("indices", indices)
            for name, value in (("schedule", schedule), ("absorbed", absorbed)):
                if value is not None:
                    check.fail(name, "None with indices", shown(value))
            if self.batch_invariant:
                check.fail("indices", "None with batch_invariant", "an array")
            absorbed = False
        batched = not is_ragged(positions, cu_q_lens)
        absorbed = batched and x.shape[1] == 1 if absorbed is None else bool(absorbed)
        if schedule is not None and not absorbed:
            check.fail("schedule", "None without absorbed", "an MLASchedule")
        if schedule is not None and self.batch_invariant:
            check.fail("schedule", "None with batch_invariant", "an MLASchedule")
        if absorbed and not batched:
            check.fail("absorbed", "False or None with cu_q_lens", "True")
        # Several tokens of a sequence would be split together.
        absorbed = absorbed and not (self.batch_invariant and x.shape[1] > 1)
        check.dtype_among("cache.latent_cache", cache.latent_cache, [self.dtype, BYTES])
        if isinstance(positions, NewTokens):
            new, positions = positions, positions.came
        else:
            new = None if absorbed else NewTokens.of(check, positions, cu_q_lens)
        x, positions = jnp.asarray(x), jnp.asarray(positions)

        queries = self._queries(x)
        q_nope, q_rope = jnp.split(queries, [config.qk_nope_head_dim], axis=-1)
        latent, k_rope = jnp.split(self.kv_a_proj(x), [config.kv_lora_rank], axis=-1)
        latent = self.kv_a_norm(latent)
        frequencies = rotary_frequencies(config.qk_rope_head_dim, config.rope_theta, config.yarn)
        angles = rotary_angles(positions, frequencies, config.yarn.rotary_scale if config.yarn else 1.0)
        q_rope = apply_rotary(q_rope, *angles, interleaved=config.rope_interleaved)
        k_rope = apply_rotary(k_rope[..., None, :], *angles, interleaved=config.rope_interleaved)[..., 0, :]
        latents = jnp.concatenate([latent, k_rope], axis=-1)

        if new is None:
            cache = cache.write(layer, latents, positions)
            out = self._absorbed(q_nope, q_rope, cache, layer, jnp.max(positions, axis=1) + 1, schedule)
            if x.shape[1] > 1:  # a single token's positions are always valid
                out = poison_unless_newest(check, out, positions, layer)
        else:
            paged, within = new.pages(cache)
            paged = paged.write(layer, new.pack(latents)[:, None], within)
            cache = paged.replace(block_tables=cache.shared_tables)
            q_nope, q_rope = new.pack(q_nope), new.pack(q_rope)
            if indices is None and not self.batch_invariant:
                out = self._prefill(q_nope, q_rope, cache, layer, new)
            else:  # each token as its own sequence
                chosen = None if indices is None else new.pack(jnp.asarray(indices))[:, None]
                places, lens = new.by_token(cache), new.positions + 1
                out = self._absorbed(q_nope[:, None], q_rope[:, None], places, layer, lens, None, chosen)
                out = out[:, 0]
            out = new.unpack(out, layer, queries)
        return self.o_proj(out.reshape(*x.shape[:-1], -1)), cache

    def compressed_query(self, x: jax.Array) -> jax.Array:
        """[..., q_lora_rank] of x [..., hidden_size], for an `Indexer`; inside jit it is computed once
        with the call's own. ValueError for a module without (config.q_lora_rank None)."""
        if self.config.q_lora_rank is None:
            ArgumentChecker("MultiHeadLatentAttention").fail("config", "a q_lora_rank", "None")
        return self.q_a_norm(self.q_a_proj(x))

    def _queries(self, x: jax.Array) -> jax.Array:
        """[..., num_heads, nope + rope]."""
        compressed = self.config.q_lora_rank is not None
        flat = self.q_b_proj(self.compressed_query(x)) if compressed else self.q_proj(x)
        return flat.reshape(*x.shape[:-1], self.config.num_heads, -1)

    def _absorbed(
        self, q_nope, q_rope, cache: PagedLatentCache, layer, seq_lens, schedule, indices=None
    ) -> jax.Array:
        """A sequence of length 0 reads no page and gets zeros."""
        q_latent = jnp.einsum("bshn,hnc->bshc", q_nope, self.key_up[...], precision=PRECISION)
        query = jnp.concatenate([q_latent, q_rope], axis=-1)
        # Over fp8 latents the ops take bf16 queries.
        query = query.astype(jnp.bfloat16) if cache.latent_cache.dtype == BYTES else query
        tables = cache.layer_tables(layer)
        options: dict[str, Any] = dict(scale=self.config.scale, implementation=self.implementation)
        if indices is None:
            options |= dict(schedule=schedule, causal=True, batch_invariant=self.batch_invariant)
            out = mla_decode(query, cache.latent_cache, tables, seq_lens, **options)
        else:
            options |= dict(addressing="positions", block_tables=tables)
            indices = jnp.where(seq_lens[:, None, None] > 0, indices, -1)
            out = sparse_mla_decode(query, cache.latent_cache, indices, **options)
        out = out.astype(q_nope.dtype)
        return jnp.einsum("bshc,hvc->bshv", out, self.value_up[...], precision=PRECISION)

    def _prefill(self, q_nope, q_rope, cache: PagedLatentCache, layer, new: NewTokens) -> jax.Array:
        # Over fp8 latents the op takes bf16.
        dtype = jnp.bfloat16 if cache.latent_cache.dtype == BYTES else self.dtype
        out = mla_prefill(
            jnp.concatenate([q_nope, q_rope], axis=-1).astype(dtype),
            cache.latent_cache,
            cache.layer_tables(layer),
            new.seq_lens,
            new.cu_q_lens,
            key_up=self.key_up[...].astype(dtype),
            value_up=self.value_up[...].astype(dtype),
            scale=self.config.scale,
            implementation=None if self.implementation == "cuda" else self.implementation,
        )
        return out.astype(self.dtype)
