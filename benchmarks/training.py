"""Trains a decoder on packed documents by several attentions, side by side.

    python benchmarks/training.py                  # one step of 1.0e9 weights at 8192 tokens: tokens a second
    python benchmarks/training.py --losses         # 100 steps of a small model by each, from two seeds; a picture
    python benchmarks/training.py --bits           # hashes of seeded gradients, 20 runs
    python benchmarks/training.py --attention --length 32768 --documents 64     # a layer's attention alone
    python benchmarks/training.py --attention --length 32768 --documents 64 --equal   # beside a dense batch
    python benchmarks/training.py --tiny --losses  # anywhere, in seconds, to try it

A row is filled with documents of lognormal lengths, each of which attends to itself alone, causally. Ours are told of
them by `cu_q_lens`, or by `segment_ids` (names that end in -ids). cuDNN can be told in three ways: by offsets, which
only a private function of jax takes (cudnn-packed); each document as a row as long as the longest (cudnn-padded); by a
mask (cudnn-mask). cudnn-whole is not told: what it does costs something else and trains another model.

How it measures: all attentions are compiled first, and make a step from the same weights; one whose loss, or whose norm
of the gradients that come through attention, is not the first one's is WRONG, and is not timed. Then they take turns,
round by round, each second round in reverse; what is printed is the median, with the least and the most, and the median
of each round's ratio to the first attention. Clocks are read while a step runs. `--losses` fails (exit status 1) where
two attentions with one seed are further apart than two seeds with one attention. Memory is what XLA plans for a step:
weights, moments, and all that lives at once.

BENCH_PEERS names folders where FlashAttention-3 for JAX (fa3) is looked for, too: package dew_flash_attn.
"""

import argparse
import functools
import hashlib
import itertools
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attentions
import baselines
import decoder
import jax
import jax.numpy as jnp
import losses
import numpy as np
import progress
from attentions import Attention
from decoder import Batch, Sizes

GIB = 1 << 30
FULL_STEPS = 1000  # that the learning rate of timed steps is chosen for: it is small in the first ones
APART = 0.02  # of loss and norm of gradients, in a first step
ERROR = 2e-2  # of out and gradients, in norm, of --attention
RUNS = 20  # of --bits
CALLS = 10  # in a burst of --attention
DEFAULTS = {
    "step": ("auto", "auto-ids", "cuda-backward", "pallas", "xla", "cudnn-packed", "cudnn-padded", "cudnn-whole"),
    "losses": ("xla", "auto", "cuda-backward", "pallas", "cudnn-packed"),
    "bits": ("auto", "auto-ids", "cuda-backward", "pallas", "cudnn-packed"),
    "attention": (
        *("auto", "auto-ids", "cuda-backward", "cuda-backward-ids", "pallas"),
        *("cudnn-packed", "cudnn-padded", "cudnn-mask", "fa3", "dense", "cudnn-dense"),
    ),
}  # fmt: skip
ON_CPU = ("xla", "xla-ids", "jax-xla")
Say = Callable[[str], None]


def card() -> str:
    """The card and the clocks it runs at now, as nvidia-smi has them."""
    query = [
        "nvidia-smi",
        "--query-gpu=name,clocks.sm,clocks.mem,power.draw",
        "--format=csv,noheader",
        "--id=0",
    ]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return jax.devices()[0].device_kind


def explained(attention: Attention, error: Exception) -> str:
    """Why an attention has no figure; raises the error if it is none to be expected of it."""
    text = str(error).strip()
    if any(words in text for words in ("RESOURCE_EXHAUSTED", "out of memory")):
        return "out of memory"
    if attention.ours and "cannot serve this call" not in text:
        raise error
    return f"{type(error).__name__}: {text.partition(chr(10))[0]}"[:160]


def built[T](
    chosen: dict[str, Attention], build: Callable[[Attention], T], advance: Say
) -> tuple[dict[str, T], dict[str, str]]:
    """What each attention's is, and why others have none."""
    made: dict[str, T] = {}
    refused: dict[str, str] = {}
    for name, attention in chosen.items():
        began = time.perf_counter()
        try:
            made[name] = build(attention)
        except Exception as error:
            refused[name] = explained(attention, error)
        outcome = refused.get(name, f"compiled in {time.perf_counter() - began:.1f} s")
        advance(f"{name}: {outcome}")
    return made, refused


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    for number in range(rounds):
        for name in names[:: -1 if number % 2 else 1]:
            yield number, name


