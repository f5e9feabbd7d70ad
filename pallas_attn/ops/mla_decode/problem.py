"""What the MLA decode kernel is compiled for."""

import dataclasses

from pallas_attn._call.device import current_device
from pallas_attn._split import splits
from pallas_attn._split.latent_problem import LatentProblem
from pallas_attn._tile.latents import TOKEN_BYTES
from pallas_attn.ops.mla_decode.config import is_transposed
from pallas_attn.ops.mla_decode.schedule import BLOCK_TOKENS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(LatentProblem):
    causal: bool
    num_parts: int | None
    """Parts of the schedule; None without one."""

    @property
    def num_places(self) -> int:
        return super().num_places if self.num_parts is None else splits.scheduled_places(self.num_parts)

    @property
    def page_per_tile(self) -> bool:
        """Whether a tile never crosses a page, so that one table entry serves it."""
        return self.config.block_kv <= BLOCK_TOKENS and self.pool.page_size % self.config.block_kv == 0

    @property
    def transposed(self) -> bool:
        """Whether both products are transposed (transposed.py)."""
        fp8 = self.pool.head_dim == TOKEN_BYTES
        return is_transposed(self.config, page_size=self.pool.page_size, device=current_device(), fp8=fp8)

    @property
    def asynchronous(self) -> bool:
        return self.transposed or super().asynchronous
