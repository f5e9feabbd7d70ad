"""`pallas-attn generate`: load, generate, print, and on request compare with transformers."""

import dataclasses
import statistics
import sys
from pathlib import Path
from typing import Literal

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pallas_attn import record_implementations
from pallas_attn._call.checks import fail
from pallas_attn.models import (
    Generation,
    LoadedModel,
    default_model_path,
    generate,
    load_checkpoint,
    load_gguf,
)

# --check fails above this largest |logit difference| in float32; in bfloat16 rounding decides, so it only reports.
LOGIT_TOLERANCE = 2e-3
_TIMED_RUNS = 3


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """The command's options, by their names on the command line."""

    prompts: list[str]
    prompts_file: Path | None
    model: Path | None
    raw: bool
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    dtype: str
    cache_dtype: str | None
    page_size: int
    num_pages: int | None
    attention: Literal["gqa", "mla"]
    implementation: str | None
    check: bool


def run_generate(options: GenerateOptions) -> int:
    """Runs the command: answers and figures to stdout, progress to stderr.

    Returns:
        0, or 1 when `--check` found a disagreement in float32.

    Raises:
        ValueError, OSError, ImportError: what the user has to change, in one line.
    """
    texts = _read_prompts(options)
    if options.check:
        if options.temperature > 0:
            fail("generate", "--check", "greedy decoding (--temperature 0)", str(options.temperature))
        from pallas_attn.models import compare  # noqa: F401  a missing package shows before the work, not after

    out, err = Console(highlight=False, markup=False, soft_wrap=True), Console(stderr=True)
    path = default_model_path() if options.model is None else options.model
    with _progress(err, "loading", "tensors") as report:
        load = load_checkpoint if path.is_dir() else load_gguf
        loaded = load(
            path,
            dtype=options.dtype,
            attention=options.attention,
            implementation=options.implementation,
            progress=report,
        )
    tokenizer = loaded.tokenizer
    prompts = [tokenizer.encode(text if options.raw else _as_chat(loaded, text)) for text in texts]

    with _progress(err, "generating", "tokens") as report, record_implementations() as served:
        generation = _generate(loaded, prompts, options, progress=report)

    device = jax.devices()[0]
    out.print(f"{loaded.name}, {options.dtype}, on {device.device_kind} ({device.platform})")
    for index, text in enumerate(texts):
        out.print(f"\n> {text}\n{tokenizer.decode(generation.row(index))}")
    out.print()
    _print_figures(out, generation, served)
    return _check(out, err, loaded, path, prompts, generation, options) if options.check else 0


def _read_prompts(options: GenerateOptions) -> list[str]:
    texts = list(options.prompts)
    for index, text in enumerate(texts):
        if not text.strip():
            fail("generate", "--prompt", "some text in each", f"prompt {index + 1} without any")
    if options.prompts_file is not None:
        lines = _read_text(options.prompts_file).splitlines()
        texts += [line.strip() for line in lines if line.strip()]
    if not texts:
        fail("generate", "--prompt", "at least one prompt, here or in --prompts-file", "none")
    return texts


def _read_text(path: Path) -> str:
    """Of the file, or of standard input for "-"."""
    name = "standard input" if (piped := str(path) == "-") else repr(str(path))
    if not piped and (not path.exists() or path.is_dir()):
        fail("generate", "--prompts-file", "an existing file", name, OSError)
    try:
        return (sys.stdin.buffer.read() if piped else path.read_bytes()).decode("utf-8")
    except UnicodeDecodeError as error:
        fail("generate", "--prompts-file", "UTF-8 text", f"{name}, which is not at byte {error.start}")


def _as_chat(loaded: LoadedModel, text: str) -> str:
    return loaded.tokenizer.apply_chat_template([{"role": "user", "content": text}])


def _generate(loaded: LoadedModel, prompts: list[list[int]], options: GenerateOptions, **more) -> Generation:
    return generate(
        loaded.model,
        prompts,
        max_new_tokens=options.max_new_tokens,
        stop_token_ids=loaded.tokenizer.stop_token_ids,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        cache_dtype=options.cache_dtype,
        page_size=options.page_size,
        num_pages=options.num_pages,
        **more,
    )


def _print_figures(out: Console, generation: Generation, served: dict[str, str]) -> None:
    decoded = int((generation.lengths - 1).sum())
    out.print(
        f"prefill  {generation.num_prompt_tokens:6d} tokens in {generation.prefill_seconds:7.3f} s"
        f"  {generation.prefill_tokens_per_second:9.1f} tokens/s"
    )
    out.print(
        f"decode   {decoded:6d} tokens in {generation.decode_seconds:7.3f} s"
        f"  {generation.decode_tokens_per_second:9.1f} tokens/s"
        f"   (compiling, {generation.compile_seconds:.1f} s, not counted)"
    )
    ops = ", ".join(f"{op}: {name}" for op, name in sorted(served.items()))
    out.print(f"served by  {ops}, prefill: jax.nn.dot_product_attention")


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
        # The timed run kept no logits; this one must choose the same tokens.
        scored = _generate(loaded, prompts, options, return_logits=True)
        if (scored.tokens != generation.tokens).any():
            raise RuntimeError("generate: two greedy runs of the same prompts gave different tokens")
        reference = TransformersModel(path, options.dtype)
        stops = loaded.tokenizer.stop_token_ids
        rows = compare(reference, prompts, scored, stop_token_ids=stops)
        # Taking turns, so that whatever else the machine does meets both.
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
    # A quantised cache moves the logits by its nature; the table says how far.
    if options.dtype == "float32" and options.cache_dtype is None and not agreed:
        out.print(f"DISAGREES: float32 must give the same tokens and logits within {LOGIT_TOLERANCE}")
        return 1
    return 0


class _progress:
    """A progress bar as a context whose value is the (done, total) callback that moves it."""

    def __init__(self, console: Console, what: str, unit: str):
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def __enter__(self):
        self._bar.start()
        task = self._bar.add_task("", total=None)
        return lambda done, total: self._bar.update(task, completed=done, total=total)

    def __exit__(self, *_):
        self._bar.stop()
