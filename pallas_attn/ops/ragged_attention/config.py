"""Tile sizes of the ragged attention kernel, and the heuristic for devices without a measured file."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from pallas_attn._call import budget, sizes
from pallas_attn._call.checks import check_int, dtype_name, fail
from pallas_attn._call.configs import SplitKVConfig
from pallas_attn._call.device import Device, current_device
from pallas_attn._split.splits import MOST_SPLITS
from pallas_attn._tile import quantization
from pallas_attn.ops.ragged_attention.operands import Operands

# Tiles of rows by tokens and stages of the pipeline, best first, if they fit: measured on Hopper (EXPERIMENTS.md).
LONG = [
    (128, 128, 3), (128, 64, 3), (128, 64, 2), (64, 64, 3), (64, 64, 2), (64, 32, 2), (32, 32, 2), (16, 16, 1),
]  # fmt: skip
# Of heads of 64 or less, whose softmax takes as long as their products: two programs fit on a multiprocessor, and one
# has the tensor cores while the other does the rest.
FEW_DIMS = [(64, 128, 3), *LONG]
# Of latents, whose 512 values are among the 576 elements of a key: as `mla_decode` has them.
LATENT = [(64, 32, 4), (64, 32, 3), (64, 32, 2), (32, 32, 2), (16, 16, 1)]
SHORT = [(128, 3), (64, 3), (32, 3), (16, 2), (16, 1)]
# Where tables hold more than this, sequences that are decoded may differ, and are cut as lengths ask for: the longest
# alone would keep the call waiting.
WHOLE_TOKENS = 1024
# A tile of decoded sequences in tables that hold no more, or that are so many for each multiprocessor, times KV heads,
# that most must be short: programs that share one begin while others wait for memory, and copy less behind a sequence's
# end.
SMALL_TILE_BYTES, MANY_EACH = 16 * 1024, 24
# Bytes, of 131072 tokens with 8 KV heads of 128: not measured, but little beside a cache and enough for usual prompts.
WIDENED_BYTES = 512 * 2**20
SUMS = 128 * 256  # elements of output that a program of 8 warps has registers for


@dataclasses.dataclass(frozen=True)
class RaggedTiles(SplitKVConfig):
    """How one launch of the kernel is cut up.

    block_q: query rows (tokens x heads) of one sequence and KV head that a program serves, a power of two >= 16.
    block_kv: tokens a program takes in per step, a power of two >= 16.
    num_splits: most splits the keys of a block of rows are cut into. How many are used follows from the lengths at
        run time; room is taken for so many of every block or, if few sequences may have such blocks, for what fills
        the device. In a short launch it is taken for what lengths can ask for, and there 0 is as many as they ask for.
    min_split_tokens: a split shorter than this costs more in merging than it gains in parallelism.
    target_programs: programs, over the whole device, that the run-time cut aims at.
    num_warps, num_stages: Triton's warps per program and depth of software pipelining.
    """


@dataclasses.dataclass(frozen=True)
class RaggedAttentionConfig:
    """How one call is cut up: two launches of one kernel, each over the sequences that its tiles are made for.

    long: for sequences with more query rows a KV head than short.block_q, and for all where there is no `short`.
    short: for sequences that are decoded, one program's rows or fewer; None leaves them to `long`.
    widened_bytes: of "cuda" over 8-bit caches, the most memory for a copy in query's dtype of what long prompts see.
        Sequences with at least 1024 rows of queries a KV head are taken in order as long as there is room, of
        kv_heads * (head_dim + value_dim) * 2 bytes a token; the others' keys are converted in each of their tiles,
        which takes some 1.4 times as long. It is taken for what block tables can hold. 0: none.
    """

    long: RaggedTiles
    short: RaggedTiles | None = None
    _: dataclasses.KW_ONLY
    widened_bytes: int = WIDENED_BYTES

    def __post_init__(self):
        for name, optional in (("long", False), ("short", True)):
            tiles = getattr(self, name)
            if not (isinstance(tiles, RaggedTiles) or (optional and tiles is None)):
                expected = "RaggedTiles or None" if optional else "RaggedTiles"
                fail("RaggedAttentionConfig", name, expected, type(tiles).__name__, TypeError)
        if not self.long.num_splits:
            expected = "tiles with num_splits of at least 1, of which room is taken for each block"
            fail("RaggedAttentionConfig", "long", expected, "0")
        check_int("RaggedAttentionConfig", "widened_bytes", self.widened_bytes, least=0)


def heuristic(
    *,
    num_tokens: int,
    num_seqs: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    value_dim: int,
    itemsize: int,
    query_itemsize: int,
    max_len: int,
    latent: bool,
    device: Device,
    page_scales: bool = False,
    tree: bool = False,
    new_apart: bool = False,
    row_bytes: int = 0,
    **measured: Any,
) -> RaggedAttentionConfig:
    """`itemsize` bytes hold an element of the cache, `query_itemsize` one of the query; `max_len` tokens fit in a row
    of the block table. `latent`: keys hold the values. `page_scales`: each page of a narrow cache has its own, with
    which wide tiles spill. `tree`: there is a mask of which tokens see which. `new_apart`: new tokens' keys and values
    are walked too, in the query's dtype. `row_bytes` are what mods read of a row and key. `measured`: of each launch,
    "long" and "short", fields of its tiles that are known; those of a launch that the call does not have are left
    out."""
    if unknown := sorted(measured.keys() - {"long", "short"}):
        raise TypeError(f"no launch: {', '.join(unknown)}")
    query_dims, value_dims = (tuple(size for _, size in sizes.chunks(dim)) for dim in (head_dim, value_dim))
    walked = query_dims if latent else query_dims + value_dims
    narrow = itemsize < query_itemsize

    def fits(block_q: int, block_kv: int, num_stages: int, num_warps: int) -> bool:
        tile = budget.Tile(
            rows=block_q,
            tokens=block_kv,
            held=query_dims,
            walked=walked,
            itemsize=query_itemsize,
            stored=itemsize,
            num_warps=num_warps,
            num_stages=num_stages,
            spare=True,
            sums=value_dim if latent else 0,
            pair_bytes=row_bytes,
            exchanges_pairs=tree or row_bytes > 0,
        )
        new = dataclasses.replace(tile, stored=query_itemsize if new_apart else itemsize)
        return tile.fits(device) and new.fits(device)

    def tiles(
        block_q: int, block_kv: int, num_stages: int, programs: int, a_core: int, warps: int
    ) -> RaggedTiles:
        target = a_core * device.num_cores
        min_split_tokens = 512 if a_core == 1 else 256
        # Splits that no block has are programs that come for nothing, where each takes a multiprocessor for itself one
        # after the other: for 512 tokens on 32256, room for three took 8% longer than room for two.
        rounded = math.floor if a_core == 1 else math.ceil
        return RaggedTiles(
            block_q=block_q,
            block_kv=block_kv,
            num_splits=most_splits(programs, max_len, target, min_split_tokens, rounded),
            min_split_tokens=min_split_tokens,
            target_programs=target,
            num_warps=warps,
            num_stages=num_stages,
        )

    def warps(block_q: int) -> int:
        return 8 if block_q == 128 or block_q * value_dim == SUMS else 4

    most_rows = sizes.tile_side(num_tokens * group)
    widest = 32 if query_itemsize == 4 else 64 if page_scales else 128
    few_dims = max(head_dim, value_dim) <= 64 and not narrow
    block_q, block_kv, stages = next(
        (min(rows, most_rows), tokens, stages)
        for rows, tokens, stages in (LATENT if latent else FEW_DIMS if few_dims else LONG)
        if tokens <= widest
        and rows * value_dim <= SUMS
        and fits(min(rows, most_rows), tokens, stages, warps(min(rows, most_rows)))
    )
    programs = math.ceil(num_tokens * group / block_q) * num_kv_heads
    long = tiles(block_q, block_kv, stages, programs, 1, warps(block_q))
    short_q = sizes.tile_side(group)
    if short_q >= block_q:
        return RaggedAttentionConfig(dataclasses.replace(long, **measured.get("long", {})))
    widest = min(widest, 64) if narrow else widest
    many = num_seqs * num_kv_heads >= MANY_EACH * device.num_cores
    if (many or max_len <= WHOLE_TOKENS) and not latent:
        widest = min(widest, max(16, SMALL_TILE_BYTES // (sum(walked) * itemsize)))
    block_kv, stages = next(
        (tokens, stages) for tokens, stages in SHORT if tokens <= widest and fits(short_q, tokens, stages, 4)
    )
    short = tiles(short_q, block_kv, stages, num_seqs * num_kv_heads, 4, 4)
    if max_len > WHOLE_TOKENS:
        short = dataclasses.replace(short, num_splits=max_len // short.min_split_tokens)
    return RaggedAttentionConfig(
        dataclasses.replace(long, **measured.get("long", {})),
        dataclasses.replace(short, **measured.get("short", {})),
    )


def most_splits(
    programs: int,
    max_len: int,
    target_programs: int,
    min_split_tokens: int,
    rounded: Callable[[float], int],
) -> int:
    """Splits to provide for: lengths are not known when a call is compiled, only what the table can hold."""
    wanted = rounded(2 * target_programs / programs) if programs < target_programs else 1
    return max(1, min(wanted, max_len // min_split_tokens, MOST_SPLITS))


def key(operands: Operands) -> dict[str, Any] | None:
    """What measured files go by. None is for mods: they are measured for none."""
    if operands.mods is not None:
        return None
    sizes = operands.sizes
    return dict(
        head_dim=operands.pool.head_dim,
        value_dim=operands.value_dim,
        page_size=operands.pool.page_size,
        dtype=dtype_name(operands.key_cache.dtype),
        query_itemsize=operands.query.dtype.itemsize,
        layout=operands.layout,
        # Of a sequence on the average; what each one asks for nobody knows when a call is compiled.
        rows=math.ceil(operands.query.shape[0] / sizes.num_seqs) * sizes.group,
        streams=sizes.streams,
        max_len=sizes.max_len,
    )


def default(operands: Operands, **measured: Any) -> RaggedAttentionConfig:
    """As the heuristic has it for a call at hand."""
    sizes = operands.sizes
    return heuristic(
        num_tokens=operands.query.shape[0],
        num_seqs=sizes.num_seqs,
        num_kv_heads=operands.pool.num_kv_heads,
        group=sizes.group,
        head_dim=operands.pool.head_dim,
        value_dim=operands.value_dim,
        itemsize=operands.key_cache.dtype.itemsize,
        query_itemsize=operands.query.dtype.itemsize,
        max_len=sizes.max_len,
        latent=operands.value_cache is None,
        page_scales=any(map(quantization.is_by_page, (operands.k_scale, operands.v_scale))),
        tree=operands.tree_mask is not None,
        new_apart=operands.key is not None,
        row_bytes=0 if operands.mods is None else operands.mods.row_bytes,
        device=current_device(),
        **measured,
    )
