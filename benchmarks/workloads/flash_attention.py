"""`flash_attention`, forward, and with its gradients: training's cells, and a profile beside the attention that keeps
all weights in memory, from 4 to 64 thousand tokens (`--options`)."""

from typing import Any, ClassVar

import baselines
import costs
import jax
import jax.numpy as jnp

from workloads.base import Target
from workloads.dense import Call, DenseWorkload, attention, flat, normal

LENGTHS = (4096, 8192, 16384, 32768, 65536)
DOCUMENTS = (1000, 3000, 500, 6000, 200, 2500, 84, 3100)  # one behind the other, as in training


class FlashAttention(DenseWorkload):
    op = "flash_attention"
    targets: ClassVar[dict[str, Target]] = {
        "auto": Target("ours", None),
        "pallas": Target("ours, Pallas", "pallas"),
        "triton": Target("ours, by Triton itself", "triton"),
        "xla": Target("ours, plain jnp", "xla"),
    }
    error_limit = 8e-3
    seeds = 3
    """Arrays of a set: query, key, value."""

    def cells(self) -> list[Any]:
        from pallas_attn.testing.flash_attention import FlashCase

        def made(tokens: int, heads: int, kv_heads: int, dim: int, **options: Any) -> Any:
            options = dict(causal=True, batch=max(1, 16384 // tokens)) | options
            return FlashCase(tokens, tokens, heads, kv_heads, dim, "bfloat16", **options)

        dims = [made(16384, 2048 // dim, 2048 // dim, dim) for dim in (64, 128, 256)]
        odd = [made(16384, 16, 16, dim) for dim in (80, 96, 112, 192)]
        return [
            *dims,
            *odd,
            made(16384, 16, 16, 192, value_dim=128),
            made(16384, 16, 4, 128),
            *(made(tokens, 16, 16, 128) for tokens in (2048, 4096, 8192)),
            made(16384, 16, 16, 128, sliding_window=1024),
            *(made(16384, 16, kv_heads, 128, documents=DOCUMENTS) for kv_heads in (16, 4)),
            made(16384, 16, 16, 128, causal=False),
        ]

    def options(self) -> list[Any]:
        from pallas_attn.testing.flash_attention import FlashCase

        return [FlashCase(n, n, 8, 8, 64, "bfloat16", batch=1, layout="BNTH") for n in LENGTHS]

    def tiny(self) -> list[Any]:
        from pallas_attn.testing.flash_attention import FlashCase

        return [
            FlashCase(70, 70, 4, 2, 16, "bfloat16", causal=True),
            FlashCase(64, 64, 2, 2, 16, "bfloat16", batch=1, layout="BNTH"),
            FlashCase(48, 48, 2, 2, 16, "bfloat16", causal=True, documents=(20, 28)),
        ]

    def made(self, batch: int, seqlen: int, heads: int, kv_heads: int | None, q_len: int) -> Any:
        from pallas_attn.testing.flash_attention import FlashCase

        if q_len not in (1, seqlen):  # 1 is what comes when nothing is said
            raise ValueError(f"--q-len: expected {seqlen}, as --seqlens, for {self.op}; got {q_len}")
        return FlashCase(seqlen, seqlen, heads, kv_heads or heads, 128, "bfloat16", batch=batch, causal=True)

    def cost(self, case: Any) -> costs.Cost:
        return costs.flash_attention(case)

    def drawn(self, case: Any, seed: Any) -> Any:
        def tokens(number: int, count: int, heads: int, dim: int) -> jax.Array:
            order = (count, heads) if case.layout == "BTNH" else (heads, count)
            return normal(seed, number, (case.batch, *order, dim), case.dtype)

        value_dim = case.value_dim or case.head_dim
        made = (
            tokens(0, case.q_len, case.num_heads, case.head_dim),
            tokens(1, case.kv_len, case.num_kv_heads, case.head_dim),
            tokens(2, case.kv_len, case.num_kv_heads, value_dim),
            tokens(3, case.q_len, case.num_heads, value_dim),
        )
        return made[: self.seeds]

    def call(self, case: Any, target: str) -> Call:
        implementation = self.targets[target].implementation

        names = ("layout", "causal", "sliding_window", "q_offset")
        options = {name: getattr(case, name) for name in names}
        options["segment_ids"] = baselines.segment_ids(case)

        def attend(query, key, value):
            return self.library.flash_attention(
                query, key, value, **options, return_lse=True, implementation=implementation
            )

        return self.whole(case, attend)

    def whole(self, case: Any, attend: Any) -> Call:
        """What is timed of `attend`, a function of query, key and value that returns (out, lse)."""
        return lambda given: attend(*given)

    def right(self, case: Any, given: Any) -> jax.Array:
        query, key, value = given if case.layout == "BTNH" else (jnp.swapaxes(x, 1, 2) for x in given)

        def seen(query_at: jax.Array, key_at: jax.Array) -> jax.Array:
            ahead = key_at - query_at[:, None] - case.q_offset
            visible = jnp.ones((1, *ahead.shape), bool)
            if case.causal:
                visible &= ahead <= 0
            if case.sliding_window:
                visible &= abs(ahead) < case.sliding_window
            if (ids := baselines.segment_ids(case)) is not None:
                visible &= ids[0, query_at][:, None] == ids[0, key_at]
            return visible

        out = jax.lax.map(lambda one: attention(one[0], one[1], one[2], seen), (query, key, value))
        return out if case.layout == "BTNH" else jnp.swapaxes(out, 1, 2)


class FlashGradients(FlashAttention):
    """Forward and backward. What is checked is each of the three gradients as a whole."""

    op = "flash_attention_gradients"
    dispatched = "flash_attention"
    error_limit = 2e-2
    seeds = 4
    """d_out too."""

    def cost(self, case: Any) -> costs.Cost:
        return costs.flash_attention(case, gradients=True)

    def whole(self, case: Any, attend: Any) -> Call:
        def both(given: Any) -> tuple[jax.Array, jax.Array]:
            *floats, d_out = given
            out, vjp = jax.vjp(lambda *x: attend(*x)[0], *floats)
            gradients = vjp(d_out.astype(out.dtype))
            # A number of each, so that none is dropped.
            return flat(gradients), jnp.sum(
                jnp.stack([x[(0,) * 4].astype(jnp.float32) for x in gradients]), keepdims=True
            )

        return both

    def right(self, case: Any, given: Any) -> jax.Array:
        *floats, d_out = (x.astype(jnp.float32) for x in given)
        _, vjp = jax.vjp(lambda *x: FlashAttention.right(self, case, x), *floats)
        return flat(vjp(d_out))
