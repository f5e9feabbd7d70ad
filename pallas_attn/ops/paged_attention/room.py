"""What of a device a program takes: how many rows and tokens there is room for, and how many programs run at once."""

import dataclasses

from pallas_attn._call.device import Device
from pallas_attn._tile import triton

# What tiles of keys and values may take of a program's shared memory, where there is much and where there is little;
# what is left for layouts and reductions, and what these take in fact where they are small.
TILES_KB, SMALL_TILES_KB = 128, 64
RESERVED_KB, LAYOUTS_KB = 12, 2
# A thread's registers for anything but rows and tiles, and a multiprocessor's for all.
OTHER_REGISTERS, REGISTERS = 56, 65536
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
            block_q * self.width * self.query_itemsize > ROWS_BYTES or not self._fits(block_q, 16, 5)
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
        tiles_kb = TILES_KB if self.device.shared_kib > 99 else SMALL_TILES_KB
        while block_kv > 16 and (
            4 * block_kv * self.width * self.itemsize > tiles_kb * 1024
            or not self._fits(block_q, block_kv, num_stages)
        ):
            block_kv //= 2
        return dict(block_kv=block_kv, num_warps=num_warps, num_stages=num_stages)

    def resident(
        self, block_q: int, block_kv: int, num_warps: int, num_stages: int, *, easily_dealt: bool = False
    ) -> int:
        """Programs that share a multiprocessor, by registers and by shared memory, of which each takes 1 KB more. As
        compilers have it for an H200, within a tenth."""
        threads = 32 * num_warps
        # Every warp holds the queries, as operands of 16 bits; sums and keys are spread over warps.
        rows, tile = block_q * self.width, block_kv * self.width
        registers = OTHER_REGISTERS - (DEALING_REGISTERS if easily_dealt else 0)
        if block_q <= LEAN_ROWS and self.itemsize == self.query_itemsize:
            registers += 1.25 * tile / threads
        else:
            registers += rows / 64 + (rows + tile / 2) / threads
        # Where a tile has fewer tokens than the program threads, page ids are copied too, which takes two stages;
        # not where products are turned.
        buffers = num_stages - 1 if block_kv >= threads or block_q == TURNED_ROWS else (num_stages - 1) // 2
        needed = self._kb(block_q, block_kv, max(1, buffers), conversions=1) + LAYOUTS_KB
        by_shared = (self.device.shared_kib + 1) / (needed + 1)
        return max(1, min(int(REGISTERS / (registers * threads)), int(by_shared)))

    def _fits(self, block_q: int, block_kv: int, num_stages: int) -> bool:
        """Measured on compiled kernels: two buffers for tiles of keys and values, three in a deep pipeline of
        asynchronous products, which may still read a tile when the next load is issued."""
        asynchronous = block_q == 64 and self.query_itemsize == 2 and self.device.asynchronous_products
        narrow = self.itemsize < self.query_itemsize
        buffers = 3 if asynchronous and num_stages > 3 and not narrow else 2
        return self._kb(block_q, block_kv, buffers, conversions=2) + RESERVED_KB <= self.device.shared_kib

    def _kb(self, block_q: int, block_kv: int, buffers: int, conversions: int) -> float:
        """Shared memory of a program: the queries, buffers for tiles of keys and values, and for a cache narrower than
        the queries converted tiles."""
        narrow = self.itemsize < self.query_itemsize
        token = 2 * buffers * self.itemsize + (conversions * self.query_itemsize if narrow else 0)
        return (block_q * self.query_itemsize + block_kv * token) * self.width / 1024
