"""`pallas-attn generate`: load, generate, print, and on request compare with transformers.

Prompts of the command line are one batch for `generate`. A file may hold many: they go through the engine, which runs
some at a time and lets others join as they end.
"""

import contextlib
import dataclasses
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from pallas_attn import record_implementations
from pallas_attn._call.checks import check_int, fail
from pallas_attn.models import Engine, Generation, LoadedModel, Sampling, generate

from .bar import Bar
from .model import ModelOptions, engine_of, load, path_of

# --check fails above this largest |logit difference| in float32; in bfloat16 rounding decides, so it only reports.
LOGIT_TOLERANCE = 2e-3
_TIMED_RUNS = 3
# Large bursts: nobody waits for single tokens here.
_NUM_ROWS, _STEP_TOKENS, _BURST = 16, 256, 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions(ModelOptions):
    """The command's options, by their names on the command line."""

    prompts: list[str]
    prompts_file: Path | None
    system: str | None
    raw: bool
    max_new_tokens: int
    sampling: dict[str, Any]
    num_pages: int | None
    num_rows: int | None
    prefill_chunk: int | None
    check: bool


def run_generate(options: GenerateOptions) -> int:
    """Runs the command: answers and figures to stdout, progress to stderr.

    Returns:
        0, or 1 when `--check` found a disagreement in float32.

    Raises:
        ValueError, OSError, ImportError: what the user has to change, in one line.
    """
    texts, origins = _read_prompts(options)
    by_engine = options.prompts_file is not None and not options.check
    if options.num_rows is not None and not by_engine:
        fail("generate", "--num-rows", "--prompts-file, and no --check, with it", "one batch of all prompts")
    if options.system is not None and options.raw:
        fail("generate", "--system", "none with --raw, which has no chat", repr(options.system))
    if options.template and options.raw:
        fail("generate", "--template", "none with --raw, which has no chat", ", ".join(options.template))
    given = sampling_of(Sampling(), options.sampling)
    if options.check:
        if (
            alone := dataclasses.replace(
                given, seed=0, temperature=0.0 if given.greedy else given.temperature
            )
        ) != Sampling():
            fail("generate", "--check", "greedy decoding (--temperature 0), and no more of it", _said(alone))
        from pallas_attn.models import compare  # noqa: F401  a missing package shows before the work, not after

    out, err = Console(highlight=False, markup=False, soft_wrap=True), Console(stderr=True)
    loaded = load(err, options)
    tokenizer = loaded.tokenizer
    sampling = given if options.check else sampling_of(loaded.sampling, options.sampling)
    prompts = [tokenizer.encode(text) if options.raw else _as_chat(loaded, text, options) for text in texts]

    generation = None
    with record_implementations() as served:
        if by_engine:
            answers, figures = _through_engine(loaded, prompts, origins, options, sampling, err)
        else:
            with _named(origins), Bar(err, "generating", "tokens") as report:
                generation = _generate(loaded, prompts, options, sampling=sampling, progress=report)
            answers, figures = (
                [generation.row(i) for i in range(len(generation.tokens))],
                _figures(generation),
            )

    device = jax.devices()[0]
    out.print(f"{loaded.name}, {options.dtype}, on {device.device_kind} ({device.platform})")
    each = [text for text in texts for _ in range(sampling.n)]
    for text, answer in zip(each, answers, strict=True):
        out.print(f"\n> {text}\n{sampling.cut(tokenizer.decode(answer))}")
    ops = ", ".join(f"{op}: {name}" for op, name in sorted(served.items()))
    out.print("", *figures, f"served by  {ops}", sep="\n")
    if generation is None or not options.check:
        return 0
    return _check(out, err, loaded, path_of(options.model), prompts, generation, options)


def sampling_of(asked: Sampling, given: Mapping[str, Any]) -> Sampling:
    """The model's sampling, overridden by the command line's options that are not None."""
    return dataclasses.replace(asked, **{name: value for name, value in given.items() if value is not None})


