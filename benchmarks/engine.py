"""Tokens a second of a whole decoder: the engine, `generate` in batches, and transformers, on the same requests.

    python benchmarks/engine.py                         # SmolLM2-135M's sizes, random weights, everything below
    python benchmarks/engine.py --what requests check   # only these
    python benchmarks/engine.py --model folder --out figures.csv
    python benchmarks/engine.py --tiny                  # anywhere, to try it

What it does, in this order:
    requests      prompts of 16 to 1024 tokens and answers of lognormal length, 8 to 512, given all at once: the engine,
                  and `generate` on batches in order of arrival, each of which runs until its longest answer has ended
    check         the same in float32, each request, whatever ran beside it, against a call of `generate` of its own
    batch         prompts of 128 tokens, answers of 128: the engine with 1, 4, 16 and 64 rows
    transformers  the same batches through transformers, if it is installed

Tokens are those that were asked for; what a batch computes beyond is not counted, and neither is compiling. Every
figure is the wall time of a whole run, the fastest of `--repeats`. Exit status: 0, or 1 if a token was wrong.
"""

import argparse
import collections
import csv
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_attn.models import Engine, Llama, LlamaConfig, generate, load_checkpoint, load_gguf

SMOLLM2_135M = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    context_length=8192,
    rope_theta=100000.0,
)
TINY = LlamaConfig(97, 48, 80, 2, 6, 2, 8, context_length=8192)
WHAT = ("requests", "check", "batch", "transformers")
ROWS_OF_A_BATCH = 16
SMALL_BATCHES = (1, 4, 16, 64)
LONGEST = 2048  # prompt and answer
CHUNK = 128
COLUMNS = ("device", "jax", "commit", "what", "who", "dtype", "rows", "requests", "tokens", "seconds", "note")


class Workload(NamedTuple):
    prompts: list[list[int]]
    answers: list[int]
    """How many tokens each is to have."""

    @property
    def tokens(self) -> int:
        return sum(self.answers)


class Report:
    """Prints each figure as it is known, and keeps them for the table."""

    def __init__(self, out: Path | None, commit: str):
        self.out, self.commit, self.rows = out, commit, []

    def add(self, what: str, who: str, dtype: str, rows: int, load: Workload, seconds: float, note: str = ""):
        device = jax.devices()[0].device_kind
        facts = device, jax.__version__, self.commit, what, who, dtype, rows, len(load.prompts), load.tokens
        self.rows.append(dict(zip(COLUMNS, (*facts, f"{seconds:.4f}", note), strict=True)))
        print(
            f"{what:12s} {who:14s} {dtype:8s} {rows:3d} rows {len(load.prompts):3d} requests {load.tokens:6d} tokens "
            f"{seconds:7.3f} s {load.tokens / seconds:8.0f} tokens/s  {note}",
            flush=True,
        )
        if self.out is not None:
            with self.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(self.rows)


def random_model(config: LlamaConfig, dtype: Any, seed: int = 0, **options: Any) -> Llama:
    """Enlarged, or the logits would hardly depend on the attention."""
    graph, weights = nnx.split(
        nnx.eval_shape(lambda: Llama(config, dtype=dtype, **options, rngs=nnx.Rngs(0)))
    )
    leaves, tree = jax.tree.flatten(weights)

    @jax.jit
    def draw():
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        drawn = [jax.random.normal(k, x.shape) * x.shape[-2] ** -0.5 if x.ndim > 2 else jnp.ones(x.shape)
                 for k, x in zip(keys, leaves, strict=True)]  # fmt: skip
        drawn = [jax.random.normal(k, x.shape) * 0.05 if x.shape[0] == config.vocab_size else d
                 for k, x, d in zip(keys, leaves, drawn, strict=True)]  # fmt: skip
        return [d.astype(x.dtype) for d, x in zip(drawn, leaves, strict=True)]

    return nnx.merge(graph, jax.tree.unflatten(tree, draw()))


