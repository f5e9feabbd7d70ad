"""What the MLA decode kernel is compiled for."""

import dataclasses
from typing import ClassVar

import jax

from pallas_attn._tile import pieces
from pallas_attn._tile.latents import LATENT_DIM, ROPE_DIM, TOKEN_BYTES
from pallas_attn._tile.problem import SplitKVProblem
from pallas_attn.ops.mla_decode.schedule import BLOCK_TOKENS

# From this many query rows on, the kernel is written for the data centre's asynchronous matrix instructions.
WGMMA_ROWS = 64
# Below WGMMA_ROWS, latents are worked on in chunks of this many dims, each with an accumulator of its own. A logit over
# all 512 would be a chain of 32 products, each waiting 33 cycles for the one before; those of chunks overlap. It is
# worth 1% with 16 rows.
CHUNK_DIM = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(SplitKVProblem):
    causal: bool
    num_parts: int | None
    """Parts of the schedule; None without one."""

    rounding: ClassVar[float] = pieces.DOWN

    @property
    def num_places(self) -> int:
        return super().num_places if self.num_parts is None else pieces.scheduled_room(self.num_parts)

    def num_tiles(self, seq_len: jax.Array) -> jax.Array:
        return pieces.ceil_div(seq_len, self.config.block_kv)

    @property
    def asynchronous(self) -> bool:
        """Whether the kernel is written for asynchronous matrix instructions."""
        return self.config.block_q >= WGMMA_ROWS

    @property
    def latent_chunks(self) -> list[tuple[int, int]]:
        """(first, size) of the chunks of dims that latents and output are held in."""
        whole = self.asynchronous or self.pool.head_dim == TOKEN_BYTES
        size = LATENT_DIM if whole else CHUNK_DIM
        return [(first, size) for first in range(0, LATENT_DIM, size)]

    @property
    def query_chunks(self) -> list[tuple[int, int]]:
        return [*self.latent_chunks, (LATENT_DIM, ROPE_DIM)]

    @property
    def page_per_tile(self) -> bool:
        """Whether a tile never crosses a page, so that one table entry serves it."""
        return self.config.block_kv <= BLOCK_TOKENS and self.pool.page_size % self.config.block_kv == 0
