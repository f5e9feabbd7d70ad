"""Tile sizes of the flash attention kernels, and the heuristic for devices without a measured file."""

import dataclasses
from typing import Any, Literal, NamedTuple

from pallas_attn._call import budget, configs
from pallas_attn._call.checks import ArgumentChecker, dtype_name, fail
from pallas_attn._call.device import Device, current_device
from pallas_attn.ops.flash_attention.operands import Operands
from pallas_attn.ops.flash_attention.problem import Problem

PER_QUERY_BYTES = 8  # of a gradient's log-sum-exps and deltas


@dataclasses.dataclass(frozen=True)
class FlashAttentionTiles:
    """How one kernel is cut up.

    block_q, block_kv: query tokens and keys of a tile, powers of two >= 16.
    num_warps, num_stages: Triton's warps per program and depth of software pipelining.
    """

    block_q: int
    block_kv: int
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self):
        configs.check_sizes(self, configs.POWERS_OF_TWO)


@dataclasses.dataclass(frozen=True)
class FlashAttentionConfig:
    """How the kernels of one call are cut up.

    forward: out and lse; a program holds `block_q` queries and walks over keys.
    query: gradients of queries, likewise.
    key_value: gradients of keys and values; a program holds `block_kv` keys and walks over queries. The gradient of a
        bias is worked out in the same tiles.
    """

    forward: FlashAttentionTiles
    query: FlashAttentionTiles
    key_value: FlashAttentionTiles

    def __post_init__(self):
        for field in dataclasses.fields(self):
            tiles = getattr(self, field.name)
            if not isinstance(tiles, FlashAttentionTiles):
                kind, expected = type(tiles).__name__, "a FlashAttentionTiles"
                fail("FlashAttentionConfig", field.name, expected, kind, TypeError)


@dataclasses.dataclass(frozen=True)
class FlashAttentionCudaConfig:
    """How `implementation="cuda"` works out gradients of queries, keys and values.

    backward: "cuda", for all that the forward kernel serves but block masks in blocks of fewer than 128 keys, and ALiBi
        beside a soft cap or in heads wider than 128; or "tiled", the two kernels of "pallas" (of "triton", where Pallas
        has no such lowering). None takes what measured faster: "cuda" for heads of 256, and without a block mask of 128
        and of 192 with values of 128, where keys x KV heads x batch is at least 2^16, and of 64, where it is at least
        2^19, in sequences of at least 2048 tokens without documents or window; else "tiled".
    """

    backward: Literal["cuda", "tiled"] | None = None

    def __post_init__(self):
        ArgumentChecker("FlashAttentionCudaConfig").one_of("backward", self.backward, ("cuda", "tiled", None))


KERNELS = tuple(field.name for field in dataclasses.fields(FlashAttentionConfig))


class Candidates(NamedTuple):
    """Of elements of so many bytes and heads of at most so many dims; each kernel's is cut down until it fits."""

    itemsize: int
    widest: int
    forward: FlashAttentionTiles
    query: FlashAttentionTiles
    key_value: FlashAttentionTiles


_Tiles = FlashAttentionTiles
# For Hopper, from measurements (README.md). Two warpgroups share a tile of 128 rows, and three buffers keep copies
# ahead of products. Gradients keep more in registers: where two programs of one warpgroup, with tiles of 64 by 64, have
# a multiprocessor's together, those are faster. Wide heads take the registers that sums are in, and float32, whose
# products are not the tensor cores', takes all there are.
CANDIDATES = (
    Candidates(2, 64, _Tiles(128, 64, 8, 3), _Tiles(64, 64, 4, 3), _Tiles(64, 64, 4, 3)),
    Candidates(2, 128, _Tiles(128, 64, 8, 3), _Tiles(128, 64, 8, 3), _Tiles(64, 64, 4, 2)),
    Candidates(2, 256, _Tiles(128, 64, 8, 2), _Tiles(64, 32, 4, 3), _Tiles(32, 64, 8, 2)),
    Candidates(4, 128, _Tiles(32, 32, 4, 1), _Tiles(32, 32, 4, 1), _Tiles(32, 32, 4, 1)),
    Candidates(4, 256, _Tiles(32, 16, 8, 1), _Tiles(32, 16, 8, 1), _Tiles(16, 32, 8, 1)),
)
# Forward, over documents, which have more edges, and where each pair of tokens has an element of a captured array.
SMALL = {128: _Tiles(64, 64, 4, 3)}