def arriving(count: int, vocab_size: int, most_prompt: int, most_answer: int) -> Workload:
    rng = random.Random(0)
    lengths = [rng.randint(min(16, most_prompt), most_prompt) for _ in range(count)]
    answers = [round(min(max(rng.lognormvariate(4.3, 0.9), 8), most_answer)) for _ in range(count)]
    return Workload([[rng.randrange(vocab_size) for _ in range(n)] for n in lengths], answers)


def equal(count: int, vocab_size: int, tokens: int) -> Workload:
    rng = random.Random(1)
    return Workload(
        [[rng.randrange(vocab_size) for _ in range(tokens)] for _ in range(count)], [tokens] * count
    )


def engine_for(model: Any, load: Workload, rows: int, options: argparse.Namespace) -> Engine:
    longest = max(len(p) + n for p, n in zip(load.prompts, load.answers, strict=True))
    step_tokens = max(options.step_tokens, rows)
    return Engine(model, max_len=longest, num_rows=rows, step_tokens=step_tokens, burst=options.burst)


def serve(engine: Engine, load: Workload) -> tuple[float, list[list[int]]]:
    """(seconds, answers)"""
    started = time.perf_counter()
    requests = [engine.submit(p, max_new_tokens=n) for p, n in zip(load.prompts, load.answers, strict=True)]
    while engine.busy:
        engine.step()
    return time.perf_counter() - started, [request.answer for request in requests]


def in_batches(load: Workload) -> list[Workload]:
    size = ROWS_OF_A_BATCH
    return [
        Workload(load.prompts[i : i + size], load.answers[i : i + size])
        for i in range(0, len(load.prompts), size)
    ]


def batch(model: Any, load: Workload) -> float:
    """Seconds of one call of `generate`, without compiling."""
    done = generate(model, load.prompts, max_new_tokens=max(load.answers))
    return done.prefill_seconds + done.decode_seconds


def fastest(repeats: int, load: Workload, run: Callable[[Workload], float]) -> float:
    """Of runs over other tokens each, or the second would find in the cache what the first has written."""
    ids = max(map(max, load.prompts)) + 1
    shifted = [[[(t + i) % ids for t in prompt] for prompt in load.prompts] for i in range(repeats)]
    return min(run(Workload(prompts, load.answers)) for prompts in shifted)


def compare_requests(model: Any, load: Workload, options: argparse.Namespace, report: Report) -> None:
    engine = engine_for(model, load, options.rows, options)
    with ThreadPoolExecutor() as pool:  # compiling takes far longer than running, and leaves cores idle
        jobs = [pool.submit(engine.compile), *(pool.submit(batch, model, part) for part in in_batches(load))]
        for job in jobs:
            job.result()
    print(f"compiled: the engine in {engine.compile_seconds:.1f} s", flush=True)
    name, rows = options.dtype, options.rows
    steps = engine.steps
    ours = fastest(options.repeats, load, lambda load: serve(engine, load)[0])
    steps = (engine.steps - steps) // options.repeats
    report.add("requests", "engine", name, rows, load, ours, f"{steps} steps")
    theirs = fastest(options.repeats, load, lambda load: sum(batch(model, part) for part in in_batches(load)))
    note = f"the engine is {theirs / ours:.2f} x as fast"
    report.add("requests", "generate", name, ROWS_OF_A_BATCH, load, theirs, note)


