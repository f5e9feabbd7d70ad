"""What a split-KV kernel costs, in nanoseconds: the one function that candidates are weighed by.

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
import functools
import math
from collections.abc import Iterator

from pallas_attn._call import budget
from pallas_attn._call.device import Device

# Fitted to times of `paged_attention` on an H200, bf16 (benchmarks/results: `*-7990f3d-paged_attention-cost.txt`).
# From a program's start to its first products: lengths, page ids and keys come one after the other. The merge, a second
# kernel, has to start too.
START_NS = MERGE_NS = 3000
# That each step of a program takes, however small its tile. Half of it are instructions, the rest is waiting.
STEP_NS = 200
# Of a multiprocessor's instructions, for each program that it begins: two such steps, for lengths and for page ids.
BEGIN_NS = 2 * STEP_NS
# Bytes a nanosecond that a multiprocessor's instructions get through.
CORE_BYTES_NS = 41
# How many times the mean the fullest multiprocessor of a wave has, and the longest split of a batch.
UNEVEN = 1.5
# The mean of lengths that differ, of the longest.
DIFFERING = 0.125


@dataclasses.dataclass(frozen=True)
class Waves:
    """A call in a tile: `walks` over at most `tokens` tokens each, whose splits leave `result_bytes` for the merge."""

    tile: budget.Tile
    device: Device
    walks: int
    tokens: int
    result_bytes: int

    @functools.cached_property
    def resident(self) -> int:
        """Programs that share a multiprocessor."""
        return self.tile.resident(self.device)

    @functools.cached_property
    def at_once(self) -> int:
        """Programs that run at once."""
        return self.resident * self.device.num_cores

    @functools.cached_property
    def steps(self) -> int:
        """Of a walk that is not cut."""
        return math.ceil(self.tokens / self.tile.tokens)

    @functools.cached_property
    def step_bytes(self) -> int:
        return self.tile.loaded_bytes

    @functools.cached_property
    def alone_ns(self) -> float:
        """That a program takes for each byte, however few programs there are."""
        return STEP_NS / self.step_bytes + 1 / CORE_BYTES_NS

    @functools.cached_property
    def core_ns(self) -> float:
        """That a multiprocessor's instructions take for each byte, whichever program's it is."""
        return STEP_NS / 2 / self.step_bytes + 1 / CORE_BYTES_NS

    def cost(self, splits: int, *, whole: bool = False) -> float:
        """Nanoseconds, the geometric mean of both batches. `whole`: nothing is ever cut, and there is no merge."""
        programs = self.walks * splits
        merge = 0.0 if whole else MERGE_NS + 2 * programs * self.result_bytes / self.device.bytes_ns
        return math.sqrt((self._equal(splits) + merge) * (self._differing(programs, whole) + merge))

    def cheapest(self, most: int) -> tuple[float, int]:
        """(cost, splits), where a walk has so many at most."""
        best = self.cost(1), 1
        for splits in self._counts(most):
            # To begin them costs more alone, and so does any larger number.
            if START_NS * self.walks * splits / self.at_once > best[0]:
                break
            best = min(best, (self.cost(splits), splits))
        return best

    def _counts(self, most: int) -> Iterator[int]:
        """The fewest splits that leave the longest of them one tile less, and so on: few, of a table of any width."""
        tiles = self.steps
        while tiles > 1 and (splits := math.ceil(self.steps / (tiles - 1))) <= most:
            yield splits
            tiles = math.ceil(self.steps / splits)

    def _equal(self, splits: int) -> float:
        split_bytes = math.ceil(self.steps / splits) * self.step_bytes

        def wave(programs: int) -> float:
            fullest = min(self.resident, math.ceil(UNEVEN * programs / self.device.num_cores))
            slowest = max(programs / self.device.bytes_ns, fullest * self.core_ns, self.alone_ns)
            reading = slowest * split_bytes
            return START_NS + BEGIN_NS * fullest + reading

        full, rest = divmod(self.walks * splits, self.at_once)
        return full * wave(self.at_once) + (wave(rest) if rest else 0.0)

    def _differing(self, programs: int, whole: bool) -> float:
        waves = max(1.0, programs / self.at_once)
        read_bytes = DIFFERING * self.walks * self.steps * self.step_bytes
        # What programs of the first wave have left uneven those of the next ones even out.
        uneven = 1 + (UNEVEN - 1) / waves
        reading = read_bytes * max(1 / self.device.bytes_ns, uneven * self.core_ns / self.device.num_cores)
        longest_bytes = self.steps * self.step_bytes
        if not whole:
            longest_bytes = max(self.step_bytes, UNEVEN * read_bytes / max(programs, self.at_once))
        # What is dealt begins with the longest; of what is not, more than run at once, the longest may begin last.
        longest = longest_bytes * self.alone_ns
        ending = reading + longest if whole and waves > 1 else max(reading, longest)
        return waves * (START_NS + BEGIN_NS * self.resident) + ending

    def target(self, splits: int) -> int:
        """Programs that the batch is dealt to, so that equal lengths have so many splits each, to the nearest number,
        and lengths that differ as many as run at once."""
        programs = self.walks * splits
        return max(programs, min(self.at_once, programs + (self.walks - 1) // 2))