def spread(samples: Sequence[float], of: Callable[[float], float], spec: str) -> str:
    """The median, and between which numbers all are."""
    numbers = sorted(map(of, samples))
    return f"{statistics.median(numbers):{spec}} ({numbers[0]:{spec}} to {numbers[-1]:{spec}})"


def ratio(first: Sequence[float], own: Sequence[float]) -> str:
    return f"{statistics.median(a / b for a, b in zip(first, own, strict=True)):.3f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]
    ]
    return "\n".join(line.rstrip() for line in lines)


def timed_steps(
    chosen: dict[str, Attention], sizes: Sizes, batches: list[Batch], options: argparse.Namespace
) -> tuple[str, bool]:
    """The table, and whether all that ran were right."""
    batches = jax.device_put(batches)
    with progress.shown(len(chosen) * (2 + options.rounds)) as (advance, _):
        build = functools.partial(
            decoder.compiled_step, sizes, steps=FULL_STEPS, batch=batches[0], remat=options.remat
        )
        programs, refused = built(chosen, lambda attention: build(attend=attention.attend), advance)
        first: dict[str, np.ndarray] = {}
        for name in list(programs):
            try:
                _, value = programs[name](decoder.start(sizes, 0), batches[0])
                first[name] = np.asarray(value)
            except Exception as error:
                refused[name] = explained(chosen[name], error)
                del programs[name]
            found = "loss {:.4f}, attention's gradients {:.4f}".format(*first.get(name, (0, 0)))
            advance(f"{name}: {refused.get(name, found)}")
        right = next((first[name] for name in programs if chosen[name].keeps_apart), None)
        for name in list(programs):
            if right is None or not chosen[name].keeps_apart:
                continue
            if not np.allclose(first[name], right, rtol=APART, atol=0):
                refused[name] = f"WRONG: loss and attention's gradients {first[name]} beside {right}"
                del programs[name]
        samples: dict[str, list[float]] = {name: [] for name in programs}
        state = decoder.start(sizes, 0)
        for number, name in turns(list(programs), options.rounds):
            state, value = programs[name](state, batches[0])  # whose end nobody times
            clocks = card()
            jax.block_until_ready(value)
            began = time.perf_counter()
            for i in range(options.steps):
                state, value = programs[name](state, batches[i % len(batches)])
            jax.block_until_ready(value)
            samples[name].append((time.perf_counter() - began) / options.steps)
            advance(f"round {number + 1}, {name}: {samples[name][-1] * 1e3:.1f} ms; {clocks}")
    head = ("attention", "documents by", "tokens/s", "ms a step", "ratio", "GiB", "")
    reference = next(iter(samples.values()), [])
    rows = []
    for name, attention in chosen.items():
        if name in refused:
            rows.append((attention.title, attention.documents, "", "", "", "", refused[name]))
            continue
        own, peak = samples[name], decoder.peak_bytes(programs[name])
        rows.append((
            attention.title, attention.documents, spread(own, lambda s: sizes.tokens / s, ",.0f"),
            spread(own, lambda s: s * 1e3, ".1f"), ratio(reference, own),
            "" if peak is None else f"{peak / GIB:.1f}", "",
        ))  # fmt: skip
    return table(head, rows), not any(reason.startswith("WRONG") for reason in refused.values())


def train(chosen: dict[str, Attention], sizes: Sizes, options: argparse.Namespace) -> bool:
    """Whether attentions agree; the losses go to a file, and a picture beside it."""
    curves: losses.Curves = {}
    device = jax.devices()[0].device_kind
    about = f"{decoder.count(sizes) / 1e6:.1f} million weights, {sizes.tokens} tokens a step, {device}"
    by_seed = {seed: decoder.batches(options.steps, sizes, seed) for seed in options.seeds}
    with progress.shown(len(chosen) * (1 + len(by_seed))) as (advance, _):
        batch = by_seed[options.seeds[0]][0]
        build = functools.partial(
            decoder.compiled_step, sizes, steps=options.steps, batch=batch, remat=options.remat
        )
        programs, _ = built(chosen, lambda attention: build(attend=attention.attend), advance)
        for seed, name in itertools.product(by_seed, programs):
            curve = curves[name, seed] = losses.trained(programs[name], sizes, by_seed[seed], seed)
            losses.save(options.out, curves)
            last = np.mean(curve[-losses.AVERAGED :])
            advance(f"{name}, seed {seed}: loss {curve[0]:.4f} -> {last:.4f}")
    try:
        losses.draw(options.out.with_suffix(".png"), curves, about, lambda name: chosen[name].title)
    except ImportError as error:
        print(f"no picture: {error}; where there is matplotlib: training.py --draw {options.out}")
    if min(len(programs), len(by_seed)) < 2:
        print("nothing to compare: that takes two attentions and two seeds")
        return False
    between, noise = losses.compared(curves)
    agree = between < noise
    print(
        f"between attentions {between:.5f}, between seeds {noise:.5f}: {'they agree' if agree else 'THEY DIFFER'}"
    )
    return agree