def check(model: Any, load: Workload, options: argparse.Namespace, report: Report) -> bool:
    """Requests as they come, whatever runs beside them, against a call of `generate` for each."""
    count = min(options.checked, len(load.prompts))
    at = [i * len(load.prompts) // count for i in range(count)]
    engine = engine_for(model, load, options.rows, options)
    engine.compile()
    seconds, answers = serve(engine, load)
    sizes: dict[str, Any] = {
        "max_new_tokens": max(load.answers),
        "prefill_chunk": CHUNK,
        "page_size": LONGEST,
    }

    def alone(place: int) -> list[int]:
        return generate(model, [load.prompts[place]], **sizes).row(0)[: load.answers[place]]

    # Prompts in chunks, answers of one length and one page for each: few programs to compile, each once.
    alike = collections.defaultdict(list)
    for place in at:
        alike[-(-len(load.prompts[place]) // CHUNK)].append(place)
    expected = {at[0]: alone(at[0])}
    with ThreadPoolExecutor() as pool:
        for places, rows in pool.map(lambda places: (places, [alone(i) for i in places]), alike.values()):
            expected.update(zip(places, rows, strict=True))
    wrong = []
    for place, row in expected.items():
        same = next((i for i, (a, b) in enumerate(zip(row, answers[place], strict=True)) if a != b), len(row))
        if same < len(row):
            wrong.append(f"request {place} parts after {same} of {len(row)} tokens")
    kinds = statistics.mean(len(set(row)) / len(row) for row in expected.values())
    note = f"{count - len(wrong)} of {count} requests have the tokens of one-by-one generation"
    report.add("check", "engine", "float32", options.rows, load, seconds, note)
    print(f"  {kinds:.0%} of an answer's tokens differ; {'; '.join(wrong) or 'none parts'}", flush=True)
    return not wrong


def compare_batches(model: Any, options: argparse.Namespace, report: Report) -> None:
    config, tokens = model.config, 8 if options.tiny else 128
    loads = {rows: equal(rows, config.vocab_size, tokens) for rows in SMALL_BATCHES}
    if "batch" in options.what:
        engines = {n: engine_for(model, load, n, options) for n, load in loads.items()}
        with ThreadPoolExecutor() as pool:
            list(pool.map(Engine.compile, engines.values()))
        for rows, load in loads.items():
            engine = engines[rows]
            seconds = fastest(options.repeats, load, lambda load, engine=engine: serve(engine, load)[0])
            report.add("batch", "engine", options.dtype, rows, load, seconds)
    if "transformers" in options.what:
        try:
            run = transformers_batches(config, options.dtype)
        except ImportError as error:
            print(f"transformers: none ({error})", flush=True)
            return
        run(loads[1])
        for rows, load in loads.items():
            seconds = fastest(options.repeats, load, run)
            report.add("batch", "transformers", options.dtype, rows, load, seconds)


def transformers_batches(config: LlamaConfig, dtype: str) -> Callable[[Workload], float]:
    """Its model of the same sizes, random weights of its own."""
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    theirs = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        tie_word_embeddings=True,
        max_position_embeddings=config.context_length,
    )
    model: Any = transformers.LlamaForCausalLM(theirs)
    model = model.to(device, getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run(load: Workload) -> float:
        tokens = torch.tensor(load.prompts, device=device)
        started = time.perf_counter()
        out: Any = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=load.answers[0],
            do_sample=False,
            pad_token_id=0,
        )
        assert out.cpu().shape[1] == tokens.shape[1] + load.answers[0]
        return time.perf_counter() - started

    return run


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT), help="default: all of it")
    parser.add_argument("--model", type=Path, help="a GGUF file or a Hugging Face folder")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rows", type=int, default=64, help="requests that the engine runs at once")
    parser.add_argument("--step-tokens", type=int, default=8192, help="most of a mixed step")
    parser.add_argument("--burst", type=int, default=32, help="tokens of an answer in a step without prompts")
    parser.add_argument("--checked", type=int, default=64, help="requests to check one by one")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commit", default="", help="written into the table")
    parser.add_argument("--out", type=Path, help="a CSV file")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short requests")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    report = Report(options.out, options.commit)

    def model(dtype: str) -> Any:
        if options.model is None:
            return random_model(TINY if options.tiny else SMOLLM2_135M, jnp.dtype(dtype))
        load = load_checkpoint if options.model.is_dir() else load_gguf
        return load(options.model, dtype=dtype).model

    right, decoder = True, model(options.dtype)
    longest = (40, 12) if options.tiny else (1024, 512)
    load = arriving(options.requests, decoder.config.vocab_size, *longest)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    if "requests" in options.what:
        compare_requests(decoder, load, options, report)
    if "check" in options.what:
        right = check(model("float32"), load, options, report)
    if {"batch", "transformers"} & {*options.what}:
        compare_batches(decoder, options, report)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
