"""Calls of every op whose shapes and options a seed draws, lowered for GPUs that are not there.

`draw(op, seed)` is always the same call. Whatever bears on a tile's shared memory is drawn: dtypes, layouts, page sizes
from 1, heads from 16 to the widest, groups that are no power of two, and every option that adds to a kernel's body.
"""

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lowering

import pallas_attn
from pallas_attn import LocalStride, PagedKVCache, SparseLayout
from pallas_attn._call.pools import PoolShape, array_shape

struct = jax.ShapeDtypeStruct
DIMS = (16, 32, 40, 64, 72, 80, 96, 112, 120, 128, 128, 160, 192, 256, 256)
GROUPS = (1, 2, 3, 4, 5, 7, 8, 16, 32)
PAGES = (1, 2, 3, 4, 8, 16, 24, 32, 64, 128, 256)
LAYOUTS = ("NHD", "HND", "PACKED")
DTYPES = ("bfloat16", "bfloat16", "float16", "float32")
NARROW = ("float8_e4m3fn", "float8_e5m2", "int8")
NUM_PAGES = 900


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A call: its function, what is traced, and the options that are not."""

    op: str
    seed: int
    call: Callable[..., Any]
    arrays: tuple[Any, ...]
    options: dict[str, Any]
    stored: str = "bfloat16"

    def __str__(self) -> str:
        shown = jax.tree.map(
            lambda x: f"{jnp.dtype(x.dtype).name}{list(x.shape)}".replace(" ", ""), self.arrays
        )
        return f"{self.op} {self.seed}: {shown} {self.options}"

    def serves(self, sm: int) -> bool:
        """sm_80 does not convert e4m3."""
        return self.stored != "float8_e4m3fn" or sm >= 89

    def lowered(self, sm: int, implementation: str | None = None) -> Any:
        call = functools.partial(self.call, implementation=implementation, **self.options)
        return lowering.lower_for_gpu(call, *self.arrays, device=lowering.DEVICES[sm])


class _Draw(random.Random):
    def maybe(self, what: Any, part: float = 0.3) -> Any:
        return what if self.random() < part else None

    def log(self, least: int, most: int) -> int:
        """As often below as above the geometric mean."""
        return round(least * (most / least) ** self.random())


def draw(op: str, seed: int) -> Drawn:
    return OPS[op](op, seed, _Draw(f"{op} {seed}"))


def _ints(*shape: int) -> Any:
    return struct(shape, jnp.int32)


def _floats(*shape: int) -> Any:
    return struct(shape, jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Cache:
    """Pools, and what goes with them."""

    pools: list[Any]
    tables: Any
    dtype: str
    stored: str
    heads: int
    kv_heads: int
    dims: tuple[int, int]
    seqs: int
    traced: dict[str, Any]
    """Optional arrays."""
    options: dict[str, Any]


def _cache(rng: _Draw, *, dims: tuple[int, int], most_seqs: int = 300) -> _Cache:
    dtype = rng.choice(DTYPES)
    stored = rng.maybe(rng.choice(NARROW), 0.4) or dtype
    kv_heads, group = rng.choice((1, 2, 3, 4, 8)), rng.choice(GROUPS)
    page, layout, seqs = rng.choice(PAGES), rng.choice(LAYOUTS), rng.log(1, most_seqs)
    x = 16 // jnp.dtype(stored).itemsize
    if layout == "PACKED":
        dims = (-(-dims[0] // x) * x, -(-dims[1] // x) * x)
    pools = [
        struct(array_shape(PoolShape(NUM_PAGES, page, kv_heads, dim), layout, which, stored), stored)
        for which, dim in zip(("key", "value"), dims, strict=True)
    ]
    tables = _ints(seqs, max(1, rng.log(64, 32768) // page))
    heads = kv_heads * group
    traced = {}
    for name in ("alibi_slopes", "sinks"):
        if rng.maybe(True):
            traced[name] = _floats(heads)
    if stored != dtype:
        scale = rng.choice(((), (kv_heads,), (NUM_PAGES, kv_heads)))
        traced |= {name: _floats(*scale) for name in ("k_scale", "v_scale")}
    window = rng.choice((None, None, 100, 1000, "traced"))
    options = {"layout": layout, "softcap": rng.maybe(30.0), "return_lse": rng.random() < 0.5}
    if window == "traced":
        traced["sliding_window"] = _ints()
    else:
        options["sliding_window"] = window
    return _Cache(pools, tables, dtype, stored, heads, kv_heads, dims, seqs, traced, options)


def _with_traced(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The first operand is a dictionary of optional ones."""
    return lambda traced, *arrays, **options: fn(*arrays, **traced, **options)


