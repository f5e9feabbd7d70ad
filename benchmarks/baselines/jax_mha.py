"""jax's own flash attention for GPUs, `jax.experimental.pallas.ops.gpu.attention`, which is deprecated."""

import warnings
from typing import Any

import jax

import baselines

TITLE = "jax's deprecated kernel"
OPS = ("flash_attention", "flash_attention_gradients")
PLAIN = False
MODULE = "jax.experimental.pallas.ops.gpu.attention"


def available() -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return baselines.importable(MODULE)


def supports(case: Any) -> str | None:
    if case.layout != "BTNH" or case.num_heads != case.num_kv_heads or case.value_dim:
        return "takes BTNH, as many KV heads as heads, and values as wide as keys"
    if case.head_dim & (case.head_dim - 1):
        return "takes head sizes that are powers of two"
    return baselines.plain_only(case, but=("documents",))


def attend(case: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention

    # Its defaults have no blocks for the backward kernel, which then is plain jnp.
    sizes = attention.BlockSizes(
        block_q=128, block_k=64, block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64
    )

    def call(query, key, value):
        out = attention.mha(
            query,
            key,
            value,
            segment_ids=baselines.segment_ids(case),
            sm_scale=case.head_dim**-0.5,
            causal=case.causal,
            block_sizes=sizes,
            interpret=jax.default_backend() == "cpu",
        )
        return out, out

    return call
