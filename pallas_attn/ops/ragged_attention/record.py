"""The record of an op that the ragged kernels serve."""

import functools

import jax.numpy as jnp

from pallas_attn._call.dispatch import Implementation
from pallas_attn._call.op import Op
from pallas_attn._call.pools import handles
from pallas_attn._call.sizes import too_wide
from pallas_attn._tile import triton
from pallas_attn.ops.ragged_attention import config as tiles
from pallas_attn.ops.ragged_attention import cuda
from pallas_attn.ops.ragged_attention.config import RaggedAttentionConfig
from pallas_attn.ops.ragged_attention.kernel import ragged_attention_pallas
from pallas_attn.ops.ragged_attention.operands import Operands
from pallas_attn.ops.ragged_attention.reference import ragged_attention_xla


def _supports(operands: Operands, lowering: triton.Lowering) -> str | None:
    dims = {"head_dim": operands.pool.head_dim, "value_dim": operands.value_dim}
    num_tokens, num_heads, _ = operands.query.shape
    values = operands.key_cache if operands.value_cache is None else operands.value_cache
    tree_elements = 0 if operands.tree_mask is None else operands.tree_mask.size
    return (
        too_wide({} if operands.value_cache is None else dims)
        or handles("pools", max(operands.key_cache.size, values.size), values.dtype, lowering)
        or handles("outputs", num_tokens * num_heads * operands.value_dim, operands.out_dtype, lowering)
        or handles("tree masks", tree_elements, jnp.int8, lowering)
    )


def record(name: str) -> Op[Operands, RaggedAttentionConfig]:
    return Op(
        name=name,
        implementations={
            "cuda": Implementation(cuda.ragged_attention_cuda, cuda.unsupported, cuda.is_slower),
            **triton.implementations(ragged_attention_pallas, _supports),
            "xla": Implementation(functools.partial(ragged_attention_xla, function=name), takes_config=False),
        },
        results=("tokens heads dim", "tokens heads"),
        config=RaggedAttentionConfig,
        key=tiles.key,
        heuristic=tiles.default,
    )
