"""A digest of every module that the tests' shapes lower to, to show that a change left the compiled text alone.

    python tests/lowered_modules.py --save before.json           # on the old checkout: PYTHONPATH names it
    python tests/lowered_modules.py --against before.json        # exit 1, and the differences, if a module changed
    python tests/lowered_modules.py --compile 90 --only serving  # registers, shared memory, instructions

Each call is lowered for an abstract H100, by Pallas and by this package's own lowering, and compared without what may
differ between two ways of writing it (module_text.py). The shapes are data and the calls public, so that checkouts of
different ages can be compared.
"""

import argparse
import difflib
import functools
import hashlib
import inspect
import itertools
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import lowered_calls
import lowering
import module_text
import triton_kernels

import pallas_attn

# (num_seqs, max_pages, num_heads, num_kv_heads, head_dim, page_size, options)
PAGED = [
    (9, 100, 4, 2, 32, 8, {}),
    (9, 52, 4, 2, 64, 16, {"config": {"num_splits": 4}}),
    (9, 28, 6, 2, 80, 32, {"config": {"num_splits": 4}}),
    (9, 16, 4, 4, 96, 64, {}),
    (9, 10, 4, 1, 112, 128, {"config": {"num_splits": 4}}),
    (9, 52, 2, 1, 120, 16, {}),
    (9, 52, 8, 2, 128, 16, {"config": {"num_splits": 4}}),
    (9, 52, 2, 1, 192, 16, {"config": {"num_splits": 4}}),
    (9, 28, 2, 2, 256, 32, {}),
    (9, 52, 1, 1, 64, 16, {"config": {"num_splits": 4}}),
    (9, 52, 9, 3, 64, 16, {"config": {"num_splits": 4}}),
    (9, 52, 7, 1, 64, 16, {}),
    (9, 52, 63, 9, 32, 16, {"config": {"num_splits": 4}}),
    (9, 52, 126, 1, 64, 16, {"config": {"num_splits": 4}}),
    (9, 52, 128, 8, 32, 16, {}),
    (9, 52, 8, 2, 128, 16, {"layout": "HND", "dtype": "float16", "config": {"num_splits": 4}}),
    (9, 52, 4, 2, 64, 16, {"dtype": "float32", "config": {"num_splits": 4}}),
    (9, 16, 4, 2, 80, 64, {"layout": "HND", "dtype": "float32"}),
    (9, 100, 4, 4, 64, 8, {"layout": "HND", "config": {"num_splits": 4}}),
    (9, 776, 4, 2, 64, 1, {"dtype": "float16", "config": {"num_splits": 4}}),
    (9, 36, 4, 2, 64, 24, {"config": {"num_splits": 4}}),
    (9, 52, 4, 2, 64, 16, {"config": {"block_kv": 128, "num_splits": 3}}),
    (9, 10, 4, 2, 64, 128, {"config": {"block_kv": 16, "num_splits": 3}}),
    (2, 129, 2, 1, 32, 16, {"config": {"block_kv": 16, "num_splits": 128, "min_split_tokens": 16}}),
    (9, 52, 8, 2, 64, 16, {"cache_dtype": "float8_e4m3fn", "config": {"num_splits": 4}}),
    (9, 52, 8, 2, 80, 16, {"cache_dtype": "float8_e5m2", "scale_per_head": True}),
    (
        9,
        28,
        8,
        2,
        64,
        32,
        {
            "cache_dtype": "int8",
            "scale_per_head": True,
            "layout": "HND",
            "dtype": "float16",
            "config": {"num_splits": 4},
        },
    ),
    (9, 52, 4, 2, 64, 16, {"cache_dtype": "float8_e4m3fn", "dtype": "float32"}),
    (9, 52, 8, 2, 128, 16, {"layout": "PACKED", "config": {"num_splits": 4}}),
    (9, 100, 8, 2, 80, 8, {"layout": "PACKED", "dtype": "float32"}),
    (9, 52, 8, 2, 64, 16, {"cache_dtype": "float8_e4m3fn", "layout": "PACKED", "config": {"num_splits": 4}}),
    (9, 28, 4, 4, 112, 32, {"cache_dtype": "int8", "layout": "PACKED", "dtype": "float16"}),
    (9, 52, 8, 2, 64, 16, {"q_len": 2, "config": {"num_splits": 4}}),
    (9, 52, 6, 2, 64, 16, {"q_len": 5, "dtype": "float32"}),
    (9, 52, 32, 1, 64, 16, {"q_len": 4, "config": {"num_splits": 4}}),
    (6, 68, 4, 2, 64, 16, {"sliding_window": 100, "config": {"num_splits": 4}}),
    (6, 68, 4, 2, 64, 16, {"sliding_window": 1}),
    (
        6,
        36,
        4,
        2,
        64,
        32,
        {"q_len": 3, "sliding_window": 130, "dtype": "float32", "config": {"num_splits": 4}},
    ),
    (6, 68, 4, 2, 64, 16, {"sliding_window": 5000}),
    (9, 52, 4, 2, 64, 16, {"softcap": 2.0, "config": {"num_splits": 4}}),
    (9, 52, 12, 3, 64, 16, {"alibi": True, "dtype": "float32", "config": {"num_splits": 4}}),
    (9, 52, 4, 2, 64, 16, {"q_len": 3, "alibi": True}),
    (9, 52, 4, 2, 64, 16, {"sinks": True, "config": {"num_splits": 4}}),
    (9, 52, 4, 2, 64, 16, {"q_len": 2, "sinks": True, "dtype": "float32"}),
    (6, 68, 4, 2, 64, 16, {"block_sparse": (64, 2, 4, 0, 0), "config": {"block_kv": 32, "num_splits": 4}}),
    (6, 68, 4, 2, 64, 16, {"block_sparse": (32, 1, 3, -1, 0), "config": {"block_kv": 32, "num_splits": 4}}),
    (
        6,
        36,
        8,
        2,
        64,
        32,
        {"dtype": "float32", "block_sparse": (64, 1, 8, 1, 0), "config": {"block_kv": 32, "num_splits": 4}},
    ),
    (6, 68, 8, 2, 64, 16, {"block_sparse": (16, 3, 8, 2, 1), "config": {"block_kv": 16}}),
    (6, 68, 6, 1, 64, 16, {"block_sparse": (64, 1, 5, 3, 0), "config": {"block_kv": 16, "num_splits": 4}}),
    (6, 68, 4, 2, 64, 16, {"block_sparse": (64, 1, 1, 0, 0), "config": {"block_kv": 32, "num_splits": 4}}),
    (
        6,
        68,
        4,
        2,
        64,
        16,
        {"q_len": 3, "block_sparse": (32, 2, 4, 1, 0), "config": {"block_kv": 32, "num_splits": 4}},
    ),
    (
        6,
        68,
        4,
        2,
        64,
        16,
        {
            "sliding_window": 300,
            "block_sparse": (32, 1, 4, 0, 0),
            "config": {"block_kv": 32, "num_splits": 4},
        },
    ),
    (
        6,
        68,
        8,
        2,
        64,
        16,
        {
            "q_len": 2,
            "cache_dtype": "float8_e4m3fn",
            "scale_per_head": True,
            "sliding_window": 600,
            "softcap": 20.0,
            "alibi": True,
            "sinks": True,
            "layout": "PACKED",
            "block_sparse": (64, 2, 3, 1, 0),
            "config": {"block_kv": 32, "num_splits": 4},
        },
    ),
    # shapes that are served, with the config that the device would get
    (64, 512, 32, 8, 128, 16, {"tag": "serving"}),
    (64, 512, 32, 8, 128, 16, {"tag": "serving", "config": {"block_kv": 32, "num_splits": 4}}),
    (4, 256, 32, 8, 128, 16, {"tag": "serving"}),
    (64, 512, 32, 8, 128, 16, {"tag": "serving", "cache_dtype": "float8_e4m3fn"}),
    (64, 512, 32, 8, 128, 16, {"tag": "serving", "cache_dtype": "float8_e5m2"}),
    (64, 512, 32, 8, 128, 16, {"tag": "serving", "q_len": 2}),
    (64, 512, 32, 8, 128, 16, {"tag": "serving", "sliding_window": 1024}),
    (4, 256, 32, 8, 128, 16, {"tag": "serving", "block_sparse": (64, 8, 8, 1, 0)}),
    (64, 8, 32, 8, 128, 16, {}),
    (64, 256, 32, 8, 128, 16, {"dtype": "float16", "layout": "HND"}),
    (4, 256, 9, 3, 64, 16, {"dtype": "float32"}),
    (4, 256, 126, 1, 80, 32, {}),
    (64, 256, 4, 4, 256, 64, {}),
    (64, 256, 2, 2, 512, 16, {}),
    (64, 256, 6, 2, 8, 4, {}),
    (4, 256, 32, 8, 128, 16, {"dtype": "float16", "layout": "PACKED", "cache_dtype": "int8"}),
    (
        4,
        256,
        32,
        8,
        128,
        16,
        {"sliding_window": 1024, "softcap": 30.0, "alibi": True, "sinks": True, "q_len": 2},
    ),
    (4, 256, 128, 2, 512, 16, {}),
    (4, 256, 32, 2, 512, 16, {"q_len": 4, "cache_dtype": "int8"}),
    (4, 256, 16, 2, 256, 16, {"q_len": 8, "dtype": "float32"}),
    (4, 256, 128, 2, 256, 16, {"cache_dtype": "float8_e5m2"}),
]
# (num_seqs, max_pages, num_heads, num_kv_heads, q_len, page_size, options); "num_parts" makes a schedule
MLA = [
    (8, 12, 1, 1, 1, 64, {}),
    (8, 12, 3, 1, 1, 64, {"config": {"num_splits": 4, "min_split_tokens": 128, "target_programs": 64}}),
    (8, 12, 16, 1, 1, 64, {"num_parts": 7}),
    (
        8,
        12,
        9,
        1,
        2,
        64,
        {"causal": True, "config": {"num_splits": 4, "min_split_tokens": 128, "target_programs": 64}},
    ),
    (8, 36, 6, 2, 4, 16, {"causal": True, "num_parts": 13}),
    (8, 20, 4, 1, 4, 32, {"num_parts": 4}),
    (8, 36, 8, 4, 1, 16, {"config": {"num_splits": 4, "min_split_tokens": 128, "target_programs": 64}}),
    (8, 8, 63, 1, 1, 128, {"num_parts": 5}),
    (8, 12, 126, 1, 1, 64, {"num_parts": 9}),
    (8, 36, 63, 1, 2, 16, {"causal": True}),
    (8, 12, 16, 1, 1, 64, {"dtype": "float16", "num_parts": 7}),
    (
        8,
        8,
        5,
        1,
        2,
        128,
        {
            "dtype": "float16",
            "causal": True,
            "config": {"num_splits": 4, "min_split_tokens": 128, "target_programs": 64},
        },
    ),
    (
        8,
        12,
        4,
        1,
        1,
        64,
        {
            "dtype": "float32",
            "config": {"num_splits": 4, "min_split_tokens": 128, "target_programs": 64, "block_kv": 16},
        },
    ),
    (8, 25, 4, 1, 2, 24, {"dtype": "float32", "causal": True, "num_parts": 3}),
    (8, 36, 4, 1, 1, 16, {"config": {"block_kv": 64}}),
    (8, 8, 4, 1, 1, 128, {"num_parts": 5, "config": {"block_kv": 128, "num_stages": 2}}),
    (128, 64, 16, 1, 1, 64, {"tag": "serving", "num_parts": 132}),
    (128, 64, 16, 1, 1, 64, {"tag": "serving"}),
    (128, 64, 32, 1, 1, 64, {"tag": "serving", "num_parts": 132}),
    (128, 64, 32, 1, 1, 64, {"tag": "serving"}),
    (128, 64, 64, 1, 1, 64, {"tag": "serving", "num_parts": 132}),
    (128, 64, 64, 1, 1, 64, {"tag": "serving"}),
    (128, 64, 128, 1, 1, 64, {"tag": "serving", "num_parts": 66}),
    (128, 64, 128, 1, 1, 64, {"tag": "serving"}),
    (4, 256, 16, 1, 2, 64, {"dtype": "float16", "causal": True, "num_parts": 132}),
    (4, 256, 63, 1, 2, 16, {"causal": True}),
    (4, 256, 9, 1, 1, 128, {"causal": True, "num_parts": 132}),
    (4, 256, 16, 1, 1, 16, {"causal": True, "num_parts": 132}),
    (4, 256, 32, 1, 1, 32, {"causal": True}),
]
# (num_tokens, num_kv_heads, head_dim, num_pages, page_size, options) of write_kv
WRITES = [
    (64, 3, 80, 100, 16, {"layout": layout, "cache_dtype": stored})
    for layout in ("NHD", "HND", "PACKED")
    for stored in ("bfloat16", "float8_e5m2", "int8", "float8_e4m3fn")
]
NUM_PAGES = 900
IMPLEMENTATIONS = ("pallas", "triton")

