"""What a decoder's attention can be: ours in every way, cuDNN's in each way that can be told of documents, jax.nn's,
FlashAttention-3's for JAX.

All are causal, of [rows, length, heads, dim], and take `decoder.Documents`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from baselines import dew
from decoder import NAME, Attend, Documents
from jax.ad_checkpoint import checkpoint_name

import pallas_attn
from pallas_attn import FlashAttentionCudaConfig


class Attention(NamedTuple):
    title: str
    documents: str
    """How they are told to it."""
    attend: Attend
    keeps_apart: bool = True
    """Documents; else each row is one, and its losses are another model's."""
    ours: bool = False


def cu_lens(documents: Documents) -> jax.Array:
    """Where documents begin and the last one ends, rows one behind the other: a document ends with its row."""
    rows, length = documents.ids.shape
    first = documents.starts + jnp.arange(rows, dtype=jnp.int32)[:, None] * length
    return jnp.append(first.reshape(-1), jnp.int32(rows * length))


def by_ends(query: jax.Array, key: jax.Array, value: jax.Array, documents: Documents, **options: Any):
    ends = cu_lens(documents)
    flat = (x.reshape(1, -1, *x.shape[2:]) for x in (query, key, value))
    out = pallas_attn.flash_attention(
        *flat, cu_q_lens=ends, causal=True, residual_checkpoint_name=NAME, **options
    )
    return out.reshape(query.shape)


def by_ids(query: jax.Array, key: jax.Array, value: jax.Array, documents: Documents, **options: Any):
    return pallas_attn.flash_attention(
        query, key, value, segment_ids=documents.ids, causal=True, residual_checkpoint_name=NAME, **options
    )


def named(attend: Callable[..., jax.Array]) -> Attend:
    """A policy may keep what comes out; what else gradients need is worked out anew."""
    return lambda *given: checkpoint_name(attend(*given), NAME)


def packed_cudnn(query: jax.Array, key: jax.Array, value: jax.Array, documents: Documents) -> jax.Array:
    """By a private function of jax: `jax.nn` has no argument for offsets."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    # One more than documents; where there is -1 jax puts the end of all rows.
    starts = jnp.pad(documents.starts, ((0, 0), (0, 1)), constant_values=-1)
    where = dict(q_seqlen=documents.sizes, kv_seqlen=documents.sizes, q_offsets=starts, kv_offsets=starts)
    attend: Any = cudnn.dot_product_attention
    mask = cudnn.MaskType.PADDING_CAUSAL
    return attend(query, key, value, **where, scale=query.shape[-1] ** -0.5, mask_type=mask)


def padded_cudnn(
    longest: int, query: jax.Array, key: jax.Array, value: jax.Array, documents: Documents
) -> jax.Array:
    """Each document a row of its own, as long as the longest of all."""
    rows, length = query.shape[:2]
    at = jnp.arange(longest)
    first = (documents.starts + jnp.arange(rows)[:, None] * length).reshape(-1, 1)
    lens = documents.sizes.reshape(-1)
    # Beyond a document there is no token, and no two places are one: their gradients need no atomics.
    beyond = rows * length + jnp.arange(lens.size * longest).reshape(-1, longest)
    places = jnp.where(at < lens[:, None], first + at, beyond)

    def spread(x: jax.Array) -> jax.Array:
        flat = x.reshape(-1, *x.shape[2:])
        return flat.at[places].get(mode="fill", fill_value=0, unique_indices=True)

    out = jax.nn.dot_product_attention(
        *map(spread, (query, key, value)), is_causal=True, query_seq_lengths=lens, key_value_seq_lengths=lens,
        implementation="cudnn",
    )  # fmt: skip
    number = documents.ids + jnp.arange(rows, dtype=jnp.int32)[:, None] * documents.starts.shape[1]
    flat = out.reshape(-1, *out.shape[2:])
    return flat.at[number * longest + documents.position].get(unique_indices=True)


def packed_fa3(
    longest: int, query: jax.Array, key: jax.Array, value: jax.Array, documents: Documents
) -> jax.Array:
    return dew.packed(query, key, value, cu_lens(documents), longest, is_causal=True)


def masked(
    implementation: Any, query: jax.Array, key: jax.Array, value: jax.Array, documents: Documents
) -> jax.Array:
    mask = documents.ids[:, None, :, None] == documents.ids[:, None, None, :]
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=True, implementation=implementation
    )


def whole(query: jax.Array, key: jax.Array, value: jax.Array, documents: Documents) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def as_batch(attend: Callable[..., jax.Array], query, key, value, documents: Documents) -> jax.Array:
    """Documents of one size, as rows of a batch that has no documents."""
    many = documents.starts.size
    out = attend(*(x.reshape(many, -1, *x.shape[2:]) for x in (query, key, value)))
    return out.reshape(query.shape)


def known(longest: int, equal: bool = False) -> dict[str, Attention]:
    """By name; `longest` of all documents. Where they are `equal`, a dense batch does the same work."""
    ours = {
        "auto": ("ours", {}),
        "cuda": ("ours, CUDA", {"implementation": "cuda"}),
        "cuda-backward": (
            "ours, CUDA both ways",
            {"implementation": "cuda", "config": FlashAttentionCudaConfig(backward="cuda")},
        ),
        "pallas": ("ours, Pallas", {"implementation": "pallas"}),
        "triton": ("ours, by Triton itself", {"implementation": "triton"}),
        "xla": ("ours, plain jnp", {"implementation": "xla"}),
        "interpret": ("ours, interpreted", {"implementation": "interpret"}),
    }
    found = {
        name: Attention(title, "cu_q_lens", functools.partial(by_ends, **options), ours=True)
        for name, (title, options) in ours.items()
    }
    found |= {
        f"{name}-ids": Attention(title, "segment_ids", functools.partial(by_ids, **options), ours=True)
        for name, (title, options) in ours.items()
    }
    padding = f"padded to {longest}"
    found |= {
        "cudnn-packed": Attention("cuDNN", "jax's private q_offsets", named(packed_cudnn)),
        "cudnn-padded": Attention("cuDNN (jax.nn)", padding, named(functools.partial(padded_cudnn, longest))),
        "cudnn-mask": Attention("cuDNN (jax.nn)", "a mask", named(functools.partial(masked, "cudnn"))),
        "cudnn-whole": Attention(
            "cuDNN (jax.nn)", "not told: other results", named(whole), keeps_apart=False
        ),
        "fa3": Attention("FA3 for JAX (dew)", "cu_seqlens", named(functools.partial(packed_fa3, longest))),
        "jax-xla": Attention("jax.nn", "a mask", named(functools.partial(masked, "xla"))),
    }
    if equal:
        dense = functools.partial(pallas_attn.flash_attention, causal=True, residual_checkpoint_name=NAME)
        cudnn = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
        found["dense"] = Attention("ours", "a dense batch", functools.partial(as_batch, dense), ours=True)
        found["cudnn-dense"] = Attention(
            "cuDNN (jax.nn)", "a dense batch", named(functools.partial(as_batch, cudnn))
        )
    return found
