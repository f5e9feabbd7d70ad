"""Times attention ops, ours and other projects', on the same cells, each figure checked before it counts.

    python benchmarks/run.py --op paged_attention                     # ours, at the cells of the op's README
    python benchmarks/run.py --op mla_decode --compare --baseline flash_mla --target cuda
    python benchmarks/run.py --op mla_decode --all --quick            # everything that can run here
    python benchmarks/run.py --op mla_decode --list                   # what there is: implementations and cells
    python benchmarks/run.py --op paged_attention --target auto --cells '^b64-.*q32kv8'
    python benchmarks/run.py --op mla_decode --all --batch 128 --seqlens 1024 4096 16384 --heads 16 128
    python benchmarks/run.py --op mla_decode --source ../before --out before.csv     # another checkout of ours
    python benchmarks/run.py --op paged_attention --target auto --out t.csv && \\
        python benchmarks/run.py --op paged_attention --target fa3 flashinfer --out t.csv    # a process for each side
    python benchmarks/run.py --op paged_attention --tiny              # anywhere, to try it

Ours and other JAX functions are timed inside one jitted loop, torch's kernels as replayed CUDA graphs; host time is
in neither. Calls take turns among sets of pages that together are many times the L2, tables are shuffled,
implementations alternate with pauses between them. All rows of a case's first and last call are compared with a
float32 reference in the same process; what is wrong gets no figure, what is faster than the device can be is marked.
In one process with torch's kernels a short call of ours takes a third of a microsecond more, and theirs beside JAX up
to 0.8: short calls want a process for each side.

The table is written row by row. A run that was stopped goes on where it was when started again: rows that the table
already has of the same device, commit and options are kept. `repro` in each row is the command that measures it again.
Then: plot.py draws the table, compare.py tells whether anything became slower, roofline.py measures the roofs alone.

Exit status: 0; 1 when a result was wrong or broken, when what was named has no figure, or when there is no figure at
all; 2 when nothing could begin; 130 when stopped from the keyboard.
"""

import argparse
import itertools
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import baselines
import jax
import measure
import progress
import results
import roofline
import source
from measure import Facts, Outcome
from results import Row
from workloads import WORKLOADS
from workloads.base import Workload

CELLS_A_BATCH = (
    16  # compiled together, before any of them is timed: compiling beside a measurement disturbs it
)


