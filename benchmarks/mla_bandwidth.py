"""Bandwidth of MLA decoding over sequence length, implementations side by side: a CSV file and, with --plot, a plot.

    python benchmarks/mla_bandwidth.py                                      # one: the best of ours that can run here
    python benchmarks/mla_bandwidth.py --compare --baseline flash_mla --target cuda
    python benchmarks/mla_bandwidth.py --all --plot                         # everything that can run here
    python benchmarks/mla_bandwidth.py --all --batch 64 --seqlens 1024 8192 --heads 16 64 --q-len 2

Ours: `cuda` and `pallas` with a schedule made beforehand, `grid` (pallas without one), `xla` (plain jnp); timed inside
one jitted loop. Others, where torch and their packages are installed: `flash_mla` (package flash_mla), `flash_infer`
(package flashinfer, its Hopper kernel); timed as replayed CUDA graphs on the same arrays.

Shapes are FlashMLA's: 128 requests, one query token each, 128 heads, bf16, pages of 64, and request i has
seqlen + 2 i tokens. Page sets in rotation that together are larger than the L2, shuffled tables. The first and the last
request's output for the first and the last table are compared with a float32 reference before a figure is written.

The file has the columns name, batch, seqlen (the mean length), head, bw (GB/s: cache, query and output once).
Exit codes: 0; 1 when a result was wrong, two that are compared disagreed, a figure asked for by name is missing, or
there is no figure at all; 2 when nothing could begin: a named implementation cannot run here, the file cannot be
written, an option is not understood.
"""

import argparse
import contextlib
import csv
import functools
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

import baselines
import mla_decode
import numpy as np
from mla_decode import LARGEST_ERROR, WAYS, Inputs, Shape, expected_ends, inputs_of, worst_error

import pallas_attn
from pallas_attn.testing.compare import row_errors

NAMES = [*WAYS, *baselines.PACKAGES]
COLUMNS = ["name", "batch", "seqlen", "head", "bw"]
SEQLENS = [1024, 2048, 4096, 8192, 16384, 32768]
PAGE = 64
PLOT_NEEDS = ("pandas", "matplotlib")
TOLERANCE = 1e-2  # between two outputs that are compared: absolute, relative, and of a row's norm
SLOW_REPEATS = 1  # of xla, which takes tens of times as long as a kernel


class Runner(NamedTuple):
    """An implementation, ready to run on the inputs of one shape."""

    outputs: Callable[[], list[np.ndarray]]
    """Float32, for the first and for the last table."""
    microseconds: Callable[[], float]
    """Of one call."""


class Failure(NamedTuple):
    """Why there is no figure."""

    reason: str
    wrong: bool = False


def refusal(name: str) -> str | None:
    """Why an implementation cannot run here; None if it can."""
    if name in baselines.PACKAGES:
        return baselines.refusal(name)
    return pallas_attn.available_implementations()["mla_decode"][WAYS[name][0]]


def shape_of(batch: int, seqlen: int, heads: int, q_len: int) -> Shape:
    lengths = tuple(seqlen + 2 * i for i in range(batch))
    return Shape(f"b{batch}-s{seqlen}-h{heads}-q{q_len}", lengths, heads, q_len, PAGE)


def mean_length(shape: Shape) -> int:
    return round(sum(shape.lengths) / len(shape.lengths))


def our_runner(name: str, shape: Shape, inputs: Inputs) -> Runner:
    built, schedule = mla_decode.build(shape, name)
    run = functools.partial(built, inputs, schedule)

    def microseconds() -> float:
        mla_decode.warm_up(run)
        return mla_decode.microseconds(shape, run, *([SLOW_REPEATS] if name == "xla" else []))

    return Runner(lambda: [np.asarray(out, np.float32) for out in run()], microseconds)


def peer_runner(name: str, shape: Shape, inputs: Inputs) -> Runner:
    import cuda_graphs  # imports torch, which ours do without

    call = baselines.prepare(name, baselines.tensors(inputs))
    return Runner(
        lambda: [call(i).float().cpu().numpy() for i in (0, shape.num_sets - 1)],
        lambda: cuda_graphs.microseconds(call, shape.num_sets),
    )


