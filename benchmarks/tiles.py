"""Times tiles of `paged_attention` beside what a call takes by itself, and beside peers, over kinds of lengths. The
heuristic, and what was entered in measured files by hand, came about so.

    python benchmarks/tiles.py --cells 16x1024 16xexponential1024 --tiles 64x4s5/W 32x4s5/512
    python benchmarks/tiles.py --cells 64xgiants8192 --kv-heads 4 --tiles 32x4s7/1.4W 64x4s5//whole --peers fa3
    python benchmarks/tiles.py --tiny                                      # anywhere, to try it

A cell is SEQUENCESxTOKENS, or SEQUENCESxKINDTOKENS for lengths of a kind in a table of so many tokens: uniform;
exponential, lognormal (sigma 1) and narrow (0.4), of which the longest fills the table; bimodal, half of them a
twentieth; giants, four that fill it among others of a 64th to a 16th.

Tiles are TOKENSxWARPSsSTAGES, then the programs that lengths are dealt to: a number, or a multiple of W, as many as
there are walks (sequences x KV heads), or as planned. Then `whole`, if no sequence is to be cut. The heuristic fills in
the rest.

Everything is checked against a float32 reference in the same process, and timed in turns (measure.py). A line has
microseconds, of the middle sample and in brackets of the least and the most, and how many times as fast as `auto` that
is. Exit status: 0; 1 when a result was wrong; 2 when nothing could begin.
"""

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import baselines
import jax
import lengths
import measure
import progress
import results
from measure import Outcome
from run import Parser, check_heads, count, measured
from workloads.base import Target
from workloads.paged_attention import PagedAttention

import pallas_attn
from pallas_attn.ops.paged_attention import PagedAttentionConfig
from pallas_attn.testing.cases import DecodeCase
from pallas_attn.tuning.paged_attention import PagedAttentionPoint

AUTO = "auto"
CELL = re.compile(rf"(\d+)x({'|'.join(lengths.KINDS)})?(\d+)")
TILES = re.compile(r"(\d+)x(\d+)s(\d+)(?:/(\d+|(?:\d+(?:\.\d+)?)?W)?)?(?:/(whole))?")
TINY = dict(cells=["2x64", "3xuniform64"], tiles=["16x1s1/W", "16x1s1//whole"])
SIZES = dict(heads=32, kv_heads=8, head_dim=128, page_size=16)
TINY_SIZES = dict(heads=4, kv_heads=2, head_dim=16, page_size=16)


def workload_of(tiles: Sequence[str], small: bool) -> PagedAttention:
    """Ours by itself and in tiles that are given."""
    compiled = "pallas" if jax.default_backend() == "gpu" else "interpret"
    # By itself a call takes plain jnp where there is no GPU: then its own tiles are what is compared.
    own = Target(AUTO, None if compiled == "pallas" else compiled)

    class Tiled(PagedAttention):
        targets: ClassVar[dict[str, Target]] = {AUTO: own} | {name: Target(name, compiled) for name in tiles}

        def config(self, case: DecodeCase, target: str) -> PagedAttentionConfig | None:
            return None if target == AUTO else config_of(case, target)

    return Tiled(pallas_attn, small)


def config_of(case: DecodeCase, tiles: str) -> PagedAttentionConfig:
    """ValueError for what are no tiles, or none that a kernel can have."""
    match = TILES.fullmatch(tiles)
    if match is None:
        raise ValueError(f"--tiles: expected TOKENSxWARPSsSTAGES[/PROGRAMS[/whole]], got {tiles!r}")
    tokens, warps, stages, programs, whole = match.groups()
    fields = dict(block_kv=int(tokens), num_warps=int(warps), num_stages=int(stages))
    if programs:
        walks = case.num_seqs * case.num_kv_heads
        many = int(programs) if programs.isdecimal() else int(float(programs[:-1] or 1) * walks)
        # Of so many, sequences may be cut: the heuristic would leave short ones whole.
        fields |= dict(target_programs=many, num_splits=0)
    if whole:
        fields |= dict(num_splits=1)
    return PagedAttentionPoint(case=case).config(**fields)