UNKNOWN = "unknown"  # commits: nothing that was measured of one is kept


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def count(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")


def expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, got {text!r}: {error}") from None
    return text


def parser() -> Parser:
    made = Parser(prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--op", choices=list(WORKLOADS), required=True)
    modes = made.add_argument_group("which implementations").add_mutually_exclusive_group()
    modes.add_argument("--one", action="store_true", help="the target alone (what happens without a mode)")
    modes.add_argument(
        "--compare", action="store_true", help="baseline and target, and the ratio of their times"
    )
    modes.add_argument("--all", action="store_true", help="all that can run here; the others with reasons")
    made.add_argument(
        "--target", metavar="NAME", nargs="+", help="default: auto, what a call takes by itself"
    )
    made.add_argument("--baseline", metavar="NAME", help="for --compare; default: xla, our plain jnp")
    cells = made.add_argument_group("which cells")
    cells.add_argument(
        "--cells", type=expression, default="", metavar="REGEX", help="those whose id it finds"
    )
    cells.add_argument(
        "--options",
        action="store_true",
        help="8-bit caches, sparsity, windows beside dense bf16; skewed lengths; other heads and pages",
    )
    cells.add_argument(
        "--tiny",
        action="store_true",
        help="small pools and, unless they are your own, cells: to try the program",
    )
    own = made.add_argument_group("cells of your own, instead")
    own.add_argument("--seqlens", type=count, nargs="+", metavar="N", help="tokens of the first sequence")
    own.add_argument("--batch", type=count, nargs="+", metavar="N", help="sequences; default: 128")
    own.add_argument("--heads", type=count, nargs="+", metavar="N", help="default: 128")
    own.add_argument("--kv-heads", type=count, metavar="N", help="default: 1 for MLA, else as many as heads")
    own.add_argument("--q-len", type=count, metavar="N", help="query tokens a sequence; default: 1")
    how = made.add_argument_group("how")
    how.add_argument(
        "--quick",
        action="store_true",
        help=f"at least {measure.QUICK_ROUNDS} rounds of bursts, not {measure.ROUNDS}",
    )
    how.add_argument("--fresh", action="store_true", help="measure rows again that the table already has")
    how.add_argument(
        "--max-seconds", type=float, default=float("inf"), metavar="S", help="begin no cell later"
    )
    how.add_argument("--source", type=Path, metavar="DIR", help="measure the pallas_attn of another checkout")
    how.add_argument("--commit", metavar="NAME", help="for the table, where git cannot tell")
    out = made.add_argument_group("results")
    out.add_argument("--out", type=Path, metavar="FILE", help="the table; default: <op>.csv")
    out.add_argument(
        "--export-bw", type=Path, metavar="FILE", help=f"also {','.join(results.BANDWIDTH_COLUMNS)}"
    )
    out.add_argument("--tell-cases", action="store_true", help=argparse.SUPPRESS)  # see source.py
    out.add_argument("--list", action="store_true", help="what there is to measure; measures nothing")
    return made


def check_heads(heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise ValueError(f"--heads: expected a multiple of --kv-heads, {kv_heads}; got {heads}")


def cases_of(workload: Workload, arguments: argparse.Namespace) -> list[Any]:
    """ValueError where nothing is meant, or something that there is not."""
    own = ("batch", "seqlens", "heads", "kv_heads", "q_len")
    given = [name for name in own if getattr(arguments, name) is not None]
    listed = [f"--{name}" for name in ("cells", "options") if getattr(arguments, name)]
    if given:
        if listed:
            raise ValueError(
                f"expected cells from the list ({listed[0]}) or your own (--{given[0]}), got both"
            )
        if arguments.seqlens is None:
            raise ValueError(f"expected --seqlens with --{given[0].replace('_', '-')}")
        for heads in arguments.heads or [128]:
            check_heads(heads, arguments.kv_heads or 1)
        sizes = itertools.product(arguments.batch or [128], arguments.heads or [128], arguments.seqlens)
        found = [
            workload.made(batch, seqlen, heads, arguments.kv_heads, arguments.q_len or 1)
            for batch, heads, seqlen in sizes
        ]
        if min(min(case.seq_lens) for case in found) < (arguments.q_len or 1):
            raise ValueError(f"--q-len: expected at most the shortest of --seqlens, got {arguments.q_len}")
        return found
    listing = workload.tiny if arguments.tiny else workload.options if arguments.options else workload.cells
    everything = listing()
    if not everything:
        raise ValueError(f"--options: {workload.op} has no cells of this kind")
    found = [case for case in everything if re.search(arguments.cells, case.id)]
    if not found:
        ids = [case.id for case in everything]
        shown = ", ".join(ids[:6]) + (f" and {len(ids) - 6} more (--list)" if len(ids) > 6 else "")
        raise ValueError(f"--cells: expected to find some of {shown}; got {arguments.cells!r}")
    return found


def case_options(arguments: argparse.Namespace) -> list[str]:
    """The part of the command line that says which cells."""
    words = ["--op", arguments.op, *(f"--{name}" for name in ("options", "tiny") if getattr(arguments, name))]
    for name in ("cells", "batch", "seqlens", "heads", "kv_heads", "q_len"):
        if value := getattr(arguments, name):
            values = value if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words


def names_of(workload: Workload, arguments: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """(implementations to measure, {one that cannot run here: why}). ValueError for a named one that cannot."""
    known = measure.titles(workload)
    asked = [*(arguments.target or []), *([arguments.baseline] if arguments.baseline else [])]
    for name in asked:
        if name not in known:
            raise ValueError(
                f"expected an implementation of {workload.op}, one of {', '.join(known)}; got {name!r}"
            )
    if arguments.all:
        if asked:
            raise ValueError("--all takes everything: expected no --target and no --baseline with it")
        reasons = {name: measure.refusal(workload, name) for name in known if name != "auto"}
        return [n for n, why in reasons.items() if not why], {n: why for n, why in reasons.items() if why}
    if arguments.baseline and not arguments.compare:
        raise ValueError("--baseline is for --compare")
    names = arguments.target or ["auto"]
    if arguments.compare:
        names = [arguments.baseline or "xla", *names]
    if len(set(names)) < len(names):
        raise ValueError(f"expected different implementations, got {' '.join(names)}")
    for name in names:
        if reason := measure.refusal(workload, name):
            raise ValueError(f"{name} cannot run here: {reason}")
    return names, {}


def facts_of(arguments: argparse.Namespace) -> Facts:
    commit = arguments.commit or source.commit(arguments.source or source.ROOT) or UNKNOWN
    options = " ".join(option for option in ("quick", "tiny") if getattr(arguments, option))
    device = jax.devices()[0].device_kind
    return Facts(device, driver(), jax.__version__, version("torch"), commit, options, None)


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


class Table:
    """The rows of a file, which is written anew after each."""

    def __init__(self, path: Path, fresh: bool):
        self.path = path
        self.rows = results.read(path) if path.exists() else []
        self._fresh = fresh
        self.written: list[Row] = []

    def holds(self, facts: Facts, *cell: str) -> bool:
        """Whether a right figure of this op, case and implementation need not be measured again."""
        known = {row.key for row in self.rows if row.ok}
        return not self._fresh and facts.commit != UNKNOWN and (*facts.place, *cell) in known

    def add(self, row: Row) -> None:
        self.rows = results.with_row(self.rows, row)
        self.written.append(row)
        results.write(self.path, self.rows)


def with_roof(facts: Facts, table: Table, arguments: argparse.Namespace) -> Facts:
    """Measures the roofs, unless the table has them of this device and commit."""
    if not table.holds(facts, roofline.OP, roofline.PRODUCT, roofline.IMPLEMENTATION):
        small = arguments.tiny or jax.default_backend() != "gpu"
        sizes = roofline.SMALL if small else roofline.Sizes()
        for row in measure.roof_rows(facts, sizes, measure.QUICK_ROUNDS, "python benchmarks/roofline.py"):
            table.add(row)
    own = [row for row in table.rows if row.op == roofline.OP and row.place == facts.place and row.ok]
    return facts._replace(roof=roofline.of((row.case, row.tflops, row.gbs) for row in own))


def repro(arguments: argparse.Namespace, case: Any, name: str, made: bool) -> str:
    words = ["python", "benchmarks/run.py", "--op", arguments.op, "--target", name]
    if made:
        words += ["--batch", str(case.num_seqs), "--seqlens", str(min(case.seq_lens))]
        words += ["--heads", str(case.num_heads), "--kv-heads", str(case.num_kv_heads)]
        words += ["--q-len", str(case.q_len)]
    else:
        words += ["--cells", f"^{re.escape(case.id)}$".replace("\\-", "-")]
    words += [f"--{option}" for option in ("options", "tiny", "quick") if getattr(arguments, option)]
    for option in ("source", "commit"):
        if value := getattr(arguments, option):
            words += [f"--{option}", str(value)]
    return shlex.join([*words, "--fresh"])


def batches(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for first in range(0, len(items), CELLS_A_BATCH):
        yield items[first : first + CELLS_A_BATCH]


def measured(
    workload: Workload,
    todo: Sequence[tuple[Any, list[str]]],
    rounds: int,
    late: Callable[[], bool],
    say: Callable[[str], None],
    most_rounds: int | None = None,
) -> Iterator[tuple[Any, str, Outcome]]:
    """(case, implementation, what became of it), as they come: a case after the other."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for batch in batches(todo):
            if late():
                return
            say(f"compiling for {len(batch)} cells")
            compiling = [measure.candidates(workload, case, names, pool) for case, names in batch]
            futures = [f for found, _ in compiling for c in found for f in (*c.compiled.values(), c.expected)]
            for future in futures:
                future.exception()  # waits; what failed is told where it is used
            for (case, _), (found, refused) in zip(batch, compiling, strict=True):
                if late():
                    return
                yield from ((case, name, outcome) for name, outcome in refused.items())
                for name, outcome in measure.outcomes(workload, case, found, rounds, most_rounds):
                    yield case, name, outcome


def described(row: Row) -> str:
    line = f"{row.case:32} {row.implementation:30}"
    if row.median_us is None:
        return f"{line} no figure: {row.note}"
    share = "" if row.roof_percent is None else f" {row.roof_percent:5.1f}% of the roof"
    peak = "" if row.peak_mib is None else f" {row.peak_mib:8.1f} MiB"
    figures = f"{row.median_us:10.2f} us {row.tflops:7.1f} TFLOPS {row.gbs:6.0f} GB/s{share}{peak}"
    return f"{line}{figures} {row.note}".rstrip()


def ratios(rows: Iterable[Row], baseline: str, targets: Sequence[str]) -> Iterator[str]:
    """Lines that set targets against a baseline."""
    found = {(row.case, row.implementation): row.median_us for row in rows if row.ok and row.median_us}
    for (case, implementation), target in found.items():
        if implementation in targets and (base := found.get((case, baseline))):
            yield f"{case:32} {implementation}: {base / target:.3f} x {baseline}"


def tell(workload: Workload, cases: Sequence[Any]) -> None:
    print("implementations")
    for name, title in measure.titles(workload).items():
        print(f"  {name:20}{title:34}{measure.refusal(workload, name) or ''}".rstrip())
    print(f"{len(cases)} cells")
    for case in cases:
        print(f"  {case.id}")


class Plan(NamedTuple):
    """What a run is about to do."""

    arguments: argparse.Namespace
    workload: Workload
    cases: Sequence[Any]
    names: Sequence[str]
    """Of implementations."""
    refused: dict[str, str]
    table: Table


def planned(arguments: argparse.Namespace) -> Plan:
    """ValueError or OSError, in one line, where nothing can begin."""
    baselines.search_folders()
    library = source.load(arguments.source)
    workload = WORKLOADS[arguments.op](library, arguments.tiny)
    if arguments.source:
        cases = source.cases_of_this_checkout(case_options(arguments), library)
    else:
        cases = cases_of(workload, arguments)
    names, refused = ([], {}) if arguments.list else names_of(workload, arguments)
    table = Table(arguments.out or Path(f"{arguments.op}.csv"), arguments.fresh)
    if not arguments.list:
        results.write(table.path, table.rows)  # what cannot be written is said before anything is measured
    return Plan(arguments, workload, cases, names, refused, table)


def run(plan: Plan) -> int:
    """The exit status."""
    arguments, workload, cases, _, refused, table = plan
    if arguments.list:
        tell(workload, cases)
        return 0
    for name, reason in refused.items():
        print(f"{name} cannot run here: {reason}")
    start = time.monotonic()
    try:
        facts = with_roof(facts_of(arguments), table, arguments)
        failed = filled(plan, facts, lambda: time.monotonic() - start > arguments.max_seconds)
    except KeyboardInterrupt:
        print(
            f"\nstopped: {len(table.written)} rows are new in {table.path}; the same command goes on from there"
        )
        return 130
    return finished(plan, facts, failed)


def filled(plan: Plan, facts: Facts, late: Callable[[], bool]) -> bool:
    """Measures what the table lacks; whether something was wrong or broken."""
    arguments, workload, cases, names, _, table = plan
    titles = measure.titles(workload)
    todo = [
        (case, own)
        for case in cases
        if (own := [name for name in names if not table.holds(facts, arguments.op, case.id, titles[name])])
    ]
    total, left = len(cases) * len(names), sum(len(own) for _, own in todo)
    kept = f", {total - left} kept" if left < total else ""
    print(f"{len(cases)} cells x {len(names)} implementations{kept}")
    failed = False
    with progress.shown(left) as (advance, say):
        for case, name, outcome in measured(workload, todo, rounds_of(arguments), late, say):
            again = repro(arguments, case, name, made=arguments.seqlens is not None)
            row = measure.row_of(facts, workload, case, name, outcome, again)
            table.add(row)
            failed |= outcome.wrong or (row.median_us is not None and not row.ok)
            advance(described(row))
    return failed


def rounds_of(arguments: argparse.Namespace) -> int:
    return measure.QUICK_ROUNDS if arguments.quick else measure.ROUNDS


def finished(plan: Plan, facts: Facts, failed: bool) -> int:
    """Sums up; the exit status."""
    arguments, workload, cases, names, _, table = plan
    titles = measure.titles(workload)
    ids = {case.id for case in cases}
    known = [row for row in table.rows if row.place == facts.place and row.op == arguments.op]
    own = [row for row in known if row.case in ids]
    right = {(row.case, row.implementation) for row in own if row.ok}
    if arguments.compare:
        baseline, *targets = (titles[name] for name in names)
        print(*ratios(own, baseline, targets), sep="\n")
    if arguments.export_bw:
        results.write_bandwidths(arguments.export_bw, own, {title: name for name, title in titles.items()})
    missing = [(i, titles[name]) for i in ids for name in names if (i, titles[name]) not in right]
    print(f"{len(right)} right figures in {table.path}" + (f", {len(missing)} missing" if missing else ""))
    named_is_missing = bool(missing) and not arguments.all
    return 1 if failed or not right or named_is_missing else 0


def main(command_line: Sequence[str] | None = None) -> int:
    arguments = (options := parser()).parse_args(command_line)
    try:
        if arguments.tell_cases:
            workload = WORKLOADS[arguments.op](source.load(None), arguments.tiny)
            print(source.told(cases_of(workload, arguments)))
            return 0
        plan = planned(arguments)
    except (ValueError, OSError) as error:
        options.error(" ".join(str(error).split()))
    return run(plan)


if __name__ == "__main__":
    sys.exit(main())
