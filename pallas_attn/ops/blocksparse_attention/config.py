"""How a call of the block-sparse kernels is cut up."""

import dataclasses
import math
from typing import Any, Literal

from pallas_attn._call import budget, configs, sizes
from pallas_attn._call.architecture import KIB, LEAST_SIDE
from pallas_attn._call.checks import ArgumentChecker, check_int, dtype_name, fail
from pallas_attn._call.device import Device, current_device
from pallas_attn._split.splits import MOST_SPLITS
from pallas_attn.ops.blocksparse_attention.operands import Operands

SHORT_ROW = 1024  # tokens that a block of queries sees
PAIRED_ROW = 3072
# Two programs of 128 queries share a multiprocessor of sm_90, if a thread has at most 128 of its registers.
PAIRED = {"block_q": 128, "block_kv": 64, "num_warps": 8, "num_stages": 2, "max_registers": 128}
# Tiles of queries by tokens and stages, best first, if they fit; each is cut to the layout's blocks.
PREFILL = [
    (128, 128, 3), (128, 128, 2), (128, 64, 2), (128, 32, 2), (64, 32, 2), (32, 32, 2), (16, 32, 2), (16, 16, 2),
]  # fmt: skip
# The largest side of those, and elements of sums, by bytes of an element: without tensor cores the products of float32
# take registers by themselves.
MOST = {2: (128, 128 * 128), 4: (32, 32 * 64)}
# Of the kernels for gradients, as flash attention has them, by bytes of an element and the widest head: queries,
# tokens, warps and stages. They are cut to the layout's blocks, and then until they fit.
GRADIENTS = {
    (2, 128): {"dq": (64, 64, 4, 2), "dkv": (32, 64, 4, 3)},
    (2, 256): {"dq": (64, 32, 4, 2), "dkv": (32, 64, 8, 2)},
    (4, 128): {"dq": (32, 32, 4, 1), "dkv": (16, 32, 4, 1)},
    (4, 256): {"dq": (32, 16, 8, 1), "dkv": (16, 32, 8, 1)},
}
PER_QUERY_BYTES = 8  # of a gradient's log-sum-exps and deltas
# Of which one is a query. A tile of decoded sequences has so many bytes of keys, and tokens, at most.
DECODE_ROWS, DECODE_BYTES, DECODE_TOKENS = LEAST_SIDE, 16 * KIB, 64
POWERS_OF_TWO = {**configs.POWERS_OF_TWO, "decode_block_kv": LEAST_SIDE, "decode_warps": 1, "decode_heads": 1}
POWERS_OF_TWO |= {f"{one}_{size}": LEAST_SIDE for one in ("dq", "dkv") for size in ("block_q", "block_kv")}
POWERS_OF_TWO |= {"dq_warps": 1, "dkv_warps": 1}
# What the tiles of each kernel are called in a config: queries where a program has more than one, keys, warps, stages.
TILES = {
    "prefill": ("block_q", "block_kv", "num_warps", "num_stages", "max_registers"),
    "decode": ("decode_block_kv", "decode_warps", "decode_stages"),
    "dq": ("dq_block_q", "dq_block_kv", "dq_warps", "dq_stages"),
    "dkv": ("dkv_block_q", "dkv_block_kv", "dkv_warps", "dkv_stages"),
}


@dataclasses.dataclass(frozen=True)
class BlockSparseConfig:
    """Tile sizes; a tile never reaches beyond a block of the layout.

    block_q: queries of a head that a program serves, a power of two >= 16, at most the layout's q_block_size.
    block_kv: tokens it takes in per step, a power of two >= 16, at most the layout's block_size.
    heads_together: heads whose programs start together, a divisor of the query heads: few keep the keys that are being
        read in the L2, many even out what the last programs have to do. 0: all of them, or those of one KV head where
        the L2 does not hold the keys of all.
    num_warps, num_stages: Triton's warps per program and depth of software pipelining.
    max_registers: of a thread of prefill, for more programs to a multiprocessor; 0: as many as it takes.
    decode_block_kv, decode_warps, decode_stages: the same for sequences with one query.
    decode_heads: heads of a group that a program serves then, a power of two up to 16; what divides the group is taken.
    num_splits: splits that such a sequence's blocks are cut into.
    dq_block_q, dq_block_kv, dq_warps, dq_stages: of the kernel for gradients of queries, whose tiles are cut to the
        layout's blocks where they are larger.
    dkv_block_q, dkv_block_kv, dkv_warps, dkv_stages: of that for gradients of keys and values: a program serves
        `dkv_block_kv` tokens and takes in `dkv_block_q` queries per step.
    """

    block_q: int = 128
    block_kv: int = 128
    num_warps: int = 8
    num_stages: int = 2
    max_registers: int = 0
    heads_together: int = 0
    decode_block_kv: int = 64
    decode_warps: int = 4
    decode_stages: int = 3
    decode_heads: int = 8
    num_splits: int = 1
    dq_block_q: int = 128
    dq_block_kv: int = 64
    dq_warps: int = 8
    dq_stages: int = 3
    dkv_block_q: int = 32
    dkv_block_kv: int = 64
    dkv_warps: int = 4
    dkv_stages: int = 3

    def __post_init__(self):
        configs.check_sizes(self, POWERS_OF_TWO, may_be_zero=("max_registers", "heads_together"))
        check_int("BlockSparseConfig", "decode_heads", self.decode_heads, most=16)