def out_of_memory(error: Exception) -> bool:
    return any(words in str(error) for words in ("RESOURCE_EXHAUSTED", "out of memory"))


def failure(name: str, error: Exception) -> Failure:
    """Of an implementation at one shape. Raises the error if it is none to be expected."""
    if out_of_memory(error):
        return Failure("out of memory")
    if name in baselines.PACKAGES:
        return Failure(f"{type(error).__name__}: {baselines.first_line(error)}")
    if "cannot serve this call" in str(error):
        return Failure(baselines.first_line(error))
    raise error


def disagreement(names: Sequence[str], first: np.ndarray, second: np.ndarray) -> str | None:
    """How two outputs differ, if by more than TOLERANCE. Of rows too: those of long sequences are all small numbers."""
    far = ~np.isclose(second, first, rtol=TOLERANCE, atol=TOLERANCE)
    of_rows = row_errors(second, first)
    if not far.any() and (of_rows <= TOLERANCE).all():
        return None
    return (
        f"{' and '.join(names)} disagree: {far.sum()} of {far.size} elements by more than {TOLERANCE} + {TOLERANCE} "
        f"of their size, rows by up to {of_rows.max():.1e} of their norm, expected at most {TOLERANCE}"
    )


def measured_together(
    shape: Shape, names: Sequence[str], inputs: Inputs, expected: Sequence[np.ndarray]
) -> Iterator[tuple[str, float | Failure]]:
    """(name, microseconds of a call or why not) of each, whose outputs have to agree if there are two."""
    runners, outputs = {}, {}
    for name in names:
        try:
            runner = (peer_runner if name in baselines.PACKAGES else our_runner)(name, shape, inputs)
            outs = runner.outputs()
        except Exception as error:
            yield name, failure(name, error)
            continue
        off = worst_error([out[[0, -1]] for out in outs], expected)
        if off <= LARGEST_ERROR:
            runners[name], outputs[name] = runner, outs
        else:
            reason = f"WRONG by {off:.1e} against the float32 reference, expected at most {LARGEST_ERROR}"
            yield name, Failure(reason, wrong=True)
    if len(outputs) == 2:
        reasons = [disagreement(list(outputs), *outs) for outs in zip(*outputs.values(), strict=True)]
        if reason := reasons[0] or reasons[1]:
            yield from ((name, Failure(reason, wrong=True)) for name in runners)
            return
    for name, runner in runners.items():
        try:
            yield name, runner.microseconds()
        except Exception as error:
            yield name, failure(name, error)