def case_of(cell: str, sizes: dict[str, int]) -> DecodeCase:
    match = CELL.fullmatch(cell)
    if match is None or not all(int(number) for number in match.group(1, 3)):
        kinds = ", ".join(lengths.KINDS)
        raise ValueError(f"--cells: expected SEQUENCESx[KIND]TOKENS, KIND one of {kinds}; got {cell!r}")
    num_seqs, kind, tokens = match.groups()
    drawn = lengths.drawn(kind or "equal", int(num_seqs), int(tokens))
    name = f"{kind or 's'}{tokens}"
    heads = (sizes["heads"], sizes["kv_heads"], sizes["head_dim"])
    return DecodeCase(drawn, *heads, page_size=sizes["page_size"], lengths=name, spare_pages=0)


def parser() -> Parser:
    made = Parser(prog="tiles.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--cells", nargs="+", metavar="CELL", help="what is timed")
    made.add_argument("--tiles", nargs="*", metavar="TILES", help="beside `auto`")
    made.add_argument("--peers", nargs="*", default=[], metavar="NAME", help="of run.py's --list")
    for name, size in SIZES.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=count, metavar="N", help=f"default: {size}")
    made.add_argument("--rounds", type=count, default=measure.QUICK_ROUNDS, metavar="N", help="of samples")
    made.add_argument("--tiny", action="store_true", help="small pools and, unless given, cells and tiles")
    return made


class Plan(NamedTuple):
    """What is about to be timed."""

    workload: PagedAttention
    cases: list[DecodeCase]
    names: list[str]
    rounds: int


def planned(arguments: argparse.Namespace) -> Plan:
    """ValueError, in one line, where nothing can begin."""
    baselines.search_folders()
    defaults = TINY_SIZES if arguments.tiny else SIZES
    sizes = {name: getattr(arguments, name) or size for name, size in defaults.items()}
    check_heads(sizes["heads"], sizes["kv_heads"])
    cells = arguments.cells or (TINY["cells"] if arguments.tiny else [])
    if not cells:
        raise ValueError("expected --cells, such as 16x1024")
    tiles = TINY["tiles"] if arguments.tiles is None and arguments.tiny else arguments.tiles or []
    cases = [case_of(cell, sizes) for cell in cells]
    for name, case in itertools.product(tiles, cases):
        config_of(case, name)
    workload = workload_of(tiles, arguments.tiny)
    names = [AUTO, *tiles, *arguments.peers]
    known = measure.titles(workload)
    for name in names:
        if name not in known or names.count(name) > 1:
            raise ValueError(f"expected different ones of {', '.join(known)}; got {name!r}")
        if reason := measure.refusal(workload, name):
            raise ValueError(f"{name} cannot run here: {reason}")
    return Plan(workload, cases, names, arguments.rounds)


def timed(plan: Plan, say: Callable[[str], None]) -> Iterator[tuple[DecodeCase, dict[str, Outcome]]]:
    """What became of each name, a case after the other."""
    workload, cases, names, rounds = plan
    todo = [(case, names) for case in cases]
    found = measured(workload, todo, rounds, lambda: False, say, most_rounds=rounds)
    for case, of_case in itertools.groupby(found, key=lambda one: one[0]):
        outcomes = {name: outcome for _, name, outcome in of_case}
        yield case, {name: outcomes[name] for name in names}


def described(case: DecodeCase, outcomes: dict[str, Outcome]) -> str:
    own = median(outcomes[AUTO])
    parts = [f"b{case.num_seqs}-{case.lengths}-q{case.num_heads}kv{case.num_kv_heads}"]
    for name, outcome in outcomes.items():
        if (middle := median(outcome)) is None:
            parts.append(f"{name} no figure: {outcome.note}")
            continue
        least, most = (1e6 * end(outcome.samples) for end in (min, max))
        ratio = "" if own is None or name == AUTO else f" {own / middle:.3f}"
        parts.append(f"{name} {1e6 * middle:.2f} ({least:.2f}-{most:.2f}){ratio}")
    return " | ".join(parts)


def median(outcome: Outcome) -> float | None:
    return results.percentile(outcome.samples, 50) if outcome.samples else None


def main(words: Sequence[str] | None = None) -> int:
    arguments = (options := parser()).parse_args(words)
    try:
        plan = planned(arguments)
    except (ValueError, OSError) as error:
        options.error(" ".join(str(error).split()))
    wrong = False
    with progress.shown(len(plan.cases)) as (advance, say):
        for case, outcomes in timed(plan, say):
            advance(described(case, outcomes))
            wrong |= any(outcome.wrong for outcome in outcomes.values())
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
