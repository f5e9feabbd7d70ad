"""`ragged_paged_attention`: prompts whole, continued and in mixed batches."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import costs
import jax
import jax.numpy as jnp
import numpy as np
import reference

from workloads.base import Target
from workloads.decode import Call, Inputs, PagedWorkload, cache_dtype, cache_scale

# Of calls that take turns; a call that takes longer needs no more than two sets of pages.
ROUND_SECONDS = 0.01
USUAL_FLOPS = 4e14


class RaggedAttention(PagedWorkload):
    op = "ragged_paged_attention"
    targets: ClassVar[dict[str, Target]] = {
        "auto": Target("ours", None),
        "pallas": Target("ours, Pallas", "pallas"),
        "triton": Target("ours, by Triton itself", "triton"),
        "xla": Target("ours, plain jnp", "xla"),
    }
    error_limit = 8e-3  # a right bf16 kernel scores 2.6e-3, a lost page at least 9e-3
    num_caches = 2

    def cells(self) -> list[Any]:
        from pallas_attn.testing import cases

        return cases.cells(self.op)

    def tiny(self) -> list[Any]:
        from pallas_attn.testing import cases

        made = functools.partial(
            cases.RaggedCase, num_heads=4, num_kv_heads=2, head_dim=16, page_size=16, lengths="uneven", padding=0,
            spare_seqs=0, spare_pages=0,
        )  # fmt: skip
        return [
            made((70, 33, 5), q_lens=(40, 33, 1)),
            made((300,), q_lens=(300,), sliding_window=20),
            made((90, 41), q_lens=(16, 41), value_dim=32, cache_dtype="int8"),
        ]

    def made(self, batch: int, seqlen: int, heads: int, kv_heads: int | None, q_len: int) -> Any:
        from pallas_attn.testing import cases

        lens, news = (seqlen,) * batch, (q_len,) * batch
        return cases.RaggedCase(
            lens, heads, kv_heads or heads, 128, 16, q_lens=news, lengths=f"{q_len}of{seqlen}", padding=0,
            spare_seqs=0, spare_pages=0,
        )  # fmt: skip

    def cost(self, case: Any) -> costs.Cost:
        return costs.ragged_paged_attention(case)

    def query_shape(self, case: Any) -> tuple[int, ...]:
        return (sum(case.q_lens), case.num_heads, case.head_dim)

    def input_shapes(self, case: Any) -> Inputs:
        shapes = super().input_shapes(case)
        keys, values = shapes.caches
        narrower = values.update(shape=(*values.shape[:3], case.value_dim or case.head_dim))
        return shapes._replace(caches=(keys, narrower))

    def most_sets(self, case: Any) -> int:
        return max(2, int(ROUND_SECONDS * USUAL_FLOPS / self.cost(case).flops))

    def call(self, case: Any, target: str) -> Call:
        options: dict[str, Any] = dict(sliding_window=case.sliding_window, causal=case.causal)
        if case.cache_dtype:
            scale = cache_scale(cache_dtype(case))
            options |= dict(k_scale=scale, v_scale=scale)
        bounds = np.cumsum([0, *case.q_lens]).astype(np.int32)

        def call(query, caches, table, lengths, _):
            return self.library.ragged_paged_attention(
                query,
                *caches,
                table,
                lengths,
                jnp.asarray(bounds),
                return_lse=True,
                implementation=self.targets[target].implementation,
                **options,
            )

        return call

    def compile_expected(
        self, case: Any, order: str = reference.PAGES_FIRST
    ) -> Callable[[Inputs], list[jax.Array]]:
        assert order == reference.PAGES_FIRST
        shapes = self.input_shapes(case)
        right = functools.partial(
            reference.ragged_expected, case=case, cache_scale=cache_scale(cache_dtype(case))
        )
        compiled = reference.compiled(right, *shapes[:2], shapes.tables[0])

        def expected(inputs: Inputs) -> list[jax.Array]:
            return [compiled(*inputs[:2], table) for table in (inputs.tables[0], inputs.tables[-1])]

        return expected
