"""Tile sizes of the paged attention kernel, and the heuristic for devices without a measured file."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

from pallas_attn._call import configs
from pallas_attn._call.checks import dtype_name, fail
from pallas_attn._call.configs import SplitKVConfig
from pallas_attn._call.device import Device, current_device
from pallas_attn._split.pieces import check_invariant
from pallas_attn._split.waves import Waves
from pallas_attn._tile import triton, walk
from pallas_attn.ops.paged_attention.operands import Operands
from pallas_attn.ops.paged_attention.room import EASILY_DEALT, TURNED_ROWS, Room

type Tile = tuple[int, int, int]
"""(block_kv, num_warps, num_stages), where there is room."""

# On Hopper and with heads of 128, four programs with the small tile share a multiprocessor, and one with the large
# fills it, with as many bytes under way.
SMALL_TILE, LARGE_TILE = (32, 4, 5), (128, 4, 3)
# Small tiles leave room for a fifth program, where four are planned that run at once the GPU deals five and three: with
# one more buffer four fit. It takes longer to fill: not for pieces of fewer tokens.
APART_TILE, AT_ONCE, APART_TOKENS = (32, 4, 7), 4, 512
# More walks than run at once leave a last wave that is not full: fewer programs with larger tiles lose less by it, and
# need no finer pieces, up to so many waves. Unless small tiles fill theirs to this part, which is better still.
MIDDLE_TILE, MANY_WAVES, FILLED = (64, 4, 5), 3, 0.9
# One or two pieces of each walk may also fill one wave of them to this part, where small tiles fill theirs less.
ONE_WAVE, MIDDLE_PIECES = 5 / 6, (1, 2)
# Where walks are more than MANY_WAVES waves there are so many shares for each program that runs at once: what begins
# last is then small.
MANY_SHARES = 2
# Where walks are hardly more than multiprocessors a larger tile each is best, for it asks for nearly all of a share.
ONE_EACH = 1.16
# Shares for each of so few walks that more of them would run at once: equal lengths still have one piece. Long tables.
ROOMY, LONG = 1.4, 4096
# Where products are turned: four programs share a multiprocessor.
TURNED_TILE = (64, 2, 3)
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
    be (`_split/waves.py`). Lengths that differ are dealt at run time, in as many shares of the batch's work.
    """
    room = Room(triton.tile_side(head_dim), itemsize, query_itemsize, device, layout)
    block_q = measured.get("block_q", room.block_q(rows))
    walks = num_seqs * num_kv_heads * math.ceil(rows / block_q)
    call = _Call(
        room,
        num_seqs=num_seqs,
        walks=walks,
        block_q=block_q,
        result_bytes=8 * min(rows, block_q) * head_dim,
        token_bytes=2 * head_dim * itemsize,
        max_len=max_len,
        measured=measured,
    )
    fields = call.cheapest()
    if "target_programs" in measured:
        fields["num_splits"] = int(call.short and 2 * walks >= measured["target_programs"])
    return PagedAttentionConfig(
        **{"block_q": block_q, "min_split_tokens": call.least_tokens, **fields, **measured},
    )


class _Plan(NamedTuple):
    cost: float
    fields: dict[str, int]
    """Of the config."""

    @property
    def tile(self) -> Tile:
        return self.fields["block_kv"], self.fields["num_warps"], self.fields["num_stages"]

    @property
    def programs(self) -> int:
        return self.fields["target_programs"]