def _paged(op: str, seed: int, rng: _Draw) -> Drawn:
    dim = rng.choice((*DIMS, 512))
    cache = _cache(rng, dims=(dim, dim))
    q_len = rng.choice((1, 1, 1, 2, 4, 9))
    traced, options = dict(cache.traced), dict(cache.options)
    if q_len > 1 and rng.maybe(True):
        traced["tree_mask"] = struct((cache.seqs, q_len, q_len), jnp.bool_)
        if rng.maybe(True, 0.5):
            traced["query_positions"] = _ints(cache.seqs, q_len)
    elif rng.maybe(True, 0.2):
        options["block_sparse"] = LocalStride(rng.choice((16, 64)), 2, 3, 1, 0)
    options["batch_invariant"] = rng.random() < 0.2
    query = struct((cache.seqs, q_len, cache.heads, cache.dims[0]), cache.dtype)
    arrays = (traced, query, *cache.pools, cache.tables, _ints(cache.seqs))
    return Drawn(op, seed, _with_traced(pallas_attn.paged_attention), arrays, options, cache.stored)


def _ragged(op: str, seed: int, rng: _Draw) -> Drawn:
    dims = (rng.choice(DIMS), rng.choice(DIMS))
    apart = op == "prefix"
    cache = _cache(rng, dims=(dims[0], dims[0] if rng.random() < 0.6 else dims[1]), most_seqs=64)
    tokens = rng.log(cache.seqs, max(16384 // cache.heads, 2 * cache.seqs))
    traced, options = dict(cache.traced), dict(cache.options)
    if rng.maybe(True, 0.2):
        traced["tree_mask"] = struct((tokens, rng.choice((4, 16))), jnp.bool_)
        if rng.maybe(True, 0.5):
            traced["query_positions"] = _ints(tokens)
    elif rng.maybe(True, 0.2):
        options["causal"] = False
    if rng.maybe(True, 0.2):
        options["out_dtype"] = jnp.float8_e5m2
        traced["out_scale"] = _floats()
    if apart and rng.maybe(True, 0.2):
        options["skip_decode"] = True
    query = struct((tokens, cache.heads, cache.dims[0]), cache.dtype)
    new = [struct((tokens, cache.kv_heads, dim), cache.dtype) for dim in cache.dims] if apart else []
    lens = (cache.tables, _ints(cache.seqs), _ints(cache.seqs + 1))
    fn = pallas_attn.prefix_prefill if apart else pallas_attn.ragged_paged_attention
    return Drawn(
        op, seed, _with_traced(fn), (traced, query, *new, *cache.pools, *lens), options, cache.stored
    )


def _flash(op: str, seed: int, rng: _Draw) -> Drawn:
    """With gradients of all that have some."""
    dtype, dim = rng.choice(DTYPES), rng.choice(DIMS)
    value_dim = dim if rng.random() < 0.6 else rng.choice(DIMS)
    kv_heads, group, batch = rng.choice((1, 2, 4)), rng.choice(GROUPS), rng.choice((1, 2, 5))
    tokens = rng.choice((17, 64, 100, 513, 2048))
    kv_tokens = tokens if rng.random() < 0.7 else rng.choice((33, 400, 2000))
    traced: dict[str, Any] = {}
    options: dict[str, Any] = {"causal": rng.random() < 0.5, "softcap": rng.maybe(30.0)}
    options["layout"] = rng.choice(("BTNH", "BNTH"))
    if rng.maybe(True):
        sides = (
            rng.choice((1, batch)),
            rng.choice((1, kv_heads * group)),
            rng.choice((1, tokens)),
            kv_tokens,
        )
        traced["bias"] = struct(sides, rng.choice((dtype, "float32")))
    if rng.maybe(True):
        traced["mask"] = struct((batch, 1, rng.choice((1, tokens)), kv_tokens), jnp.bool_)
    if rng.maybe(True, 0.2):
        traced["segment_ids"] = (_ints(batch, tokens), _ints(batch, kv_tokens))
    if rng.maybe(True, 0.2):
        traced["sinks"] = _floats(kv_heads * group)
    options["sliding_window"] = rng.maybe(rng.choice((50, 300)))

    def gradients(traced, query, key, value, **options):
        whole = {name: traced.pop(name) for name in ("mask", "segment_ids") if name in traced}

        def loss(operands):
            out: Any = pallas_attn.flash_attention(**operands, **whole, **options)
            return out.astype(jnp.float32).sum()

        return jax.grad(loss)({**traced, "query": query, "key": key, "value": value})

    shapes = (
        (batch, tokens, kv_heads * group, dim),
        (batch, kv_tokens, kv_heads, dim),
        (batch, kv_tokens, kv_heads, value_dim),
    )
    if options["layout"] == "BNTH":
        shapes = tuple((b, n, t, d) for b, t, n, d in shapes)
    arrays = tuple(struct(shape, dtype) for shape in shapes)
    return Drawn(
        op, seed, lambda traced, *rest, **o: gradients(dict(traced), *rest, **o), (traced, *arrays), options
    )


def _blocksparse(op: str, seed: int, rng: _Draw) -> Drawn:
    """Prompts in rows, with gradients; or both prompts and sequences that are decoded, over pages."""
    dtype, dim = rng.choice(DTYPES), rng.choice(DIMS)
    kv_heads, group, seqs = rng.choice((1, 2, 4)), rng.choice(GROUPS), rng.log(1, 64)
    heads, tokens = kv_heads * group, rng.choice((100, 1000, 4000))
    sizes = rng.choice((16, 32, 64, 128)), rng.choice((16, 64, 128))
    each = rng.choice((1, heads))
    layout = SparseLayout(_ints(each, 129), _ints(each, rng.choice((300, 5000))), *sizes)
    options = {"softcap": rng.maybe(30.0)}
    query = struct((tokens, heads, dim), dtype)
    fn = functools.partial(pallas_attn.blocksparse_attention)
    if op == "blocksparse":
        keys = struct((tokens, kv_heads, dim), dtype)

        def gradients(query, key, value, layout, ends, **options):
            def loss(query, key, value):
                out: Any = fn(query, key, value, layout, cu_q_lens=ends, cu_k_lens=ends, **options)
                return out.astype(jnp.float32).sum()

            return jax.grad(loss, (0, 1, 2))(query, key, value)

        return Drawn(op, seed, gradients, (query, keys, keys, layout, _ints(seqs + 1)), options)
    page, options["cache_layout"] = rng.choice(PAGES), rng.choice(LAYOUTS)
    if options["cache_layout"] == "PACKED":
        dim = -(-dim // 8) * 8
        query = struct((tokens, heads, dim), dtype)
    pools = [
        struct(
            array_shape(PoolShape(NUM_PAGES, page, kv_heads, dim), options["cache_layout"], which, dtype),
            dtype,
        )
        for which in ("key", "value")
    ]

    def over_pages(query, key, value, layout, ends, tables, lens, **options):
        return fn(query, key, value, layout, cu_q_lens=ends, block_tables=tables, seq_lens=lens, **options)

    lens = (_ints(seqs + 1), _ints(seqs, max(1, 4096 // page)), _ints(seqs))
    return Drawn(op, seed, over_pages, (query, *pools, layout, *lens), options)


def _latents(rng: _Draw, page: int) -> tuple[Any, str]:
    """(a pool, the query's dtype)"""
    dtype = rng.choice(("bfloat16", "float16"))
    if rng.maybe(True, 0.4):
        return struct((NUM_PAGES, page, 1, 656), jnp.uint8), "bfloat16"
    return struct((NUM_PAGES, page, 1, 576), dtype), dtype


def _mla(op: str, seed: int, rng: _Draw) -> Drawn:
    page, seqs = rng.choice(PAGES), rng.log(1, 300)
    pool, dtype = _latents(rng, page)
    q_len, heads = rng.choice((1, 1, 2, 4)), rng.choice((1, 5, 8, 16, 24, 32, 63, 64, 128))
    options = {"causal": rng.random() < 0.5, "batch_invariant": rng.random() < 0.3, "return_lse": True}
    arrays = (
        struct((seqs, q_len, heads, 576), dtype), pool, _ints(seqs, max(1, rng.log(64, 32768) // page)), _ints(seqs),
    )  # fmt: skip
    return Drawn(op, seed, pallas_attn.mla_decode, arrays, options)


def _mla_prefill(op: str, seed: int, rng: _Draw) -> Drawn:
    page, seqs, heads = rng.choice(PAGES), rng.log(1, 64), rng.choice((1, 5, 16, 64, 128))
    pool, dtype = _latents(rng, page)
    nope, value = rng.choice(((128, 128), (64, 64), (192, 128), (96, 256)))
    tokens = rng.log(seqs, max(8192 // heads, 2 * seqs))
    lens = (_ints(seqs, max(1, 4096 // page)), _ints(seqs), _ints(seqs + 1))
    up = (struct((heads, nope, 512), dtype), struct((heads, value, 512), dtype))
    # Latents of bytes are projected only.
    form = "projected" if pool.dtype == jnp.uint8 else rng.choice(("absorbed", "projected"))
    options = {"form": form, "return_lse": rng.random() < 0.5}

    def call(key_up, value_up, *arrays, **options):
        return pallas_attn.mla_prefill(*arrays, key_up=key_up, value_up=value_up, **options)

    return Drawn(op, seed, call, (*up, struct((tokens, heads, nope + 64), dtype), pool, *lens), options)


def _sparse(op: str, seed: int, rng: _Draw) -> Drawn:
    pool, dtype = _latents(rng, rng.choice(PAGES))
    heads, seqs, q_len = rng.choice((1, 5, 16, 32, 64, 127, 128)), rng.log(1, 300), rng.choice((1, 2))
    topk = rng.choice((64, 512, 2048))
    traced = {"sinks": _floats(heads)} if rng.maybe(True) else {}
    if op == "sparse_prefill":
        rows = struct((9000, *pool.shape[2:]), pool.dtype)
        arrays = (traced, struct((seqs * q_len, heads, 576), dtype), rows, _ints(seqs * q_len, 1, topk))
        return Drawn(op, seed, _with_traced(pallas_attn.sparse_mla_prefill), arrays, {})
    if rng.maybe(True):
        traced["topk_length"] = _ints(seqs)
    options = {}
    if rng.maybe(True, 0.5):
        options["addressing"], traced["block_tables"] = "positions", _ints(seqs, 128)
    arrays = (traced, struct((seqs, q_len, heads, 576), dtype), pool, _ints(seqs, q_len, topk))
    return Drawn(op, seed, _with_traced(pallas_attn.sparse_mla_decode), arrays, options)


def _write(op: str, seed: int, rng: _Draw) -> Drawn:
    """Where pages have scales that grow, too."""
    dtype, layout, page = rng.choice(DTYPES), rng.choice(LAYOUTS), rng.choice(PAGES)
    grows = op == "write_scaled"
    stored = rng.choice(NARROW) if grows else rng.maybe(rng.choice(NARROW), 0.5) or dtype
    heads, dim = rng.choice((1, 2, 3, 8, 32, 128)), rng.choice((*DIMS, 512))
    x = 16 // jnp.dtype(stored).itemsize
    dim, tokens = -(-dim // x) * x, rng.log(1, 5000)
    if grows:
        order: Any = layout

        def empty() -> Any:
            return PagedKVCache.create(
                num_layers=2,
                num_pages=9,
                page_size=page,
                num_kv_heads=heads,
                head_dim=dim,
                layout=order,
                block_tables=jnp.zeros((4, 2), jnp.int32),
                dtype=jnp.dtype(stored),
                scale_per_page=True,
            )

        def call(cache, new, positions, *, implementation):
            return cache.write(1, new, new, positions, implementation=implementation)

        new = struct((4, min(tokens, 2 * page), heads, dim), dtype)
        return Drawn(op, seed, call, (jax.eval_shape(empty), new, _ints(*new.shape[:2])), {}, stored)
    # 8-bit pools between 2**31 and 2**32 elements are refused.
    num_pages = min(NUM_PAGES, (2**31 - 1) // (page * heads * dim))
    pools = [
        struct(array_shape(PoolShape(num_pages, page, heads, dim), layout, which, stored), stored)
        for which in ("key", "value")
    ]
    new = struct((tokens, heads, dim), dtype)
    scales = {} if stored == dtype else {name: _floats(heads) for name in ("k_scale", "v_scale")}
    arrays = (scales, new, new, *pools, _ints(tokens))
    return Drawn(op, seed, _with_traced(pallas_attn.write_kv), arrays, {"layout": layout}, stored)


def _write_latents(op: str, seed: int, rng: _Draw) -> Drawn:
    pool, dtype = _latents(rng, rng.choice(PAGES))
    tokens = rng.log(1, 5000)
    return Drawn(op, seed, pallas_attn.write_latents, (struct((tokens, 576), dtype), pool, _ints(tokens)), {})


OPS: dict[str, Callable[[str, int, _Draw], Drawn]] = {
    "paged": _paged,
    "ragged": _ragged,
    "prefix": _ragged,
    "flash": _flash,
    "blocksparse": _blocksparse,
    "blocksparse_pages": _blocksparse,
    "mla": _mla,
    "mla_prefill": _mla_prefill,
    "sparse": _sparse,
    "sparse_prefill": _sparse,
    "write": _write,
    "write_scaled": _write,
    "write_latents": _write_latents,
}
