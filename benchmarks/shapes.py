"""The shapes that the READMEs' tables have, for benchmarks that get no list of their own."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

LONG = (1024, 8192, 32768)


def mla_decode() -> list[dict[str, Any]]:
    """What FlashMLA's own benchmark asks about (128 sequences), and serving with few requests: 58 shapes."""
    varied = np.random.default_rng(0).normal(4096, 2048, 128).clip(2, None).astype(int)
    cells: list[tuple[int, int, int, int, Any]] = [
        (128, tokens, heads, q_len, lens)
        for (tokens, lens), heads, q_len in itertools.product(
            [(1024, None), (4096, None), (8192, None), (16384, None), (4096, varied.tolist())],
            (16, 32, 64, 128),
            (1, 2),
        )
    ]
    cells += [(b, s, h, 1, None) for b, s, h in itertools.product((1, 4, 8), LONG, (16, 128))]
    return [
        {
            "id": f"mla-b{b}-s{'n' if lens else ''}{s}-h{h}-q{q_len}",
            "b": b,
            "s": s,
            "h": h,
            "sq": q_len,
            "page": 64,
        }
        | ({"lens": lens} if lens else {})
        for b, s, h, q_len, lens in cells
    ]


def gqa_decode() -> list[dict[str, Any]]:
    """Four head counts, one sequence to 256, as far as 80 GB hold them: 47 shapes."""

    def cells() -> Iterator[dict[str, Any]]:
        for (hq, hkv), b, s in itertools.product(
            [(32, 8), (64, 8), (8, 1), (32, 32)], (1, 16, 64, 256), LONG
        ):
            if 2 * 2 * b * s * hkv * 128 < 80e9:
                name = f"gqa-b{b}-s{s}-{hq}q{hkv}kv-d128"
                yield {"id": name, "b": b, "s": s, "hq": hq, "hkv": hkv, "d": 128, "page": 16}

    return list(cells())
