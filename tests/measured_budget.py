"""What shared memory the kernels of drawn calls take, beside what the budget says of their tiles.

python tests/measured_budget.py --count 40 --sm 80 90 120 --ops flash prefix   # more than the tests draw
python tests/measured_budget.py --all --implementation triton --triton 3.9.0
"""

import argparse
import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import lowering
import triton_kernels
from drawn_shapes import OPS, Drawn, draw

from pallas_attn._call import budget
from pallas_attn._tile import triton


@dataclasses.dataclass(frozen=True)
class Measured:
    """A kernel of a drawn call."""

    name: str
    tile: tuple[int, int, int, int]
    """Rows, tokens, warps, stages."""
    needed: int
    """Bytes of shared memory, as the compiler has it."""
    expected: int | None
    """As the budget has it, if a heuristic asked."""
    limit: int

    def __str__(self) -> str:
        sides = "x".join(map(str, self.tile))
        return f"{self.name} {sides}: {self.needed} of {self.limit} bytes, expected at most {self.expected}"

    @property
    def wrong(self) -> str | None:
        if self.needed > self.limit:
            return "does not fit"
        if self.expected is not None and self.needed > self.expected:
            return "takes more than was expected"
        return None


@contextlib.contextmanager
def _noted() -> Iterator[tuple[dict[str, Any], dict[Any, int]]]:
    """(the tile of each kernel that is called inside, and what the budget says of each tile that fits)"""
    called: dict[str, Any] = {}
    asked: dict[Any, int] = {}
    kernel_call, fits = triton.kernel_call, budget.Tile.fits

    def noted_call(
        kernel: Any, *arrays: Any, name: str, num_warps: int, num_stages: int, **options: Any
    ) -> Any:
        given = kernel.keywords
        tiles: Any = given.get("tiles") or getattr(given.get("problem"), "config", None)
        sides = [getattr(tiles, side, 0) for side in ("block_q", "block_kv")]
        if name.endswith("dkv"):  # which holds keys
            sides.reverse()
        if name.endswith("blocksparse_decode"):
            sides = [16, tiles.decode_block_kv]
        called[name] = (*sides, num_warps, num_stages)
        return kernel_call(kernel, *arrays, name=name, num_warps=num_warps, num_stages=num_stages, **options)

    def noted_fits(tile: budget.Tile, device: Any, *rest: int) -> bool:
        if found := fits(tile, device, *rest):
            key = tile.rows, tile.tokens, tile.num_warps, tile.num_stages
            asked[key] = max(asked.get(key, 0), tile.shared_bytes(device) + budget.OTHER_BYTES)
        return found

    with (
        mock.patch.object(triton, "kernel_call", noted_call),
        mock.patch.object(budget.Tile, "fits", noted_fits),
    ):
        yield called, asked


def measured(drawn: Drawn, sm: int, implementation: str = "pallas", release: str = "") -> Iterator[Measured]:
    """Of each kernel that takes any, by a release of pip's Triton."""
    release = release or lowering.USUAL_TRITON
    jax.clear_caches()  # what was traced before asks nobody
    with _noted() as (called, asked), triton_kernels.written() as written:
        lowered = drawn.lowered(sm, implementation)
    texts = [(kernel.name, kernel.text, kernel.num_warps, kernel.num_stages) for kernel in written]
    texts += [
        (name, lowering.triton_text(code), *rest) for name, code, *rest in lowering.triton_kernels(lowered)
    ]
    assert texts
    for name, text, num_warps, num_stages in texts:
        sizes = {"num_warps": num_warps, "num_stages": num_stages}
        made = lowering.compile_text(name, text, sm, release, **sizes, shared_only=True)
        tile = called.get(name, (0, 0, num_warps, num_stages))
        yield Measured(name, tile, made.shared_bytes, asked.get(tile), lowering.SMEM_LIMIT[sm])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ops", nargs="+", choices=list(OPS), default=list(OPS))
    parser.add_argument("--sm", nargs="+", type=int, choices=list(lowering.DEVICES), default=[80, 90, 120])
    parser.add_argument("--first", type=int, default=1000, help="seed")
    parser.add_argument("--count", type=int, default=20, help="of seeds")
    parser.add_argument("--implementation", choices=("pallas", "triton"), default="pallas")
    parser.add_argument("--triton", default=lowering.USUAL_TRITON, help="release")
    parser.add_argument("--all", action="store_true", help="show those that fit, too")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)  # of Pallas' Triton lowering
    bad = total = 0
    for seed in range(chosen.first, chosen.first + chosen.count):
        for op in chosen.ops:
            drawn = draw(op, seed)
            for sm in filter(drawn.serves, chosen.sm):
                for one in measured(drawn, sm, chosen.implementation, chosen.triton):
                    total += 1
                    bad += one.wrong is not None
                    if one.wrong or chosen.all:
                        print(f"sm_{sm} {one}: {one.wrong or 'fits'}\n    {drawn}", flush=True)
    print(f"{total} kernels, {bad} wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