shape = jax.ShapeDtypeStruct


def calls() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """(name, tag, what lowers it by an implementation) of every module."""
    for op, rows, lower in (("paged", PAGED, paged), ("mla", MLA, mla), ("write", WRITES, write)):
        for *sizes, options in rows:
            options = dict(options)
            tag = options.pop("tag", "")
            if op == "mla" and options.get("dtype") == "float32":
                continue  # the kernel refuses it
            name = " ".join([op, *map(str, sizes), *(f"{k}={v}" for k, v in options.items())])
            yield name, tag, functools.partial(lower, *sizes, **options)
    yield from lowered_calls.calls()


def pools(layout, sizes, stored):
    num_pages, page_size, heads, head_dim = sizes
    x = 16 // jnp.dtype(stored).itemsize
    shapes = {
        "NHD": [sizes] * 2,
        "HND": [(num_pages, heads, page_size, head_dim)] * 2,
        "PACKED": [
            (num_pages, heads, head_dim // x, page_size, x),
            (num_pages, heads, head_dim, page_size),
        ],
    }[layout]
    return [shape(one, stored) for one in shapes]


def paged(
    num_seqs, max_pages, num_heads, num_kv_heads, head_dim, page_size, *,
    dtype="bfloat16", cache_dtype=None, q_len=1, layout="NHD", config=None, block_sparse=None,
    scale_per_head=False, alibi=False, sinks=False, implementation="pallas", device=lowering.H100, **rules,
):  # fmt: skip
    if config is not None:
        block_q = 64 if q_len * num_heads // num_kv_heads > 16 else 16
        config = pallas_attn.PagedAttentionConfig(
            **{"block_q": block_q, "block_kv": 32, "num_splits": 1, **config}
        )
    if block_sparse is not None:
        rules["block_sparse"] = pallas_attn.LocalStride(*block_sparse)
    arrays = {name: shape((num_heads,), jnp.float32) for name in ("alibi_slopes", "sinks")}
    arrays = {k: v for (k, v), used in zip(arrays.items(), (alibi, sinks), strict=True) if used}
    if cache_dtype is not None:
        per_head = shape((num_kv_heads,) if scale_per_head else (), jnp.float32)
        arrays |= {"k_scale": per_head, "v_scale": per_head}

    def call(arrays, *operands):
        return pallas_attn.paged_attention(
            *operands,
            **arrays,
            **rules,
            layout=layout,
            config=config,
            return_lse=True,
            implementation=implementation,
        )

    return lowering.lower_for_gpu(
        call,
        arrays,
        shape((num_seqs, q_len, num_heads, head_dim), dtype),
        *pools(layout, (NUM_PAGES, page_size, num_kv_heads, head_dim), cache_dtype or dtype),
        shape((num_seqs, max_pages), jnp.int32),
        shape((num_seqs,), jnp.int32),
        device=device,
    )


def mla(
    num_seqs, max_pages, num_heads, num_kv_heads, q_len, page_size, *,
    dtype="bfloat16", causal=False, num_parts=None, config=None, implementation="pallas", device=lowering.H100,
):  # fmt: skip
    if config is not None:
        block_q = 16 if q_len * num_heads // num_kv_heads <= 16 else 64
        defaults = {"block_q": block_q, "block_kv": 32, "num_splits": 1, "num_warps": 4}
        config = pallas_attn.MLADecodeConfig(**{**defaults, **config})
    tokens = "q_len" if "q_len" in inspect.signature(pallas_attn.mla_schedule).parameters else "s_q"
    cut = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, tokens: q_len, "num_parts": num_parts}

    def call(query, cache, tables, lens):
        schedule = pallas_attn.mla_schedule(lens, **cut) if num_parts else None
        return pallas_attn.mla_decode(
            query,
            cache,
            tables,
            lens,
            schedule=schedule,
            causal=causal,
            return_lse=True,
            config=config,
            implementation=implementation,
        )

    return lowering.lower_for_gpu(
        call,
        shape((num_seqs, q_len, num_heads, 576), dtype),
        shape((NUM_PAGES, page_size, num_kv_heads, 576), dtype),
        shape((num_seqs, max_pages), jnp.int32),
        shape((num_seqs,), jnp.int32),
        device=device,
    )