def _said(sampling: Sampling) -> str:
    usual = Sampling()
    fields = [field.name for field in dataclasses.fields(Sampling)]
    return ", ".join(name for name in fields if getattr(sampling, name) != getattr(usual, name))


def _read_prompts(options: GenerateOptions) -> tuple[list[str], list[str]]:
    """The prompts, and where each comes from, for messages."""
    texts = list(options.prompts)
    origins = [f"--prompt {index + 1}" for index in range(len(texts))]
    for index, text in enumerate(texts):
        if not text.strip():
            fail("generate", "--prompt", "some text in each", f"prompt {index + 1} without any")
    if options.prompts_file is not None:
        # Other characters at which Python breaks lines may be part of a prompt.
        lines = _read_text(options.prompts_file).split("\n")
        found = {index + 1: line.strip() for index, line in enumerate(lines) if line.strip()}
        texts += found.values()
        origins += [f"--prompts-file, line {number}" for number in found]
    if not texts:
        fail("generate", "--prompt", "at least one prompt, here or in --prompts-file", "none")
    return texts, origins


@contextlib.contextmanager
def _named(origins: list[str]) -> Iterator[None]:
    """A refused prompt is named by its origin, not by its index."""
    try:
        yield
    except ValueError as error:
        raise ValueError(re.sub(r"prompts\[(\d+)\]", lambda at: origins[int(at[1])], str(error))) from None


def _read_text(path: Path) -> str:
    """Lines of the file, or of standard input for "-"."""
    name = "standard input" if (piped := str(path) == "-") else repr(str(path))
    if not piped and (not path.exists() or path.is_dir()):
        fail("generate", "--prompts-file", "an existing file", name, OSError)
    try:
        return (sys.stdin.buffer.read() if piped else path.read_bytes()).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fail("generate", "--prompts-file", "UTF-8 text", f"{name}, which is not at byte {error.start}")


def _as_chat(loaded: LoadedModel, text: str, options: GenerateOptions) -> list[int]:
    told = [] if options.system is None else [{"role": "system", "content": options.system}]
    return loaded.tokenizer.encode_chat([*told, {"role": "user", "content": text}], **options.template)


def _generate(loaded: LoadedModel, prompts: list[list[int]], options: GenerateOptions, **more) -> Generation:
    return generate(
        loaded.model,
        prompts,
        max_new_tokens=options.max_new_tokens,
        stop_token_ids=loaded.tokenizer.stop_token_ids,
        tokenizer=loaded.tokenizer,
        cache_dtype=options.cache_dtype,
        page_size=options.page_size,
        num_pages=options.num_pages,
        prefill_chunk=options.prefill_chunk,
        **more,
    )


def _engine(loaded: LoadedModel, prompts: list[list[int]], options: GenerateOptions) -> Engine:
    if options.prefill_chunk is not None:
        check_int("generate", "prefill_chunk", options.prefill_chunk, least=1)
    rows = _NUM_ROWS if options.num_rows is None else options.num_rows
    longest = max(map(len, prompts)) + options.max_new_tokens
    if options.batch_invariant:  # whose sizes do not depend on the prompts
        longest = loaded.model.config.context_length
    else:
        rows = min(rows, len(prompts))
    # A prompt that does not fit in the context is refused when it is submitted.
    sizes = dict(max_len=longest, num_rows=rows, num_pages=options.num_pages, burst=_BURST)
    return engine_of(loaded, options, **sizes, step_tokens=max(options.prefill_chunk or _STEP_TOKENS, rows))


