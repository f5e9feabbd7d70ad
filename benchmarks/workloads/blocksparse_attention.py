"""`blocksparse_attention`: prefill and decode over layouts that differ by head, and prefill with gradients."""

import functools
import itertools
from typing import Any, ClassVar

import costs
import jax
import jax.numpy as jnp

from workloads.base import Target
from workloads.dense import Call, DenseWorkload, attention, flat, normal

FLOATS = ("query", "key", "value", "d_out")


class BlockSparse(DenseWorkload):
    op = "blocksparse_attention"
    targets: ClassVar[dict[str, Target]] = {
        "auto": Target("ours", None),
        "cuda": Target("ours, CUDA", "cuda"),
        "pallas": Target("ours, Pallas", "pallas"),
        "triton": Target("ours, by Triton itself", "triton"),
        "xla": Target("ours, plain jnp", "xla"),
    }
    error_limit = 8e-3
    floats = FLOATS[:3]

    def cells(self) -> list[Any]:
        from pallas_attn.testing.blocksparse import PHI3_SMALL, BlockSparseCase

        def prefill(tokens: int, pattern: Any, block: int = 128) -> Any:
            return BlockSparseCase(((tokens, tokens),), 32, 8, 128, pattern, block, block)

        def decode(number: int, tokens: int, pattern: Any) -> Any:
            return BlockSparseCase(((1, tokens),) * number, 32, 8, 128, pattern, 64, 64)

        return [
            *(prefill(8192, pattern) for pattern in ("dense", 1 / 2, 1 / 8)),
            *(prefill(8192, pattern, 64) for pattern in (PHI3_SMALL, 1 / 8)),
            *(prefill(tokens, 1 / 32) for tokens in (32768, 131072)),
            *itertools.starmap(decode, itertools.product((16, 64), (8192,), ("dense", 1 / 2, 1 / 8))),
            decode(16, 32768, 1 / 32),
            *(decode(number, 131072, 1 / 32) for number in (1, 16)),
        ]

    def tiny(self) -> list[Any]:
        from pallas_attn.testing.blocksparse import BlockSparseCase

        return [
            BlockSparseCase(((100, 100),), 4, 2, 16, 0.5),
            BlockSparseCase(((1, 70), (1, 96)), 4, 2, 16, 0.5),
        ]

    def made(self, batch: int, seqlen: int, heads: int, kv_heads: int | None, q_len: int) -> Any:
        from pallas_attn.testing.blocksparse import BlockSparseCase

        lens = ((q_len, seqlen),) * batch
        return BlockSparseCase(lens, heads, kv_heads or heads, 128, 1 / 8, 64, 64)

    def cost(self, case: Any) -> costs.Cost:
        return costs.blocksparse_attention(case, _layout(case).to_block_mask())

    def drawn(self, case: Any, seed: Any) -> Any:
        queries, keys = (sum(lens) for lens in zip(*case.lens, strict=True))
        layout = _layout(case)
        made: dict[str, Any] = {"layout": (jnp.asarray(layout.row_pointers), jnp.asarray(layout.columns))}
        for number, name in enumerate(self.floats):
            count, heads = (
                (keys, case.num_kv_heads) if name in ("key", "value") else (queries, case.num_heads)
            )
            made[name] = normal(seed, number, (count, heads, case.head_dim), case.dtype)
        return made

    def call(self, case: Any, target: str) -> Call:
        implementation = self.targets[target].implementation
        ends = {
            name: jnp.array([0, *itertools.accumulate(lens)], jnp.int32)
            for name, lens in zip(("cu_q_lens", "cu_k_lens"), zip(*case.lens, strict=True), strict=True)
        }
        # Without it a call is known to decode alone, or to prefill alone, and has no kernels for the other.
        if all(q_len == 1 for q_len, _ in case.lens) or all(q_len == k_len for q_len, k_len in case.lens):
            del ends["cu_q_lens"]

        def attend(given: Any) -> tuple[jax.Array, jax.Array]:
            layout = self.library.SparseLayout(*given["layout"], case.block_size, case.q_block_size)
            arrays = (given[name] for name in FLOATS[:3])
            return self.library.blocksparse_attention(
                *arrays, layout, **ends, return_lse=True, implementation=implementation
            )

        return attend

    def right(self, case: Any, given: Any) -> jax.Array:
        mask = _layout(case).to_block_mask()
        outs, first_q, first_k = [], 0, 0
        for q_len, k_len in case.lens:
            seen = _seen(case, mask, k_len - q_len)
            query = given["query"][first_q : first_q + q_len]
            key, value = (given[name][first_k : first_k + k_len] for name in ("key", "value"))
            outs.append(attention(query, key, value, seen))
            first_q, first_k = first_q + q_len, first_k + k_len
        return jnp.concatenate(outs)


class BlockSparseGradients(BlockSparse):
    """Forward and backward of the prefill cells. What is checked is each gradient as a whole."""

    op = "blocksparse_attention_gradients"
    dispatched = "blocksparse_attention"
    error_limit = 2e-2
    floats = FLOATS

    def cells(self) -> list[Any]:
        return [case for case in super().cells() if case.q_len > 1 and case.max_len < 1 << 17]

    def cost(self, case: Any) -> costs.Cost:
        forward = super().cost(case)
        return costs.Cost(forward.flops * 7 // 2, 4 * forward.num_bytes)

    def call(self, case: Any, target: str) -> Call:
        attend = super().call(case, target)

        def both(given: Any) -> tuple[jax.Array, jax.Array]:
            floats = {name: given[name] for name in FLOATS[:3]}
            out, vjp = jax.vjp(lambda floats: attend(given | floats)[0], floats)
            (gradients,) = vjp(given["d_out"].astype(out.dtype))
            made = list(gradients.values())
            # A number of each, so that none is dropped.
            return flat(made), jnp.sum(
                jnp.stack([x[0, 0, 0].astype(jnp.float32) for x in made]), keepdims=True
            )

        return both

    def right(self, case: Any, given: Any) -> jax.Array:
        floats = {name: given[name].astype(jnp.float32) for name in FLOATS[:3]}
        _, vjp = jax.vjp(lambda floats: BlockSparse.right(self, case, given | floats), floats)
        (gradients,) = vjp(given["d_out"].astype(jnp.float32))
        return flat(list(gradients.values()))


def _seen(case: Any, mask: Any, before: int) -> Any:
    """What queries behind `before` tokens see, as `attention` asks for it."""
    top = before // case.q_block_size
    rows = jnp.asarray(mask[:, top:])  # of a long sequence's last query one row of thousands

    def seen(query_at: jax.Array, key_at: jax.Array) -> jax.Array:
        at = query_at + before
        row = jnp.minimum(at // case.q_block_size - top, rows.shape[1] - 1)
        return rows[:, row][:, :, key_at // case.block_size] & (key_at <= at[:, None])

    return seen


@functools.cache
def _layout(case: Any) -> Any:
    from pallas_attn.testing.blocksparse import BlockSparseCase, layout_of

    # A case that another process told has lists, and is of no type.
    lens = tuple((q_len, k_len) for q_len, k_len in case.lens)
    sizes = case.num_heads, case.num_kv_heads, case.head_dim
    return layout_of(BlockSparseCase(lens, *sizes, case.pattern, case.block_size, case.q_block_size))
