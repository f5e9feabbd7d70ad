"""Tile sizes of the paged attention kernel, and the heuristic for devices without a measured file."""

import dataclasses
import functools
import math

from pallas_attn._call import configs
from pallas_attn._call.configs import SplitKVConfig
from pallas_attn._call.device import Device
from pallas_attn._tile import triton
from pallas_attn._tile.waves import Waves

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
# (block_kv, num_warps, num_stages), where there is room. On Hopper and with heads of 128, four programs with the small
# tile share a multiprocessor, and one with the large fills it, with as many bytes under way.
SMALL_TILE, LARGE_TILE = (32, 4, 5), (128, 4, 3)
# Small tiles leave room for a fifth program, where four are planned that run at once the GPU deals five and three: with
# one more buffer four fit. It takes longer to fill: not for pieces of fewer tokens.
APART_TILE, AT_ONCE, APART_TOKENS = (32, 4, 7), 4, 512
# More walks than run at once leave a last wave that is not full: fewer programs with larger tiles lose less by it, and
# need no finer pieces, up to so many waves. Unless small tiles fill theirs to this part, which is better still.
MIDDLE_TILE, MANY_WAVES, FILLED = (64, 4, 5), 3, 0.9
# One or two pieces of each walk may also fill one wave of them to this part, where small tiles fill theirs less.
ONE_WAVE, MIDDLE_PIECES = 5 / 6, (1, 2)
# Where walks are hardly more than multiprocessors a larger tile each is best, for it asks for nearly all of a share.
ONE_EACH = 1.16
# Shares for each of so few walks that more of them would run at once: equal lengths still have one piece. Long tables.
ROOMY, LONG = 1.4, 4096
# And where products are turned, with so many rows at most and so wide heads: four programs share a multiprocessor.
TURNED_TILE, TURNED_ROWS, TURNED_WIDTHS = (64, 2, 3), 8, (64, 128)
# Narrower tokens are walked over no faster.
LEAST_TOKEN_KB = 0.25
# Programs a multiprocessor, at once or one after the other, for lengths that differ: the longest pieces are waited for.
# Fewer of those that have one to themselves, where nothing else is done while the next one starts.
EVENING, EVENING_ALONE = 3, 1.5
# Where a batch of sequences as short as this fills the device they may be left whole, without a kernel for the merge.
# Where a table holds more, sequences that differ are the rule, and the longest alone would keep the call waiting.
WHOLE_TOKENS = 1024
# The longer of these only where multiprocessors have many walks each, which come one after the other and even out.
# Elsewhere a call whose lengths differ would wait for the longest up to twice as long, and gain 5% where they do not.
SHORT_TOKENS, MANY_EACH = 512, 4
# With hardly any multiprocessor to spare equal ones have one piece.
MOST_BUSY = 0.5
FINE_TOKENS = 64
# Query rows times their width, which their sums take in registers too: more spills.
ROWS_BYTES = 64 * 256 * 2
# Pieces of a batch-invariant call: 128 programs for one sequence of 8192 tokens with 8 KV heads. Beyond 32768 tokens
# pieces grow instead, or a wide table would ask for room without end.
INVARIANT_TOKENS, INVARIANT_SPLITS = 512, 64

POWERS_OF_TWO = {**configs.POWERS_OF_TWO, "block_q": 8}


@dataclasses.dataclass(frozen=True)
class PagedAttentionConfig(SplitKVConfig):
    """How one call of the kernel is cut up.

    block_q: query rows (tokens x heads) of one KV head that a program serves, a power of two >= 16, the tensor
        core's tile; or 8, for products that are turned.
    block_kv: tokens a program takes in per step, a power of two >= 16.
    num_splits: most pieces a sequence's tokens are cut into: 1 cuts none, 0 as many as the lengths ask for at run time.
    min_split_tokens: a split shorter than this costs more in merging than it gains in parallelism.
    target_programs: programs, over the whole device, that the run-time split aims at.
    split_tokens: above 0, pieces have this many tokens, or more in sequences that would else have more than
        `num_splits`, instead of a share of the batch's work: what is cut where depends on the sequence alone.
    num_warps, num_stages: Triton's warps per program and depth of software pipelining.
    """

    def __post_init__(self):
        configs.check_sizes(self, POWERS_OF_TWO, may_be_zero=("num_splits", "split_tokens"))


