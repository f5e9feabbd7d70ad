"""`paged_attention`: the tables' 47 cells, and cells that show what the options save."""

import functools
from typing import Any, ClassVar

import costs
import numpy as np

from workloads.base import Target
from workloads.decode import Call, PagedWorkload, cache_dtype, cache_scale

SPARSE = (64, 1, 8)
WINDOW = 1024
# (query heads, KV heads, head_dim, page_size) that the tables lack.
SHAPES = (
    *((heads, kv_heads, 128, 16) for heads, kv_heads in ((24, 4), (28, 4), (40, 8), (64, 4))),
    (16, 16, 64, 16),
    (32, 8, 256, 16),
    *((32, 8, 128, page_size) for page_size in (32, 64)),
)


class PagedAttention(PagedWorkload):
    op = "paged_attention"
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

    def options(self) -> list[Any]:
        from pallas_attn.testing import cases

        served = functools.partial(cases.served, num_heads=32, num_kv_heads=8, head_dim=128, page_size=16)
        quantized = [
            served(64, 8192, cache_dtype=dtype) for dtype in ("float8_e4m3fn", "float8_e5m2", "int8")
        ]
        sparse = [served(batch, 32768, block_sparse=self.library.LocalStride(*SPARSE)) for batch in (16, 1)]
        dense = [served(64, 8192), *(served(batch, tokens) for batch in (16, 1) for tokens in (1024, 32768))]
        windows = [served(batch, 32768, sliding_window=WINDOW) for batch in (16, 1)]
        made = functools.partial(cases.DecodeCase, page_size=16, spare_pages=0)
        skewed = [
            made(lens, *shape, 128, lengths=name, sliding_window=window)
            for name, (lens, shape, window) in _skewed().items()
        ]
        shapes = [cases.served(64, tokens, *shape) for shape in SHAPES for tokens in (1024, 8192)]
        return [*dense, *quantized, *sparse, *windows, *skewed, *shapes]

    def tiny(self) -> list[Any]:
        from pallas_attn.testing import cases

        served = functools.partial(cases.served, num_heads=4, num_kv_heads=2, head_dim=16, page_size=16)
        return [
            served(2, 64),
            cases.DecodeCase((70, 33, 5), 4, 2, 16, 16, lengths="uneven", spare_pages=0),
            served(2, 80, q_len=3, sliding_window=20),
            served(2, 300, block_sparse=self.library.LocalStride(64, 1, 3, 1), cache_dtype="int8"),
        ]

    def made(self, batch: int, seqlen: int, heads: int, kv_heads: int | None, q_len: int) -> Any:
        from pallas_attn.testing import cases

        return cases.served(batch, seqlen, heads, kv_heads or heads, 128, 16, q_len=q_len)

    def cost(self, case: Any) -> costs.Cost:
        return costs.paged_attention(case)

    def config(self, case: Any, target: str) -> Any:
        """What a target's call is given; None: nothing."""
        return None

    def call(self, case: Any, target: str) -> Call:
        options: dict[str, Any] = dict(
            sliding_window=case.sliding_window,
            block_sparse=case.block_sparse,
            config=self.config(case, target),
        )
        if case.cache_dtype:
            scale = cache_scale(cache_dtype(case))
            options |= dict(k_scale=scale, v_scale=scale)

        def call(query, caches, table, lengths, _):
            return self.library.paged_attention(
                query[:, 0] if case.q_len == 1 else query,
                *caches,
                table,
                lengths,
                return_lse=True,
                implementation=self.targets[target].implementation,
                **options,
            )

        return call


GROUPED, ONE_HEAD = (32, 8), (8, 1)


def _skewed() -> dict[str, tuple[tuple[int, ...], tuple[int, int], int | None]]:
    """{name: (lengths that no even cut serves, heads, window)}, and as `NAMEeven` the same tokens in equal lengths."""
    rng = np.random.default_rng(0)

    def whole(lens: np.ndarray) -> tuple[int, ...]:
        return tuple(lens.clip(1, 60000).astype(int).tolist())

    short, any_length = whole(rng.integers(100, 801, 63)), whole(rng.integers(1, 12001, 64))
    lognormal, exponential = whole(rng.lognormal(8, 1, 64)), whole(rng.exponential(4096, 64))
    dense = {
        "long60000": ((60000, *short), GROUPED),
        "s50000": ((50000,) * 3, GROUPED),
        "upto12000": (any_length, GROUPED),
        "lognormal": (lognormal, GROUPED),
        "exponential": (exponential, GROUPED),
        "bimodal": ((200,) * 32 + (8000,) * 32, GROUPED),
        "long131072": ((131072,) + (1000,) * 15, GROUPED),
        "two65536": ((65536,) * 2 + (512,) * 30, GROUPED),
        "tiny": (whole(rng.integers(1, 201, 1024)), GROUPED),
        "tinyandlong": ((20000, *whole(rng.integers(1, 257, 511))), GROUPED),
        "powers": (tuple(2**i for i in range(17)), GROUPED),
        "lognormal1": (lognormal, ONE_HEAD),
    }
    windowed = {"window60000": ((60000, *short), GROUPED), "windowlognormal": (lognormal, GROUPED)}
    even = {
        f"{name}even": ((round(sum(lens) / len(lens)),) * len(lens), heads)
        for name, (lens, heads) in dense.items()
        if len(set(lens)) > 1
    }
    found: dict[str, tuple[tuple[int, ...], tuple[int, int], int | None]] = {
        name: (lens, heads, None) for name, (lens, heads) in (dense | even).items()
    }
    return found | {name: (lens, heads, 4096) for name, (lens, heads) in windowed.items()}
