"""What a tile takes of a multiprocessor: shared memory and registers. Every heuristic asks here, and nowhere else,
whether a tile fits and how many programs share a multiprocessor.

    tile = budget.Tile(rows=128, tokens=64, held=(128,), walked=(128, 128), itemsize=2, num_warps=8, num_stages=3)
    tile.fits(device)             # whether a program has the memory for it
    tile.resident(device)         # programs that share a multiprocessor
    budget.fitted(tile, device)   # the same with fewer stages or smaller sides, so that it fits

Bytes follow what Triton's compiler allocates, read off compiled kernels of every op for sm_80, sm_90 and sm_120: the
estimate is never below the truth and, where memory is nearly full, hardly above. `python tests/measured_budget.py
--all` compares the two over any number of calls. XLA's Triton allocates the same as pip's wherever both were compared.

    held        rows of queries: one copy in shared memory, from which asynchronous products read them
    walked      tiles of keys and values: a buffer for each stage that a load is ahead, and one more where asynchronous
                products may still read a tile when the next load is issued. A load that waits for a load of the same
                loop, as of page ids, is ahead by every other stage
    converted   tiles of a cache that is narrower than products, once more in the type of these: of a single stage the
                only ones
    exchanged   what threads hand each other: weights on their way into warps' own products, logits that meet a mask
    OTHER_BYTES page ids, sums of rows, and what places are rounded up by
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from pallas_attn._call import architecture
from pallas_attn._call.device import Device

OTHER_BYTES = 3 * architecture.KIB
# Of a thread, for anything but sums and a tile: as Triton 3.6 compiles split-KV kernels for sm_90.
OTHER_REGISTERS = 72
FLOAT_BYTES = np.dtype(np.float32).itemsize  # of a logit, and of a register


class Candidate(NamedTuple):
    """A tile that was measured somewhere, of as many rows as a call has; an op lists its own."""

    block_kv: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """What a program works on at once: the rows that it holds, and the tokens that each step of its loop loads. (A
    program that holds keys and loops over queries has its keys as rows.)"""

    rows: int
    tokens: int
    held: tuple[int, ...]
    """Width of each operand that stays for the whole loop: a query, the gradient of an output."""
    walked: tuple[int, ...]
    """Width of each operand that a step loads: a key, a value."""
    itemsize: int
    """Bytes of an element in products."""
    stored: int = 0
    """Bytes of an element in memory; 0: as in products."""
    num_warps: int
    num_stages: int
    looks_up: bool = False
    """Whether the loop itself looks up where its tokens lie."""
    token_bytes: int = 0
    """Other bytes that a step loads for each token: a log-sum-exp."""
    pair_bytes: int = 0
    """Bytes loaded for each pair of a row and a token: a bias, a mask."""
    pair_tiles: int = 1
    """Tiles [rows, tokens] that products read: weights, and in some gradients those of logits."""
    rereads: bool = False
    """Whether a second product reads the same operand in another layout."""
    walks_rows: bool = False
    """Whether each step loads its rows, too."""
    spare: bool = False
    """Whether to count a buffer for every stage even where products need one less: tiles were measured so."""
    sums: int = 0
    """Width of the sums that leave Blackwell's tensor memory while the buffers are still in use."""
    transposed: bool = False
    """Whether products are transposed: tokens and value columns come first, and weights go through shared memory."""
    exchanges_pairs: bool = False
    """Whether logits change their layout to match what was loaded for each pair."""

    @property
    def threads(self) -> int:
        return architecture.WARP * self.num_warps

    @property
    def is_narrow(self) -> bool:
        return 0 < self.stored < self.itemsize

    def is_asynchronous(self, device: Device) -> bool:
        """Whether its products run beside the program, out of shared memory."""
        large = self.transposed or self.rows >= architecture.ASYNCHRONOUS_ROWS
        by_warpgroups = self.num_warps % architecture.WARPGROUP == 0 and self.itemsize == 2
        return large and by_warpgroups and device.architecture.asynchronous_products

    def buffers(self, device: Device) -> int:
        """The bytes of each tile that the loop loads."""
        if self.is_narrow and self.num_stages == 1:
            return 0  # It is converted in registers on the way.
        ahead = (self.num_stages - 1) // 2 if self.looks_up else self.num_stages - 1
        # Asynchronous products may still read a tile when the next load is issued.
        more = self.is_asynchronous(device) and not self.is_narrow
        return max(1, ahead + more)

    @property
    def _rows_bytes(self) -> int:
        return self.rows * sum(self.held) * self.itemsize

    @property
    def held_bytes(self) -> int:
        return 0 if self.walks_rows else self._rows_bytes

    @property
    def loaded_bytes(self) -> int:
        """Bytes of one buffer of everything that a step loads, pairs apart."""
        stored = self.stored or self.itemsize
        of_tokens = self.tokens * (sum(self.walked) * stored + self.token_bytes)
        return of_tokens + (self._rows_bytes if self.walks_rows else 0)

    @property
    def converted_bytes(self) -> int:
        return self.tokens * sum(self.walked) * self.itemsize if self.is_narrow else 0

    def exchanged_bytes(self, device: Device) -> int:
        """Bytes of what a step produces: tiles of pairs, and operands in a second layout."""
        # Asynchronous products take weights straight from registers.
        stay = self.is_asynchronous(device) and not self.transposed
        weights = 0 if stay else self.pair_tiles * self.itemsize
        # Pairs that are prefetched are converted to the logits' layout; otherwise logits are converted to theirs.
        copied = self.pair_bytes * max(1, self.num_stages - 1)
        spared = self.pair_bytes * self.num_stages if self.spare else 0
        exchanged = FLOAT_BYTES if self.exchanges_pairs else 0
        reread = self.rereads and self.itemsize == 2 and not stay
        again = self.tokens * max(self.walked) * self.itemsize if reread else 0
        return self.rows * self.tokens * max(copied + weights, exchanged, spared) + again

    def operand_bytes(self, device: Device) -> int:
        """Bytes that live throughout a step."""
        loaded = self.buffers(device) * self.loaded_bytes
        sums = self.rows * self.sums * self.itemsize if device.architecture.tensor_memory else 0
        return self.held_bytes + loaded + self.converted_bytes + sums

    def shared_bytes(self, device: Device) -> int:
        """An upper bound, OTHER_BYTES apart."""
        return self.operand_bytes(device) + self.exchanged_bytes(device)

    def fits(self, device: Device, beside: int = 0) -> bool:
        """Whether so many bytes are left beside its operands."""
        unused = self.num_stages - self.buffers(device) if self.spare else 0
        more = max(self.exchanged_bytes(device), unused * self.loaded_bytes) + OTHER_BYTES
        return self.operand_bytes(device) + max(more, beside) <= device.architecture.shared_bytes

    @property
    def registers(self) -> float:
        """Registers of a thread, about: accumulators in float32 and a tile in the products' type are spread over all
        threads. A float32 product is computed from several parts of its operands, which take registers beside these."""
        sums = self.rows * self.held[0]
        parts = 2 if self.itemsize == FLOAT_BYTES else 1
        tile = parts * self.tokens * sum(self.walked) * self.itemsize / FLOAT_BYTES
        return OTHER_REGISTERS + (sums + tile) / self.threads

    @property
    def spills(self) -> bool:
        return self.registers > architecture.THREAD_REGISTERS

    def resident(self, device: Device) -> int:
        """Programs that share a multiprocessor."""
        shared = self.shared_bytes(device) + OTHER_BYTES + architecture.PROGRAM_BYTES
        by_shared = (device.architecture.shared_bytes + architecture.PROGRAM_BYTES) // shared
        return int(max(1, min(architecture.REGISTERS // (self.registers * self.threads), by_shared)))


def fitted(tile: Tile, device: Device, *, least_stages: int = 1) -> Tile:
    """The tile with fewer stages, then with its larger side halved, and so on until it fits."""
    while not tile.fits(device):
        if tile.num_stages > least_stages:
            tile = dataclasses.replace(tile, num_stages=tile.num_stages - 1)
        elif max(tile.rows, tile.tokens) <= architecture.LEAST_SIDE:
            break
        elif tile.rows >= tile.tokens:
            tile = dataclasses.replace(tile, rows=tile.rows // 2)
        else:
            tile = dataclasses.replace(tile, tokens=tile.tokens // 2)
    return tile