def measured(shape: Shape, groups: Sequence[Sequence[str]]) -> Iterator[tuple[str, float | Failure]]:
    """(name, microseconds of a call or why not) of all, where those of a group have to agree."""
    try:
        inputs = inputs_of(shape)
        expected = expected_ends(shape, inputs)
    except Exception as error:
        if not out_of_memory(error):
            raise
        for name in itertools.chain(*groups):
            yield name, Failure("out of memory for the inputs")
        return
    for names in groups:
        yield from measured_together(shape, names, inputs, expected)


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """advance(what was measured), shown as a bar on a terminal where rich is installed."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda what: None
        return
    from rich.progress import Progress

    # Drawn between measurements only: a thread that draws beside them would disturb them.
    with Progress(transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=total)
        yield lambda what: bar.update(task, advance=1, description=what, refresh=True)


def write(
    file: TextIO, shapes: Sequence[Shape], groups: Sequence[Sequence[str]]
) -> tuple[int, list[Failure]]:
    """Measures, prints and writes row by row. (number of rows, failures)."""
    rows, failures = 0, []
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    with progress(len(shapes) * sum(map(len, groups))) as advance:
        for shape in shapes:
            flops, num_bytes = shape.work()
            about = [len(shape.lengths), mean_length(shape), shape.heads]
            for name, result in measured(shape, groups):
                line = f"{name:12}seqlen {mean_length(shape):<6} head {shape.heads:<4}"
                if isinstance(result, Failure):
                    failures.append(result)
                    print(f"{line} no figure: {result.reason}", flush=True)
                else:
                    us, tflops, bandwidth = result, flops / result / 1e6, num_bytes / result / 1e3
                    writer.writerow([name, *about, f"{bandwidth:.0f}"])
                    file.flush()
                    rows += 1
                    print(f"{line}{us:10.1f} us {tflops:6.0f} TFLOPS {bandwidth:6.0f} GB/s", flush=True)
                advance(f"{name} {shape.id}")
    return rows, failures


def count(text: str) -> int:
    """A whole number above 0, for argparse."""
    with contextlib.suppress(ValueError):
        if (number := int(text)) > 0:
            return number
    raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--one", action="store_true", help="only the target (what happens without a mode)")
    modes.add_argument("--compare", action="store_true", help="baseline and target, which have to agree")
    modes.add_argument("--all", action="store_true", help="all that can run here; the others with reasons")
    parser.add_argument(
        "--baseline",
        choices=NAMES,
        help="for --compare (default: xla)",
    )
    parser.add_argument(
        "--target", choices=NAMES, help="default: the first of cuda, pallas and xla that can run here"
    )
    shapes = parser.add_argument_group("shapes")
    shapes.add_argument("--batch", type=count, default=128, help="requests (default: 128)")
    shapes.add_argument(
        "--seqlens",
        type=count,
        nargs="+",
        default=SEQLENS,
        metavar="N",
        help=f"tokens of the first request, each further one has two more (default: {' '.join(map(str, SEQLENS))})",
    )
    shapes.add_argument("--heads", type=count, nargs="+", default=[128], metavar="N", help="default: 128")
    shapes.add_argument(
        "--q-len", type=count, default=1, metavar="N", help="query tokens a request (default: 1)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="CSV (default: all_perf.csv, <target>_perf.csv or <baseline>_vs_<target>_perf.csv)",
    )
    parser.add_argument("--plot", action="store_true", help="draw the CSV right after, as plot.py does")
    return parser


def runnable(arguments: argparse.Namespace) -> tuple[list[list[str]], str]:
    """(names in groups that have to agree, what the CSV is named after). ValueError for a name that cannot run here."""
    if arguments.all:
        reasons = {name: refusal(name) for name in NAMES}
        for name, reason in reasons.items():
            if reason:
                print(f"{name:12}cannot run here: {reason}")
        return [[name] for name, reason in reasons.items() if reason is None], "all"
    target = arguments.target or next(name for name in ("cuda", "pallas", "xla") if refusal(name) is None)
    names = [arguments.baseline or "xla", target] if arguments.compare else [target]
    if len(set(names)) < len(names):
        raise ValueError(f"--compare: expected two implementations, got {target} as baseline and as target")
    for name in names:
        if reason := refusal(name):
            raise ValueError(f"{name} cannot run here: {reason}")
    return [names], "_vs_".join(names)


def main(command_line: Sequence[str] | None = None) -> int:
    """The exit code."""
    options = parser()
    arguments = options.parse_args(command_line)
    shortest, lacking = min(arguments.seqlens), [p for p in PLOT_NEEDS if not importlib.util.find_spec(p)]
    if arguments.baseline and not arguments.compare:
        options.error("--baseline is for --compare")
    if arguments.target and arguments.all:
        options.error("--target is for --one and --compare, --all takes everything")
    if shortest < arguments.q_len:
        options.error(
            f"--q-len: expected at most the shortest of --seqlens, {shortest}, got {arguments.q_len}"
        )
    if arguments.plot and lacking:
        options.error(f"--plot needs {' and '.join(lacking)}: pip install 'pallas-attn[bench]'")
    sizes = itertools.product(arguments.heads, arguments.seqlens)
    shapes = [shape_of(arguments.batch, seqlen, heads, arguments.q_len) for heads, seqlen in sizes]

    try:
        groups, stem = runnable(arguments)
        out = arguments.out or Path(f"{stem}_perf.csv")
        file = out.open("w", newline="")
    except (ValueError, OSError) as error:
        options.exit(2, f"{options.prog}: {error}\n")
    with file:
        rows, failures = write(file, shapes, groups)
    print(f"{rows} rows in {out}")
    if arguments.plot and rows:
        import plot

        plot.main([str(out)])
    bad = any(failure.wrong for failure in failures) or (failures and not arguments.all) or not rows
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