def key(operands: Operands) -> dict[str, Any] | None:
    """What measured files go by, beside the kernel. None is for mods: they are measured for none."""
    if operands.mods is not None:
        return None
    problem = Problem.of(operands)
    return dict(
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        dtype=dtype_name(operands.query.dtype),
        layout=problem.rules.layout,
        pair_bytes=operands.pair_bytes,
        documents=operands.q_documents is not None,
        rows=problem.q_len * problem.group,
        streams=problem.batch * problem.num_kv_heads,
        max_len=problem.kv_len,
    )


def default(operands: Operands, **measured: Any) -> FlashAttentionConfig:
    """As the heuristic has it for a call at hand."""
    sizes = Problem.of(operands), operands.query.dtype.itemsize, operands.pair_bytes, current_device()
    mods = operands.mods
    small = operands.q_documents is not None or (mods is not None and mods.reads_wide_pairs)
    chosen = heuristic(*sizes, small=small, **measured)
    return chosen if mods is None else FlashAttentionConfig(**_within(mods.block, chosen))


def _within(block: tuple[int, int], config: FlashAttentionConfig) -> dict[str, FlashAttentionTiles]:
    """With tiles that lie within blocks of a block_mask."""

    def one(tiles: FlashAttentionTiles) -> FlashAttentionTiles:
        sizes = dict(block_q=min(tiles.block_q, block[0]), block_kv=min(tiles.block_kv, block[1]))
        return dataclasses.replace(tiles, **sizes)

    return {name: one(getattr(config, name)) for name in KERNELS}


def check(operands: Operands, config: FlashAttentionConfig) -> None:
    """Refuses tiles of the caller's that do not lie within blocks of a block_mask."""
    if operands.mods is None or operands.mods.mask is None:
        return
    block = operands.mods.block
    for name in KERNELS:
        tiles = getattr(config, name)
        if tiles.block_q > block[0] or tiles.block_kv > block[1]:
            expected = f"tiles within a block of the mask, {block[0]} x {block[1]}"
            fail("flash_attention", "config", expected, f"{name} of {tiles.block_q} x {tiles.block_kv}")


def heuristic(
    problem: Problem,
    itemsize: int,
    pair_bytes: int,
    device: Device,
    *,
    small: bool = False,
    **measured: Any,
) -> FlashAttentionConfig:
    """`pair_bytes` are what bias and mask have for each query and key; `small`: where smaller tiles are faster forward;
    `measured` are fields of the config that are known better."""
    listed = next(one for one in CANDIDATES if one.itemsize == itemsize and problem.widest <= one.widest)
    chosen = {name: getattr(listed, name) for name in KERNELS}
    if small and itemsize == 2:
        chosen["forward"] = SMALL.get(problem.widest, chosen["forward"])
    for name in KERNELS:
        chosen[name] = fitted(chosen[name], name, problem, itemsize, pair_bytes, device)
    chosen |= {name: dataclasses.replace(chosen[name], **fields) for name, fields in measured.items()}
    return FlashAttentionConfig(**chosen)


def needs(
    tiles: FlashAttentionTiles, kernel: str, problem: Problem, itemsize: int, pair_bytes: int
) -> budget.Tile:
    """What a program of a kernel, or of that for the gradient of a bias ("bias"), takes. Of queries a gradient needs
    what they were and their outputs' gradients."""
    key, value = (sum(size for _, size in chunks) for chunks in (problem.query_chunks, problem.value_chunks))
    holds_keys = kernel == "key_value"
    rows, tokens = (tiles.block_q, tiles.block_kv)[:: -1 if holds_keys else 1]
    return budget.Tile(
        rows=rows,
        tokens=tokens,
        held=(key,) if kernel == "forward" else (key, value),
        walked=(key, value),
        itemsize=itemsize,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        spare=True,
        token_bytes=PER_QUERY_BYTES if holds_keys else 0,
        pair_bytes=pair_bytes,
        pair_tiles=2 if holds_keys else 1,
        exchanges_pairs=pair_bytes > 0,
        rereads=kernel in ("query", "key_value"),
        walks_rows=kernel == "bias",
    )


def fitted(
    tiles: FlashAttentionTiles, kernel: str, problem: Problem, itemsize: int, pair_bytes: int, device: Device
) -> FlashAttentionTiles:
    """With fewer stages or smaller tiles, until they fit."""
    least = min(2, tiles.num_stages)
    tile = budget.fitted(needs(tiles, kernel, problem, itemsize, pair_bytes), device, least_stages=least)
    block_q, block_kv = (tile.rows, tile.tokens)[:: -1 if kernel == "key_value" else 1]
    return FlashAttentionTiles(block_q, block_kv, tile.num_warps, tile.num_stages)
