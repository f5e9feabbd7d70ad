"""What of a device a program takes: how many rows and tokens there is room for, and how many programs run at once."""

import dataclasses

from pallas_attn._call import budget
from pallas_attn._call.device import Device
from pallas_attn._tile import triton

# What tiles of keys and values may take of a program's shared memory, where there is much and where there is little;
# what is left for layouts and reductions, and what these take in fact where they are small.
TILES_KB, SMALL_TILES_KB = 128, 64
RESERVED_BYTES, LAYOUTS_BYTES = 12 * 1024, 2 * 1024
# With so few rows sums come late, and take as many registers as a program's weights.
LEAN_ROWS = 16
# Those that dealing takes; not where a warp holds a length in each lane.
DEALING_REGISTERS, EASILY_DEALT = 26, range(17, 33)
# Query rows times their width, which their sums take in registers too: more spills.
ROWS_BYTES = 64 * 256 * 2
# Products are turned for so many rows at most and so wide heads.
TURNED_ROWS, TURNED_WIDTHS = 8, (64, 128)


@dataclasses.dataclass(frozen=True)
class Room:
    """What of a device's registers and shared memory a program takes whose heads have `width` elements."""

    width: int
    itemsize: int
    query_itemsize: int
    device: Device
    layout: str = "NHD"

    def block_q(self, rows: int) -> int:
        """As many query rows as there is room for: in registers for their sums, and in shared memory beside the
        smallest tiles of keys and values."""
        if rows <= TURNED_ROWS and self._turns:
            return TURNED_ROWS
        block_q = min(64, triton.tile_side(rows))
        while block_q > 16 and (
            block_q * self.width * self.query_itemsize > ROWS_BYTES or not self._fits(block_q, 16, 4, 5)
        ):
            block_q //= 2
        return block_q

    @property
    def _turns(self) -> bool:
        """Where few rows are known to gain by products that are turned. Wider heads and PACKED caches spill."""
        bytes_meet_16_bits = (self.itemsize, self.query_itemsize) == (1, 2)
        fits = self.width in TURNED_WIDTHS and self.layout != "PACKED"
        return bytes_meet_16_bits and fits and self.device.compute_capability == 90

    def tile(self, block_q: int, block_kv: int, num_warps: int, num_stages: int) -> dict[str, int]:
        """This one, or as many tokens of it as there is room for."""
        tiles_kb = TILES_KB if self.device.shared_bytes > 99 * 1024 else SMALL_TILES_KB
        while block_kv > 16 and (
            4 * block_kv * self.width * self.itemsize > tiles_kb * 1024
            or not self._fits(block_q, block_kv, num_warps, num_stages)
        ):
            block_kv //= 2
        while num_stages > 1 and not self.needs(block_q, block_kv, num_warps, num_stages).fits(self.device):
            num_stages -= 1
        return dict(block_kv=block_kv, num_warps=num_warps, num_stages=num_stages)

    def resident(
        self, block_q: int, block_kv: int, num_warps: int, num_stages: int, *, easily_dealt: bool = False
    ) -> int:
        """Programs that share a multiprocessor, by registers and by shared memory, of which each takes 1 KB more. As
        compilers have it for an H200, within a tenth."""
        tile = self.needs(block_q, block_kv, num_warps, num_stages)
        other = budget.OTHER_REGISTERS - (DEALING_REGISTERS if easily_dealt else 0)
        if block_q <= LEAN_ROWS and self.itemsize == self.query_itemsize:
            registers = other + 1.25 * block_kv * self.width / tile.threads
        else:
            registers = tile.registers(other)
        # Of a narrow cache's tiles one is converted at a time.
        shared = tile.operand_bytes(self.device) - tile.converted_bytes / 2 + LAYOUTS_BYTES
        return budget.resident(self.device, shared, registers * tile.threads)

    def needs(self, block_q: int, block_kv: int, num_warps: int, num_stages: int) -> budget.Tile:
        """What a program takes of shared memory."""
        tile = budget.Tile(
            rows=block_q,
            tokens=block_kv,
            held=(self.width,),
            walked=(self.width, self.width),
            itemsize=self.query_itemsize,
            stored=self.itemsize,
            num_warps=num_warps,
            num_stages=num_stages,
        )
        # Page ids are copied too where a tile has fewer tokens than the program threads; and wait, as do ids that stay
        # in registers, where products are asynchronous. Those of turned products come from the step before.
        waits = block_kv < tile.threads or tile.is_asynchronous(self.device)
        return dataclasses.replace(tile, looks_up=waits and block_q != TURNED_ROWS)

    def _fits(self, block_q: int, block_kv: int, num_warps: int, num_stages: int) -> bool:
        tile = self.needs(block_q, block_kv, num_warps, num_stages)
        # With two buffers, which more stages would give it.
        more = max(0, 2 - tile.buffers(self.device)) * tile.loaded_bytes
        return tile.fits(self.device, RESERVED_BYTES + more)
