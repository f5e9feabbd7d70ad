"""The calls of `flash_attention` that tests are about, and their inputs."""

import jax.numpy as jnp
import numpy as np

from pallas_attn.ops.flash_attention.config import FlashAttentionConfig, FlashAttentionTiles
from pallas_attn.testing.flash_attention import FlashCase

# Smaller than the lengths below, and different for each kernel, so that walks have beginnings, middles and ends.
SMALL_TILES = FlashAttentionConfig(
    FlashAttentionTiles(32, 16), FlashAttentionTiles(16, 32), FlashAttentionTiles(16, 32)
)


def visible(case: FlashCase) -> np.ndarray:
    """[q_len, kv_len]: which keys each query sees by position, by the documented rules."""
    seen = np.ones((case.q_len, case.kv_len), bool)
    if case.documents:
        document = np.repeat(np.arange(len(case.documents)), case.documents)
        seen = document[:, None] == document
    for query in range(case.q_len):
        for key in range(case.kv_len):
            ahead = key - (query + case.q_offset)
            window = case.sliding_window
            if case.causal and ahead > 0:
                seen[query, key] = False
            if isinstance(window, int) and abs(ahead) >= window:
                seen[query, key] = False
            if isinstance(window, tuple):
                left, right = window
                if (left is not None and -ahead > left) or (right is not None and ahead > right):
                    seen[query, key] = False
    return seen


def make(case: FlashCase, seed: int = 0) -> dict[str, np.ndarray]:
    """Every array of a call by its keyword, and "d_out" and "d_lse", what the gradients are taken with; N(0, 1)."""
    rng = np.random.default_rng(seed)
    dtype, value_dim = jnp.dtype(case.dtype), case.value_dim or case.head_dim

    def drawn(tokens: int, heads: int, *dim: int) -> np.ndarray:
        shape = (tokens, heads) if case.layout == "BTNH" else (heads, tokens)
        return rng.standard_normal((case.batch, *shape, *dim))

    data: dict[str, np.ndarray] = {
        "query": drawn(case.q_len, case.num_heads, case.head_dim).astype(dtype),
        "key": drawn(case.kv_len, case.num_kv_heads, case.head_dim).astype(dtype),
        "value": drawn(case.kv_len, case.num_kv_heads, value_dim).astype(dtype),
        "d_out": drawn(case.q_len, case.num_heads, value_dim).astype(dtype),
        "d_lse": drawn(case.q_len, case.num_heads).astype(np.float32),
    }
    if case.sinks:
        data["sinks"] = rng.standard_normal(case.num_heads).astype(np.float32) + 1
    if case.bias is not None:
        data["bias"] = rng.standard_normal(_pairs(case, case.bias)).astype(np.float32)
    if case.mask is not None:
        data["mask"] = rng.random(_pairs(case, case.mask)) < 0.7
    if case.segments:
        for name, tokens in (("q_ids", case.q_len), ("kv_ids", case.kv_len)):
            ids = rng.integers(-1, 3, (case.batch, tokens)).astype(np.int32)
            data[name] = np.sort(ids, axis=1) if case.segments == "packed" else ids
    return data


def _pairs(case: FlashCase, which: str) -> tuple[int, ...]:
    sizes = {"b": case.batch, "h": case.num_heads, "t": case.q_len, "s": case.kv_len}
    return tuple(size if letter in which else 1 for letter, size in sizes.items())


FLASH_CASES = [
    FlashCase(70, 70, 4, 2, 64, "bfloat16", causal=True),
    FlashCase(33, 81, 2, 2, 80, "float16", causal=True, q_offset=48, bias="bs", softcap=3.0),
    FlashCase(70, 35, 3, 1, 32, layout="BNTH", value_dim=48, causal=True),
    FlashCase(1, 97, 6, 2, 96, "bfloat16", value_dim=64),
    FlashCase(97, 97, 4, 2, 256, causal=True, sliding_window=20, batch=1),
    FlashCase(64, 96, 2, 2, 112, sliding_window=(9, 17), q_offset=16, batch=1),
    FlashCase(50, 60, 4, 2, 32, "bfloat16", softcap=2.0, sinks=True, layout="BNTH"),
    FlashCase(50, 66, 4, 2, 32, bias="hts", mask="bs", causal=True, q_offset=10),
    FlashCase(90, 90, 2, 1, 192, "bfloat16", value_dim=128, segments="packed", causal=True),
    FlashCase(60, 45, 2, 2, 32, segments="any", sinks=True, layout="BNTH"),
    FlashCase(
        60,
        77,
        4,
        2,
        40,
        causal=True,
        sliding_window=8,
        q_offset=9,
        softcap=4.0,
        sinks=True,
        bias="bhts",
        mask="hts",
        segments="packed",
    ),
]