@dataclasses.dataclass(frozen=True)
class _Call:
    """What decides how a call is cut up."""

    room: Room
    num_seqs: int
    walks: int
    """Over a sequence, for a block of a KV head's query rows: the programs if nothing is cut."""
    block_q: int
    result_bytes: int
    """That a piece leaves for the merge."""
    token_bytes: int
    """Of a key and a value."""
    max_len: int
    measured: dict[str, int]

    @property
    def each(self) -> float:
        """Walks a multiprocessor."""
        return self.walks / self.room.device.num_cores

    def waves(self, tile: Tile, programs: int) -> float:
        """Of so many programs, a part of one at the end."""
        return programs / (self.room.resident(self.block_q, *tile) * self.room.device.num_cores)

    @property
    def many(self) -> bool:
        """Whether walks are so many waves of small tiles that what is idle in the last one is little."""
        return self.waves(SMALL_TILE, self.walks) > MANY_WAVES

    @property
    def least_tokens(self) -> int:
        """Of a piece."""
        # Where pieces of twice as many tokens would leave multiprocessors without any, fine ones cost less than those
        # idle.
        few = self.walks * self.max_len <= 2 * FINE_TOKENS * self.room.device.num_cores
        return self.measured.get("min_split_tokens", FINE_TOKENS if self.max_len < LONG or few else 256)

    @property
    def short(self) -> bool:
        return self.max_len <= WHOLE_TOKENS

    @property
    def may_be_whole(self) -> bool:
        return self.short and (self.max_len <= SHORT_TOKENS or self.each > MANY_EACH)

    @property
    def in_one(self) -> bool:
        """Equal lengths in one piece each, others as shares come out."""
        return self.short and not self.may_be_whole and self.each > MOST_BUSY

    @property
    def kept_apart(self) -> bool:
        """Whether one more buffer leaves room for those small tiles that are planned, and for no more."""
        few, more = (self.room.resident(self.block_q, *tile) for tile in (APART_TILE, SMALL_TILE))
        return few == AT_ONCE < more

    def cheapest(self) -> dict[str, int]:
        """Fields of the config."""
        tile, dealt = self.dealt()
        if not self.may_be_whole:
            return dealt.fields
        plans = [dealt] if dealt.programs > self.walks else []
        plans.append(self.plan(tile, dealt=False))
        if self.each <= 1:
            # One wave of programs that have a multiprocessor each, with nothing cut to keep it busy.
            plans.append(self.plan(LARGE_TILE, dealt=False))
        return min(plans, key=lambda plan: plan.cost).fields

    def dealt(self) -> tuple[Tile, _Plan]:
        """Where lengths decide what is cut; and the tile that it was planned for."""
        # Few programs and short sequences want small tiles. So does what is dealt where four such programs share a
        # multiprocessor: sequences of one length lose 1% by it at most, others gain up to 40% (EXPERIMENTS.md).
        small = self.max_len < LONG or self.each < MOST_BUSY or self.kept_apart
        if self.block_q == TURNED_ROWS:
            return TURNED_TILE, self.plan(TURNED_TILE, dealt=True, pieces=int(self.in_one))
        if not small:
            return LARGE_TILE, self.plan(LARGE_TILE, dealt=True)
        if self.in_one and self.each <= 1:
            return MIDDLE_TILE, self.plan(MIDDLE_TILE, dealt=True, pieces=1)
        best = self.plan(SMALL_TILE, dealt=True, pieces=int(self.in_one))
        if not self.kept_apart:
            return SMALL_TILE, best
        if not self.in_one and self.plans_apart(apart := self.plan(APART_TILE, dealt=True)):
            best = apart
        if (
            self.max_len > SHORT_TOKENS
            and "block_kv" not in self.measured
            and (filling := self.filling(best))
        ):
            tile, pieces = filling
            return tile, self.plan(tile, dealt=True, pieces=pieces)
        return SMALL_TILE, best

    def plans_apart(self, apart: _Plan) -> bool:
        """Whether a plan has programs that are to be kept apart, in pieces that are long enough."""
        num_cores = self.room.device.num_cores
        least = max(self.walks, (AT_ONCE - 1) * num_cores + 1)
        most = min(AT_ONCE * num_cores, self.walks * self.max_len // APART_TOKENS)
        return least <= apart.programs <= most

    def filling(self, small: _Plan) -> tuple[Tile, int] | None:
        """(tile, pieces of each walk) that leave less of a wave idle than the plan with small tiles. Short walks are in
        one piece each, where there are more of them than multiprocessors."""

        def filled(waves: float) -> float:
            return waves / math.ceil(waves)

        if self.each <= 1 or self.many:
            return None
        if self.each <= ONE_EACH:
            return MIDDLE_TILE, 1
        if self.waves(SMALL_TILE, self.walks) > 1:
            one_each = [SMALL_TILE] if self.short else [SMALL_TILE, APART_TILE]
            part = {tile: filled(self.waves(tile, self.walks)) for tile in (*one_each, MIDDLE_TILE)}
            best = max(one_each, key=part.__getitem__)
            return best if part[best] > max(FILLED, part[MIDDLE_TILE]) else MIDDLE_TILE, 1
        least = max(ONE_WAVE, filled(self.waves(small.tile, small.programs)))
        some = MIDDLE_PIECES[:1] if self.short else MIDDLE_PIECES
        fits = [pieces for pieces in some if least < self.waves(MIDDLE_TILE, self.walks * pieces) <= 1]
        return (MIDDLE_TILE, fits[0]) if fits else None

    def plan(self, tile: Tile, *, dealt: bool, pieces: int = 0) -> _Plan:
        """Of so many pieces of each walk, or, with 0, of those that cost least."""
        chosen = self.room.tile(self.block_q, *tile) | self.measured
        num_cores = self.room.device.num_cores
        waves = Waves(
            streams=self.walks,
            tokens=self.max_len,
            token_kb=max(LEAST_TOKEN_KB, self.token_bytes / 1024),
            piece_kb=self.result_bytes / 1024,
            resident=self.room.resident(
                *(self.block_q, chosen["block_kv"], chosen["num_warps"], chosen["num_stages"]),
                easily_dealt=not dealt or self.num_seqs in EASILY_DEALT,
            ),
            num_cores=num_cores,
            dealt=dealt,
        )
        if not dealt:
            pieces = 1
        elif not pieces:
            evening = EVENING if waves.resident > 1 else EVENING_ALONE
            least_programs = 1 if self.short else int(evening * num_cores)
            pieces = waves.pieces(max(self.least_tokens, chosen["block_kv"]), least_programs)
        target = self.walks * pieces
        if pieces == 1:
            # Beside very many sequences a long one is cut into shares of what runs at once, or halves of them: not into
            # finer ones.
            target = min(self.walks, max(4 * num_cores, (MANY_SHARES if self.many else 1) * waves.slots))
            if dealt and self.max_len >= LONG and ROOMY * self.walks <= waves.slots:
                target = int(ROOMY * self.walks)
        return _Plan(waves.cost(pieces), {"target_programs": target, "num_splits": int(not dealt), **chosen})


def invariant(
    *, rows: int, head_dim: int, itemsize: int, query_itemsize: int, device: Device, layout: str = "NHD"
) -> PagedAttentionConfig:
    """For calls whose bits must not depend on the batch: neither does anything that it goes by."""
    room = Room(triton.tile_side(head_dim), itemsize, query_itemsize, device, layout)
    block_q = room.block_q(rows)
    return PagedAttentionConfig(
        block_q,
        **room.tile(block_q, *(TURNED_TILE if block_q == TURNED_ROWS else LARGE_TILE)),
        split_tokens=INVARIANT_TOKENS,
        num_splits=INVARIANT_SPLITS,
        # How many programs there are decides when pieces are worked on, but not what is in them.
        target_programs=8 * device.num_cores,
    )


def max_len(operands: Operands) -> int:
    """Tokens that are walked over, whatever is held."""
    sizes = operands.sizes
    return walk.most_tokens(sizes.max_len, q_len=sizes.q_len, group=sizes.group, rules=operands.rules)


def key(operands: Operands) -> dict[str, Any] | None:
    """What measured files go by."""
    if operands.batch_invariant:
        return None
    return dict(
        head_dim=operands.pool.head_dim,
        rows=operands.sizes.rows,
        page_size=operands.pool.page_size,
        dtype=dtype_name(operands.key_cache.dtype),
        query_itemsize=operands.query.dtype.itemsize,
        layout=operands.layout,
        streams=operands.sizes.streams,
        max_len=max_len(operands),
    )


def default(operands: Operands, **measured: int) -> PagedAttentionConfig:
    """As the heuristic has it for a call at hand."""
    kind: dict[str, Any] = dict(
        rows=operands.sizes.rows,
        head_dim=operands.pool.head_dim,
        itemsize=operands.key_cache.dtype.itemsize,
        query_itemsize=operands.query.dtype.itemsize,
        device=current_device(),
        layout=operands.layout,
    )
    if operands.batch_invariant:
        made = invariant(**kind)
    else:
        batch = dict(num_seqs=operands.sizes.num_seqs, num_kv_heads=operands.pool.num_kv_heads)
        made = heuristic(**batch, max_len=max_len(operands), **kind, **measured)
    # A tile lies within one block of the pattern.
    return dataclasses.replace(made, block_kv=min(made.block_kv, _most_block_kv(operands) or made.block_kv))


def check(operands: Operands, config: PagedAttentionConfig) -> None:
    """Refuses a caller's config."""
    check_invariant("paged_attention", config, operands.batch_invariant)
    if (most := _most_block_kv(operands)) is not None and config.block_kv > most:
        expected = f"block_kv at most block_sparse.block_size ({most})"
        fail("paged_attention", "config", expected, str(config.block_kv))


def _most_block_kv(operands: Operands) -> int | None:
    pattern = operands.rules.block_sparse
    return None if pattern is None else pattern.block_size
