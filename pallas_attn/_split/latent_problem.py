"""What kernels over MLA latents are compiled for, however they find their tokens."""

import dataclasses
from typing import ClassVar

import jax

from pallas_attn._call import budget
from pallas_attn._call.device import Device
from pallas_attn._call.sizes import ceil_div, tile_side
from pallas_attn._split.problem import SplitKVProblem
from pallas_attn._tile.latents import LATENT_DIM, QUERY_DIM, ROPE_DIM, TOKEN_BYTES

# With this many query rows or more, kernels are written for the data centre's asynchronous matrix instructions.
WGMMA_ROWS = 64
# Below WGMMA_ROWS, latents are processed in chunks of this many dims, each with its own accumulator. A logit over all
# 512 would be a chain of 32 products, each waiting 33 cycles for the one before; products of different chunks overlap.
# Worth 1% with 16 rows.
CHUNK_DIM = 128


def block_q(rows: int, fp8: bool, device: Device) -> int:
    """How many of the `rows` query rows that share latents a program serves.

    64 need the asynchronous products of data-centre Hopper and Blackwell: with warp-level ones their queries and
    accumulators do not fit in registers, nor do those of 32 beside the conversion of fp8.
    """
    if device.architecture.asynchronous_products:
        most = WGMMA_ROWS
        return most if fp8 and rows > 16 else min(most, tile_side(rows))
    return min(16 if fp8 else 32, tile_side(rows))


def needs(
    block_q: int,
    block_kv: int,
    num_warps: int,
    num_stages: int,
    *,
    fp8: bool,
    transposed: bool = False,
    looks_up: bool = False,
    row_bytes: int = 0,
) -> budget.Tile:
    """What a program takes. `transposed` products read their weights from shared memory, too."""
    return budget.Tile(
        rows=block_q,
        tokens=block_kv,
        held=(QUERY_DIM,),
        walked=(QUERY_DIM,),
        itemsize=2,
        stored=1 if fp8 else 2,
        # Scales, and the rotary part, which is stored as wide as in products.
        token_bytes=TOKEN_BYTES - QUERY_DIM if fp8 else 0,
        num_warps=num_warps,
        num_stages=num_stages,
        looks_up=looks_up,
        transposed=transposed,
        pair_bytes=row_bytes,
        exchanges_pairs=row_bytes > 0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentProblem(SplitKVProblem):
    """An op's own problem adds how its tokens are found."""

    alone: ClassVar[bool] = True

    def num_tiles(self, seq_len: jax.Array) -> jax.Array:
        return ceil_div(seq_len, self.config.block_kv)

    @property
    def asynchronous(self) -> bool:
        """Whether the kernel is written for asynchronous matrix instructions."""
        return self.config.block_q >= WGMMA_ROWS

    @property
    def ordered(self) -> bool:
        # The accumulators of more rows leave no registers for it.
        return not self.asynchronous

    @property
    def latent_chunks(self) -> list[tuple[int, int]]:
        """(first, size) of the chunks of dims that latents and output are held in."""
        whole = self.asynchronous or self.pool.head_dim == TOKEN_BYTES
        size = LATENT_DIM if whole else CHUNK_DIM
        return [(first, size) for first in range(0, LATENT_DIM, size)]

    @property
    def query_chunks(self) -> list[tuple[int, int]]:
        return [*self.latent_chunks, (LATENT_DIM, ROPE_DIM)]
