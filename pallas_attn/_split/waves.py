"""How long a split-KV kernel takes whose programs have equal work: what heuristics weigh numbers of pieces by.

A device has room for so many programs at once. Equal ones end together, and the next wave of them begins. The last wave
is rarely full. Where a program fills a multiprocessor that takes as long as a full one: what is idle helps nobody.
Where several share one, those that are left share memory with fewer and are quicker, up to what a program can ask for
at most: twice its share where four run together, so that one program too many costs half a wave.

Time is counted in KB that a multiprocessor's share of the memory's bandwidth moves meanwhile. What else costs was
measured on an H200, where that share is 34 KB a microsecond.
"""

import dataclasses

from pallas_attn._tile.triton import ceil_div

# Of each wave: from its start to its first products, lengths, page ids and keys come one after the other.
START_KB = 80
# Of a kernel that deals: every program works out what is cut, slots without a piece come and go, another kernel merges.
DEALING_KB, DEALING = 140, 1.1
# How many programs on a multiprocessor ask for all of its share; and how much more than their own share programs take
# where they are few, at most, where they deal: a fifth program is room for one, not more that each can ask for.
ENOUGH, MOST_ALONE = 2, 2.0
# What a program asks for beside that, in shares, where nothing is dealt and no other wave is.
UNDEALT = 0.5
# What each `FEW_PROGRAMS` more on a multiprocessor have to gain: where lengths differ, finer pieces fill waves
# no better, and cost more.
FINER, FEW_PROGRAMS = 0.03, 4
# On a multiprocessor, one after the other or at once: with more, a last wave that is not full is little.
MOST_PROGRAMS = 24


@dataclasses.dataclass(frozen=True)
class Waves:
    """Of a kernel with one program for each of `streams` walks over `tokens` tokens of `token_kb`, or for each of so
    many equal pieces of them, which leave `piece_kb` for the merge. `resident` programs fit on each of `num_cores`
    multiprocessors."""

    streams: int
    tokens: int
    token_kb: float
    piece_kb: float
    resident: int
    num_cores: int
    dealt: bool = True
    """Whether lengths decide what is cut, and there is a kernel for the merge."""

    @property
    def slots(self) -> int:
        """Programs that run at once."""
        return self.resident * self.num_cores

    def taken(self, programs: int) -> float:
        """Time of so many equal programs, in full waves."""
        full, more = divmod(programs, self.slots)
        if not more:
            return float(full)
        part = more / self.slots
        alone = max(1.0, self.resident / ENOUGH)
        if self.dealt:
            alone = min(alone, MOST_ALONE)
        elif not full:
            alone += UNDEALT
        return full + max(part, 1 / (alone - (alone - 1) * part))

    def cost(self, pieces: int) -> float:
        """Of as many pieces of each walk, in KB a multiprocessor."""
        programs = self.streams * pieces
        walking = self.taken(programs) * self.resident * self.tokens * self.token_kb / pieces
        starts = ceil_div(programs, self.slots) * START_KB
        if not self.dealt:
            return walking + starts
        left = programs * self.piece_kb / self.num_cores if pieces > 1 else 0.0
        return walking * DEALING + starts + DEALING_KB + left

    def pieces(self, least_tokens: int, least_programs: int = 1) -> int:
        """Of each walk those that cost least, none shorter than `least_tokens`: as many programs as asked for, where
        that allows."""
        most = max(1, min(self.tokens // least_tokens, MOST_PROGRAMS * self.num_cores // self.streams))

        def cost(pieces: int) -> float:
            more = (self.streams * pieces - 1) // (FEW_PROGRAMS * self.num_cores)
            return self.cost(pieces) * (1 + FINER * more)

        least = ceil_div(least_programs, self.streams)
        return min(range(least if least <= most else 1, most + 1), key=cost)