def write(
    num_tokens, num_kv_heads, head_dim, num_pages, page_size, *,
    layout, cache_dtype, implementation="pallas", device=lowering.H100,
):  # fmt: skip
    new = shape((num_tokens, num_kv_heads, head_dim), jnp.bfloat16)
    call = functools.partial(pallas_attn.write_kv, layout=layout, implementation=implementation)
    sizes = (num_pages, page_size, num_kv_heads, head_dim)
    slots = shape((num_tokens,), jnp.int32)
    return lowering.lower_for_gpu(call, new, new, *pools(layout, sizes, cache_dtype), slots, device=device)


def compiled(lowered: Any, sm: int) -> Iterator[str]:
    for kernel in lowering.compile_kernels(lowered, sm):
        counts = {
            what: len(re.findall(pattern, kernel.ptx))
            for what, pattern in {
                "mma": r"\bmma\.sync",
                "wgmma": r"wgmma\.mma_async",
                "cp.async": r"cp\.async\.c[ag]",
                "ld.global": r"ld\.global",
                "st.global": r"st\.global",
            }.items()
        }
        yield (
            f"  {kernel.name}: {kernel.registers} registers, {kernel.shared_bytes} B shared, "
            f"{kernel.stack_bytes} B stack, " + ", ".join(f"{n} {what}" for what, n in counts.items())
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, help="write the texts and digests here")
    parser.add_argument("--against", type=Path, help="a file that --save wrote")
    parser.add_argument(
        "--compile", type=int, metavar="SM", help="compile for sm_SM with the installed Triton"
    )
    parser.add_argument("--only", default="", help="modules with this tag, or this in their name")
    parser.add_argument("--lines", type=int, default=12, help="lines shown of each difference")
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, action="append", help="all by default")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)  # of Pallas' Triton lowering
    sys.setrecursionlimit(100_000)
    old = json.loads(chosen.against.read_text()) if chosen.against else {}
    new, different = {}, []
    for (name, tag, lower), implementation in itertools.product(
        calls(), chosen.implementation or IMPLEMENTATIONS
    ):
        if chosen.only not in (tag, name) and chosen.only not in name:
            continue
        if chosen.compile:
            print(name, *compiled(lower(implementation="pallas"), chosen.compile), sep="\n", flush=True)
            continue
        name = f"{name}, {implementation}"
        with triton_kernels.written() as written:
            lowered = lower(implementation=implementation)
        new[name] = module_text.texts(lowered, written)
        if not chosen.against:
            digest = hashlib.sha256(json.dumps(new[name]).encode()).hexdigest()
            print(digest[:16], name, flush=True)
            continue
        before = old.get(name, {})
        for part in {**before, **new[name]}:
            was, now = (x.get(part, "").splitlines() for x in (before, new[name]))
            if was == now:
                continue
            different.append(name)
            print(f"DIFFERENT {name}: {part}")
            print(
                *list(difflib.unified_diff(was, now, "before", "now", n=0, lineterm=""))[: chosen.lines],
                sep="\n",
                flush=True,
            )
    if chosen.save:
        chosen.save.write_text(json.dumps(new))
    if chosen.against:
        print(f"{len(new)} modules, {len(set(different))} different")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