def _through_engine(
    loaded: LoadedModel,
    prompts: list[list[int]],
    origins: list[str],
    options: GenerateOptions,
    sampling: Sampling,
    err: Console,
) -> tuple[list[list[int]], list[str]]:
    """The answers, and lines about how it went."""
    engine, started = _engine(loaded, prompts, options), time.perf_counter()
    requests = []
    for index, prompt in enumerate(prompts):
        own = dataclasses.replace(sampling.shifted(index * sampling.n), n=sampling.n)
        try:
            requests += engine.submit_all(prompt, max_new_tokens=options.max_new_tokens, sampling=own)
        except ValueError as error:
            raise ValueError(f"{error} ({origins[index]})") from None
    tokens, seconds = 0, 0.0
    with Bar(err, "generating", "prompts") as report:
        while engine.busy:
            tokens += sum(map(len, engine.step().values()))
            seconds = time.perf_counter() - started - engine.compile_seconds
            done = sum(request.done for request in requests)
            report(done, len(requests), f"{tokens / seconds:.0f} tokens/s")
    read = sum(map(len, prompts))
    shared, sent_back = sum(r.reused for r in requests), sum(r.preempted for r in requests)
    return [request.answer for request in requests], [
        f"engine   {tokens:6d} tokens in {seconds:7.3f} s  {tokens / seconds:9.1f} tokens/s"
        f"   (compiling, {engine.compile_seconds:.1f} s, not counted)",
        f"         {len(prompts)} prompts of {read} tokens in {engine.steps} steps; {shared} of these tokens shared, "
        f"{sent_back} prompts sent back for want of pages",
    ]


def _figures(generation: Generation) -> list[str]:
    decoded = int((generation.lengths - 1).sum())
    return [
        f"prefill  {generation.num_prompt_tokens:6d} tokens in {generation.prefill_seconds:7.3f} s"
        f"  {generation.prefill_tokens_per_second:9.1f} tokens/s",
        f"decode   {decoded:6d} tokens in {generation.decode_seconds:7.3f} s"
        f"  {generation.decode_tokens_per_second:9.1f} tokens/s"
        f"   (compiling, {generation.compile_seconds:.1f} s, not counted)",
    ]


def _check(
    out: Console,
    err: Console,
    loaded: LoadedModel,
    path: Path,
    prompts: list[list[int]],
    generation: Generation,
    options: GenerateOptions,
) -> int:
    from pallas_attn.models.compare import TransformersModel, compare

    with err.status("running the same prompts through transformers"):
        # The timed run kept no logits; this run must choose the same tokens.
        scored = _generate(loaded, prompts, options, return_logits=True)
        if (scored.tokens != generation.tokens).any():
            raise RuntimeError("generate: two greedy runs of the same prompts gave different tokens")
        reference = TransformersModel(path, options.dtype)
        stops = loaded.tokenizer.stop_token_ids
        rows = compare(reference, prompts, scored, stop_token_ids=stops)
        # Alternating, so that other load on the machine affects both alike.
        ours, theirs = [], []
        for _ in range(_TIMED_RUNS):
            ours.append(_generate(loaded, prompts, options).decode_tokens_per_second)
            theirs.append(reference.decode_tokens_per_second(prompts, options.max_new_tokens, stops))

    table = Table("prompt", "new tokens", "tokens equal?", "max |logit difference|")
    for index, row in enumerate(rows):
        equal = "yes" if row.tokens_equal else f"first {row.num_equal}"
        table.add_row(str(index + 1), str(row.num_tokens), equal, f"{row.max_logit_difference:.2e}")
    out.print(f"\nAgainst transformers on {reference.device}, {options.dtype}, same weights, same batch:")
    out.print(table)
    mine, other = statistics.median(ours), statistics.median(theirs)
    out.print(
        f"decode tokens/s, median of {_TIMED_RUNS} runs in turns: "
        f"pallas-attn {mine:.1f}, transformers {other:.1f} ({mine / other:.2f} x)"
    )
    agreed = all(p.tokens_equal and p.max_logit_difference < LOGIT_TOLERANCE for p in rows)
    # A quantised cache changes the logits; the table shows by how much.
    if options.dtype == "float32" and options.cache_dtype is None and not agreed:
        out.print(f"DISAGREES: float32 must give the same tokens and logits within {LOGIT_TOLERANCE}")
        return 1
    return 0