def attended(sizes: Sizes) -> tuple[jax.Array, ...]:
    """Seeded query, key, value and gradient of out, of a layer's attention."""
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)
    keys = jax.random.split(jax.random.key(0), len(heads))
    shape = (sizes.rows, sizes.length)
    return tuple(
        jax.random.normal(key, (*shape, n, sizes.head_dim), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    )


def both(attend: decoder.Attend, query, key, value, d_out, documents) -> tuple[jax.Array, ...]:
    """Out, and the three gradients."""
    out, pull = jax.vjp(lambda *x: attend(x[0], x[1], x[2], documents), query, key, value)
    return out, *pull(d_out.astype(out.dtype))


def hashed(chosen: dict[str, Attention], sizes: Sizes, documents: decoder.Documents) -> bool:
    """Prints a hash for each attention; whether ours were the same in all runs."""
    given, same = attended(sizes), True
    with progress.shown(2 * len(chosen)) as (advance, _):
        programs, _ = built(
            chosen,
            lambda one: jax.jit(functools.partial(both, one.attend)).lower(*given, documents).compile(),
            advance,
        )
        for name, program in programs.items():
            counts: dict[str, int] = {}
            for _ in range(RUNS):
                digest = hashlib.sha256()
                for array in program(*given, documents):
                    digest.update(np.asarray(array).tobytes())
                counts[digest.hexdigest()[:16]] = counts.get(digest.hexdigest()[:16], 0) + 1
            usual = max(counts, key=lambda one: counts[one])
            same &= len(counts) == 1 or not chosen[name].ours
            advance(f"{name}: {usual}, {counts[usual]} of {RUNS} runs")
    return same


def timed_attention(
    chosen: dict[str, Attention], sizes: Sizes, documents: decoder.Documents, options: argparse.Namespace
) -> tuple[str, bool]:
    """Forward, and forward and backward: the table, and whether all that ran were right."""
    given = attended(sizes)
    documents = jax.device_put(documents)
    expected = jax.jit(functools.partial(both, attentions.known(sizes.length)["xla"].attend))(
        *(x.astype(jnp.float32) for x in given), documents
    )

    def build(one: Attention) -> tuple[Any, Any]:
        forward = jax.jit(one.attend).lower(*given[:3], documents).compile()
        whole = jax.jit(functools.partial(both, one.attend)).lower(*given, documents).compile()
        for got, right in zip(whole(*given, documents), expected, strict=True):
            apart = jnp.linalg.norm((got - right).reshape(-1)) / jnp.linalg.norm(right.reshape(-1))
            if not apart <= ERROR:
                raise ArithmeticError(f"WRONG: a gradient or out is off by {apart:.1e}")
        return functools.partial(forward, *given[:3], documents), functools.partial(whole, *given, documents)

    def burst(run: Callable[[], Any]) -> float:
        jax.block_until_ready(run())
        began = time.perf_counter()
        jax.block_until_ready([run() for _ in range(options.steps)][-1])
        return (time.perf_counter() - began) / options.steps

    with progress.shown(len(chosen) * (1 + options.rounds)) as (advance, _):
        programs, refused = built(chosen, build, advance)
        samples: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in programs}
        for number, name in turns(list(programs), options.rounds):
            for kept, run in zip(samples[name], programs[name], strict=True):
                kept.append(burst(run))
            took = " and ".join(f"{kept[-1] * 1e6:.0f}" for kept in samples[name])
            advance(f"round {number + 1}, {name}: {took} us")
    lens = np.asarray(documents.sizes, np.float64)
    flops = 4 * sizes.heads * sizes.head_dim * float(np.sum(lens * (lens + 1) / 2))
    first = next(iter(samples.values()), ([], []))
    rows = []
    for name, attention in chosen.items():
        cells = ["", ""] * 3
        if name in samples:
            cells = [
                text
                for times, own, reference in zip((1, 3.5), samples[name], first, strict=True)
                for text in (
                    spread(own, lambda s: s * 1e6, ".0f"),
                    f"{times * flops / statistics.median(own) / 1e12:.0f}",
                    ratio(reference, own),
                )
            ]
        rows.append((attention.title, attention.documents, *cells, refused.get(name, "")))
    head = (
        "attention",
        "documents by",
        "forward, us",
        "TFLOPS",
        "ratio",
        "and backward, us",
        "TFLOPS",
        "ratio",
        "",
    )
    return table(head, rows), not any("WRONG" in reason for reason in refused.values())


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    for name, text in (
        ("losses", "train by each attention from each seed, and compare"),
        ("bits", f"hash out and gradients of a layer's attention, {RUNS} runs each"),
        ("attention", "time a layer's attention alone, forward and backward"),
    ):
        what.add_argument(f"--{name}", dest="mode", action="store_const", const=name, help=text)
    what.add_argument("--draw", type=Path, metavar="CSV", help="only the picture of losses that were saved")
    every = ", ".join(attentions.known(0, equal=True))
    parser.add_argument(
        "--attentions", nargs="+", metavar="NAME", help=f"the first is what ratios are to; of {every}"
    )
    parser.add_argument("--size", choices=decoder.SIZES, help="of the model; 1b, with --losses small")
    parser.add_argument(
        "--tiny", action="store_const", dest="size", const="tiny", help="--size tiny, and few steps"
    )
    parser.add_argument("--length", type=int, help="tokens of a row")
    parser.add_argument("--documents", type=int, help="in a row")
    parser.add_argument(
        "--equal", action="store_true", help="documents of one length, beside a dense batch of them"
    )
    parser.add_argument(
        "--remat", action="store_true", help="layers are worked out again, but for what is named in ours"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of a turn (3; of --attention 10), or of --losses (100)")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1], help="of --losses: weights and documents"
    )
    parser.add_argument("--out", type=Path, default=Path("training.csv"), help="the losses; a PNG beside it")
    options = parser.parse_args(arguments)
    options.mode = options.mode or "step"
    options.size = options.size or ("small" if options.mode == "losses" else "1b")
    usual = {"step": 3, "losses": 100, "bits": RUNS, "attention": CALLS}[options.mode]
    if options.steps is None:
        options.steps = min(usual, 40) if options.size == "tiny" else usual
    known = attentions.known(0, options.equal)
    if wrong := [name for name in options.attentions or () if name not in known]:
        parser.error(f"--attentions: expected some of {', '.join(known)}; got {', '.join(wrong)}")
    if wrong := [n for n in options.attentions or () if options.mode != "step" and not known[n].keeps_apart]:
        parser.error(f"--attentions: expected those that are told of documents, got {', '.join(wrong)}")
    counts = {name: getattr(options, name) for name in ("length", "documents", "rounds", "steps")}
    for name, number in counts.items():
        if number is not None and number < 1:
            parser.error(f"--{name}: expected at least 1, got {number}")
    changed = {name: counts[name] for name in ("length", "documents") if counts[name]}
    options.sizes = sizes = decoder.SIZES[options.size]._replace(**changed)
    if sizes.length < sizes.documents or (options.equal and sizes.length % sizes.documents):
        parser.error(f"--documents: expected so many that fill {sizes.length} tokens, got {sizes.documents}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    if options.draw:
        losses.draw(options.draw.with_suffix(".png"), losses.load(options.draw), str(options.draw))
        return 0
    baselines.search_folders()
    sizes = options.sizes
    batches = decoder.batches(options.steps, sizes, 0, equal=options.equal)
    longest = max(int(batch.documents.sizes.max()) for batch in batches)
    known = attentions.known(longest, options.equal)
    on_gpu = jax.default_backend() == "gpu"
    names = options.attentions or (DEFAULTS[options.mode] if on_gpu else ON_CPU)
    chosen = {name: known[name] for name in names if name in known}
    if options.mode != "step":
        chosen = {name: one for name, one in chosen.items() if one.keeps_apart}
    print(
        f"{card()}; jax {jax.__version__}; {decoder.count(sizes) / 1e6:.2f} million weights, {sizes.layers} layers, "
        f"{sizes.heads} heads of {sizes.head_dim} over {sizes.kv_heads}; {sizes.rows} x {sizes.length} tokens, "
        f"{sizes.documents} documents a row, the longest of {longest}"
    )
    match options.mode:
        case "losses":
            return 0 if train(chosen, sizes, options) else 1
        case "bits":
            return 0 if hashed(chosen, sizes, batches[0].documents) else 1
        case "attention":
            text, right = timed_attention(chosen, sizes, batches[0].documents, options)
        case _:
            text, right = timed_steps(chosen, sizes, batches, options)
    print(text)
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