@functools.cache  # of one stream there are thousands of pieces to weigh
def heuristic(
    *,
    num_seqs: int,
    num_kv_heads: int,
    rows: int,
    head_dim: int,
    itemsize: int,
    query_itemsize: int,
    max_len: int,
    device: Device,
    layout: str = "NHD",
    **measured: int,
) -> PagedAttentionConfig:
    """`rows` query rows (tokens x heads of a group) share a KV head; `itemsize` bytes hold an element of the cache,
    `query_itemsize` one of the query; `max_len` tokens fit in a row of the block table. `measured` are fields of the
    config that are known better.

    Sequences are cut into the number of pieces with which waves of programs cost least, were all as long as they may
    be (`_tile/waves.py`). Lengths that differ are dealt at run time, in as many shares of the batch's work.
    """
    room = _Room(triton.tile_side(head_dim), itemsize, query_itemsize, device, layout)
    block_q = measured.get("block_q", room.block_q(rows))
    programs = num_seqs * num_kv_heads * math.ceil(rows / block_q)
    # Where pieces of twice as many tokens would leave multiprocessors without any, fine ones cost less than those idle.
    fine = max_len < LONG or programs * max_len <= 2 * FINE_TOKENS * device.num_cores
    least_tokens = measured.get("min_split_tokens", FINE_TOKENS if fine else 256)
    each = programs / device.num_cores
    short = max_len <= WHOLE_TOKENS
    may_be_whole = short and (max_len <= SHORT_TOKENS or each > MANY_EACH)
    # Equal ones in one piece, others as shares come out.
    in_one = short and not may_be_whole and each > MOST_BUSY

    def plan(tile: tuple[int, int, int], dealt: bool, pieces: int = 0) -> tuple[float, dict[str, int]]:
        """(cost, fields); of so many pieces of each walk, or of those that cost least."""
        chosen = room.tile(block_q, *tile) | measured
        waves = Waves(
            streams=programs,
            tokens=max_len,
            token_kb=max(LEAST_TOKEN_KB, 2 * head_dim * itemsize / 1024),
            piece_kb=8 * min(rows, block_q) * head_dim / 1024,
            resident=room.resident(
                *(block_q, chosen["block_kv"], chosen["num_warps"], chosen["num_stages"]),
                easily_dealt=not dealt or num_seqs in EASILY_DEALT,
            ),
            num_cores=device.num_cores,
            dealt=dealt,
        )
        evening = EVENING if waves.resident > 1 else EVENING_ALONE
        least_programs = 1 if short else int(evening * device.num_cores)
        if not pieces:
            pieces = waves.pieces(max(least_tokens, chosen["block_kv"]), least_programs) if dealt else 1
        target = programs * pieces
        if pieces == 1:
            # Beside very many sequences a long one is cut into shares of what runs at once, not into finer ones.
            target = min(programs, max(4 * device.num_cores, waves.slots))
            if dealt and max_len >= LONG and ROOMY * programs <= waves.slots:
                target = int(ROOMY * programs)
        return waves.cost(pieces), {"target_programs": target, "num_splits": int(not dealt), **chosen}

    # Few programs and short sequences want small tiles. So does what is dealt where four such programs share a
    # multiprocessor: sequences of one length lose 1% by it at most, others gain up to 40% (EXPERIMENTS.md, row 71).
    small = max_len < LONG or each < MOST_BUSY or room.keeps_apart(block_q)
    usual = TURNED_TILE if block_q == TURNED_ROWS else SMALL_TILE if small else LARGE_TILE
    if in_one and each <= 1 and usual == SMALL_TILE:
        usual = MIDDLE_TILE
    cut = plan(usual, dealt=True, pieces=int(in_one))
    if usual == SMALL_TILE and room.keeps_apart(block_q):
        apart = plan(APART_TILE, dealt=True)
        target = apart[1]["target_programs"]
        least = max(programs, (AT_ONCE - 1) * device.num_cores + 1)
        most = min(AT_ONCE * device.num_cores, programs * max_len // APART_TOKENS)
        if not in_one and least <= target <= most:
            cut = apart
        if max_len > SHORT_TOKENS and "block_kv" not in measured:
            filling = room.filling(block_q, programs, cut[1], short=short)
            if filling:
                usual, pieces = filling
                cut = plan(usual, dealt=True, pieces=pieces)
    plans = [] if may_be_whole and cut[1]["target_programs"] <= programs else [cut]
    if may_be_whole:
        plans.append(plan(usual, dealt=False))
        if programs <= device.num_cores:
            # One wave of programs that have a multiprocessor each, with nothing cut to keep it busy.
            plans.append(plan(LARGE_TILE, dealt=False))
    _, fields = min(plans, key=lambda found: found[0])
    if "target_programs" in measured:
        fields["num_splits"] = int(short and 2 * programs >= measured["target_programs"])
    return PagedAttentionConfig(
        **{"block_q": block_q, "min_split_tokens": least_tokens, **fields, **measured},
    )


def invariant(
    *, rows: int, head_dim: int, itemsize: int, query_itemsize: int, device: Device, layout: str = "NHD"
) -> PagedAttentionConfig:
    """For calls whose bits must not depend on the batch: neither does anything that it goes by."""
    room = _Room(triton.tile_side(head_dim), itemsize, query_itemsize, device, layout)
    block_q = room.block_q(rows)
    return PagedAttentionConfig(
        block_q,
        **room.tile(block_q, *(TURNED_TILE if block_q == TURNED_ROWS else LARGE_TILE)),
        split_tokens=INVARIANT_TOKENS,
        num_splits=INVARIANT_SPLITS,
        # How many programs there are decides when pieces are worked on, but not what is in them.
        target_programs=8 * device.num_cores,
    )


@dataclasses.dataclass(frozen=True)
class _Room:
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

    def keeps_apart(self, block_q: int) -> bool:
        """Whether one more buffer leaves room for those small tiles that are planned, and for no more."""
        few, more = self.resident(block_q, *APART_TILE), self.resident(block_q, *SMALL_TILE)
        return few == AT_ONCE < more

    def filling(
        self, block_q: int, programs: int, small: dict[str, int], *, short: bool
    ) -> tuple[tuple[int, int, int], int] | None:
        """(tile, pieces of each walk) that leave less of a wave idle than the plan with small tiles. `short` walks are
        in one piece each, where there are more of them than multiprocessors."""

        def waves(tile: tuple[int, int, int], programs: int = programs) -> float:
            return programs / (self.resident(block_q, *tile) * self.device.num_cores)

        def filled(waves: float) -> float:
            return waves / math.ceil(waves)

        if programs <= self.device.num_cores or waves(SMALL_TILE) > MANY_WAVES:
            return None
        if programs <= ONE_EACH * self.device.num_cores:
            return MIDDLE_TILE, 1
        if waves(SMALL_TILE) > 1:
            one_each = [SMALL_TILE] if short else [SMALL_TILE, APART_TILE]
            best = max(one_each, key=lambda tile: filled(waves(tile)))
            return best if filled(waves(best)) > max(FILLED, filled(waves(MIDDLE_TILE))) else MIDDLE_TILE, 1
        planned = waves(
            (small["block_kv"], small["num_warps"], small["num_stages"]), small["target_programs"]
        )
        least = max(ONE_WAVE, filled(planned))
        some = MIDDLE_PIECES[:1] if short else MIDDLE_PIECES
        fits = [pieces for pieces in some if least < waves(MIDDLE_TILE, programs * pieces) <= 1]
        return (MIDDLE_TILE, fits[0]) if fits else None

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