@dataclasses.dataclass(frozen=True)
class BlockSparseCudaConfig:
    """How `implementation="cuda"` works out gradients.

    backward: "cuda", for blocks of at least 128 queries and 128 keys; or "tiled", the kernels of "pallas" (of "triton",
        where Pallas has no such lowering). None takes "tiled", which measured faster.
    """

    backward: Literal["cuda", "tiled"] | None = None

    def __post_init__(self):
        ArgumentChecker("BlockSparseCudaConfig").one_of("backward", self.backward, ("cuda", "tiled", None))


def heuristic(
    *,
    head_dim: int,
    itemsize: int,
    block_size: int,
    q_block_size: int,
    row_blocks: float,
    streams: int,
    plain: bool,
    limits_registers: bool,
    device: Device,
    **measured: int,
) -> BlockSparseConfig:
    """`row_blocks` blocks are listed by a row of the layout on average; `streams` (sequence, KV head) pairs decode.
    `plain`: keys in rows, and logits as they are, which take fewer registers. `limits_registers`: whether the
    implementation can (`triton.limits_registers`).

    Tiles of up to 128 queries by 128 tokens, as far as shared memory and registers hold them. Where rows are short,
    such that two programs share a multiprocessor, and one computes while the other begins or ends: `PAIRED` tiles, or
    else those of 64 by 64. One query's blocks are cut into enough splits for eight programs a multiprocessor.
    """
    width = sizes.tile_side(head_dim)
    most_side, most_sums = MOST[itemsize]
    if row_blocks * block_size < SHORT_ROW:
        most_side = min(most_side, 64)

    def tile(rows: int, tokens: int, num_stages: int) -> budget.Tile:
        return budget.Tile(
            rows=rows,
            tokens=tokens,
            held=(width,),
            walked=(width, width),
            itemsize=itemsize,
            num_warps=8 if rows * max(width, tokens) > 64 * 128 else 4,
            num_stages=num_stages,
            spare=True,
        )

    most_q, most_kv = min(most_side, q_block_size), min(most_side, block_size)
    cut = [tile(min(q, most_q), min(kv, most_kv), stages) for q, kv, stages in PREFILL]
    fits = next((one for one in cut if one.fits(device)), cut[-1])
    prefill = tile(min(fits.rows, max(LEAST_SIDE, most_sums // width)), fits.tokens, fits.num_stages)
    decode = budget.Tile(
        rows=DECODE_ROWS,
        tokens=min(DECODE_TOKENS, block_size, max(LEAST_SIDE, DECODE_BYTES // (width * itemsize))),
        held=(width,),
        walked=(width, width),
        itemsize=itemsize,
        num_warps=4,
        num_stages=3,
    )
    decode = budget.fitted(decode, device)
    wanted = 8 * device.num_cores // streams
    chosen = {
        "block_q": prefill.rows,
        "block_kv": prefill.tokens,
        "num_warps": prefill.num_warps,
        "num_stages": prefill.num_stages,
        "decode_block_kv": decode.tokens,
        "decode_warps": decode.num_warps,
        "decode_stages": decode.num_stages,
        "num_splits": max(1, min(wanted, int(row_blocks) * block_size // DECODE_TOKENS, MOST_SPLITS)),
    }
    chosen |= _backward(width, itemsize, block_size, q_block_size, device)
    # The largest heads whose sums fit 128 registers. On other GPUs it was not measured.
    pairs = plain and limits_registers and device.architecture.warpgroup_products
    pairs = pairs and itemsize == 2 and width == 128
    pairs = pairs and q_block_size >= PAIRED["block_q"] and block_size >= PAIRED["block_kv"]
    if pairs and row_blocks * block_size < PAIRED_ROW:
        chosen |= PAIRED
    if not measured.keys().isdisjoint(TILES["prefill"]):
        chosen["max_registers"] = 0  # that of another tile
    if measured.get("max_registers") and not limits_registers:
        measured = {name: size for name, size in measured.items() if name not in TILES["prefill"]}
    return BlockSparseConfig(**{**chosen, **measured})


def _backward(
    width: int, itemsize: int, block_size: int, q_block_size: int, device: Device
) -> dict[str, int]:
    tiles = GRADIENTS[itemsize, 128 if width <= 128 else 256]
    chosen = {}
    for name, (block_q, block_kv, warps, stages) in tiles.items():
        block_q, block_kv = min(block_q, q_block_size), min(block_kv, block_size)
        held, walked = (block_q, block_kv)[:: 1 if name == "dq" else -1]
        if width <= 128:
            warps = min(warps, max(4, held // 16))  # each has 16 rows of what a program holds, at the least
        tile = budget.Tile(
            rows=held,
            tokens=walked,
            held=(width, width),
            walked=(width, width),
            itemsize=itemsize,
            num_warps=warps,
            num_stages=stages,
            spare=True,
            token_bytes=PER_QUERY_BYTES if name == "dkv" else 0,
            pair_tiles=2 if name == "dkv" else 1,
            rereads=True,
        )
        tile = budget.fitted(tile, device)
        block_q, block_kv = (tile.rows, tile.tokens)[:: 1 if name == "dq" else -1]
        chosen |= {f"{name}_block_q": block_q, f"{name}_block_kv": block_kv}
        chosen |= {f"{name}_warps": warps, f"{name}_stages": tile.num_stages}
    return chosen


def key(operands: Operands) -> dict[str, Any]:
    """What measured files go by, beside the kernel."""
    block_size, q_block_size = operands.layout.sizes
    num_tokens, num_heads, head_dim = operands.query.shape
    num_kv_heads = operands.pool.num_kv_heads
    return dict(
        head_dim=head_dim,
        block_size=block_size,
        q_block_size=q_block_size,
        dtype=dtype_name(operands.query.dtype),
        cache_layout=operands.cache_layout,
        rows=num_tokens * (num_heads // num_kv_heads) // operands.num_seqs,
        streams=operands.num_seqs * num_kv_heads,
        max_len=int(operands.row_blocks * block_size),
    )


def default(operands: Operands, **measured: int) -> BlockSparseConfig:
    """As the heuristic has it for a call at hand."""
    block_size, q_block_size = operands.layout.sizes
    _, num_heads, head_dim = operands.query.shape
    together = math.gcd(num_heads // operands.pool.num_kv_heads, BlockSparseConfig.decode_heads)
    return heuristic(
        head_dim=head_dim,
        itemsize=operands.query.dtype.itemsize,
        block_size=block_size,
        q_block_size=q_block_size,
        row_blocks=operands.row_blocks,
        streams=operands.num_seqs * num_heads // together,
        plain=operands.cache_layout is None and operands.rules.softcap is None,
        limits_registers=operands.limits_registers,
        device=current_device(),
        **measured,
    )


def check(operands: Operands, config: BlockSparseConfig) -> None:
    """Refuses a caller's config."""
    block_size, q_block_size = operands.layout.sizes
    most = {"block_q": q_block_size, "block_kv": block_size, "decode_block_kv": block_size}
    for name, size in most.items():
        if getattr(config, name) > size:
            refuse(f"{name} at most the layout's ({size})", getattr(config, name))
    if config.max_registers and not operands.limits_registers:
        reason = "which implementation 'pallas' cannot limit with this jax"
        refuse(f"max_registers 0, {reason}", config.max_registers)
    if config.heads_together and operands.query.shape[1] % config.heads_together:
        expected = f"heads_together a divisor of num_heads ({operands.query.shape[1]})"
        refuse(expected, config.heads_together)


def refuse(expected: str, got: int) -> None:
    fail("blocksparse_attention", "config", expected, str(got))
