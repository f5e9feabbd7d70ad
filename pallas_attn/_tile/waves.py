"""What a split-KV kernel costs, in microseconds: the one function that candidates are weighed by.

A walk goes over one sequence's tokens, for one KV head and block of query rows. It is cut into splits, and each is a
program. So many programs run at once, a wave; three things bound it, the slowest of them counts:

    memory   all that the wave reads, at the memory's bandwidth
    core     what the fullest multiprocessor reads, at the rate that its instructions take
    program  what one program reads, a step after the other

The cost is that of two batches, for lengths are not known when a call is compiled: of one whose sequences fill their
rows of the block table, in waves of equal programs, and of one whose lengths differ, whose splits are dealt evenly but
for the last of them.
"""

import dataclasses
import math

from pallas_attn._call import budget
from pallas_attn._call.device import Device

# Measured on an H200 and an H100 with the kernel of `paged_attention`, bf16.
# From a program's start to its first products: lengths, page ids and keys come one after the other.
START_US = 3.0
# Of a multiprocessor's instructions, for each program that it begins: working out what it serves.
BEGIN_US = 0.4
# Of the second kernel, and of working out what is cut.
MERGE_US = 3.0
# That each step of a program waits, however small its tile.
STEP_US = 0.2
# That a multiprocessor's instructions get through, in KB a microsecond.
CORE_KB_US = 40
# How many times the mean the fullest multiprocessor of a wave has, and the longest split of a batch.
UNEVEN = 1.5
# The mean of lengths that differ, of the longest.
DIFFERING = 0.125


@dataclasses.dataclass(frozen=True)
class Work:
    """Of a call, if nothing is cut."""

    walks: int
    tokens: int
    """Of each walk, at most."""
    result_bytes: int
    """That a split leaves for the merge."""


def slots(tile: budget.Tile, device: Device) -> int:
    """Programs that run at once."""
    return tile.resident(device) * device.num_cores


def cost(tile: budget.Tile, work: Work, splits: int, device: Device, *, whole: bool = False) -> float:
    """Microseconds, of both batches together. `whole`: nothing is ever cut, and there is no merge."""
    at_once, programs = slots(tile, device), work.walks * splits
    step_kb = tile.loaded_bytes / 1024
    walk_kb = math.ceil(work.tokens / tile.tokens) * step_kb
    split_kb = math.ceil(work.tokens / tile.tokens / splits) * step_kb
    alone = step_kb / (STEP_US + step_kb / CORE_KB_US)

    def wave(programs: int) -> float:
        fullest = min(tile.resident(device), math.ceil(UNEVEN * programs / device.num_cores))
        reading = split_kb * max(programs / device.kb_us, fullest / CORE_KB_US, 1 / alone)
        return START_US + BEGIN_US * fullest + reading

    full, rest = divmod(programs, at_once)
    equal = full * wave(at_once) + (wave(rest) if rest else 0.0)

    read_kb = DIFFERING * work.walks * walk_kb
    number = max(1.0, programs / at_once)
    # What programs of the first wave have left uneven those of the next ones even out.
    uneven = 1 + (UNEVEN - 1) / number
    reading = read_kb * max(1 / device.kb_us, uneven / (CORE_KB_US * device.num_cores))
    longest = walk_kb if whole else max(step_kb, UNEVEN * read_kb / max(programs, at_once))
    # What is dealt begins with the longest; of what is not, more than run at once, the longest may begin last.
    ending = reading + longest / alone if whole and number > 1 else max(reading, longest / alone)
    differing = number * (START_US + BEGIN_US * tile.resident(device)) + ending

    merge = 0.0 if whole else MERGE_US + 2 * programs * work.result_bytes / 1024 / device.kb_us
    return math.sqrt((equal + merge) * (differing + merge))


def target(walks: int, splits: int, at_once: int) -> int:
    """Programs that a batch is dealt to, so that equal lengths have so many splits each, to the nearest number, and
    lengths that differ as many as run at once."""
    return max(walks * splits, min(at_once, walks * splits + (walks - 1) // 2))
