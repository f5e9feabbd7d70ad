"""Batched text generation: one jitted prefill, then the decode steps inside one jitted `lax.while_loop`."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn import PageAllocator, PagedKVCache, PagedLatentCache
from pallas_attn._call.checks import ArgumentChecker, check_int, fail
from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="pallas_attn.models.generate"):
    from flax import nnx

from . import choosing
from .arguments import check_model, checked_prompt, described
from .deepseek import DeepSeek
from .invariant import through_engine
from .llama import Llama, for_a_loop, for_lengths
from .sampling import How, Rows, Sampling, TokenLogprobs, checked_stops, token_logprobs
from .stopping import first_stop

# Target time of one call of the loop: between calls the host can be interrupted and reports progress.
_STRETCH_SECONDS = 0.25
_STRETCH_GROWTH = 8
# Prompts are padded to a multiple of this, so that similar prompts share a compiled prefill.
_PROMPT_MULTIPLE = 16


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns, on the host: a row for each answer, those to the same prompt one after the other.

    Attributes:
        tokens: ``[num_prompts, max_new_tokens]`` int32 new tokens, the one that ended the answer included;
            -1 after each row's end.
        lengths: ``[num_prompts]`` int32 number of new tokens of each row.
        logits: ``[num_prompts, max_new_tokens, vocab_size]`` float32 scores by the model that each token was chosen
            from, zeros after a row's end; ``None`` unless asked for.
        logprobs: of each row's tokens, where its `Sampling` asks for them, else nothing.
        num_prompt_tokens: tokens of all prompts together, padding not counted.
        compile_seconds: tracing and compiling; next to nothing when the same shapes ran before.
        prefill_seconds: from the prompts to every row's first token.
        decode_seconds: all further tokens.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    logits: np.ndarray | None
    num_prompt_tokens: int
    compile_seconds: float
    prefill_seconds: float
    decode_seconds: float
    logprobs: list[list[TokenLogprobs]] = dataclasses.field(default_factory=list)

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens per second of all rows together."""
        return self.num_prompt_tokens / self.prefill_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """New tokens per second of all rows together; each row's first token belongs to the prefill."""
        return float(np.sum(self.lengths - 1)) / self.decode_seconds

    def row(self, index: int) -> list[int]:
        """New tokens of one prompt, without the padding behind its end."""
        return self.tokens[index, : self.lengths[index]].tolist()


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "tokens", "lengths", "done", "step", "rows", "seen", "logits", "logprobs"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class _State:
    """The loop's carry, all donated; n = max_new_tokens."""

    # Transformations may put anything into a pytree's leaves (shapes, shardings), hence `| Any`.
    cache: PagedKVCache | PagedLatentCache | Any
    tokens: jax.Array | Any  # [num_seqs, n] int32, -1 where not generated
    lengths: jax.Array | Any  # [num_seqs] int32
    done: jax.Array | Any  # [num_seqs] bool
    step: jax.Array | Any  # int32: column that the next token goes to
    rows: Rows | Any
    seen: choosing.Seen | Any  # or None
    logits: Any  # None or [num_seqs, n, vocab_size] float32
    logprobs: Any  # None or `choosing.Logprobs` of [num_seqs, n, ...]


def generate(
    model: Llama | DeepSeek,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    stop_token_ids: Sequence[int] = (),
    sampling: Sampling | Sequence[Sampling] | None = None,
    tokenizer: Any = None,
    page_size: int = 16,
    num_pages: int | None = None,
    cache_dtype: Any = None,
    prefill_chunk: int | None = None,
    return_logits: bool = False,
    batch_invariant: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Generation:
    """Continues a batch of prompts of different lengths.

    Decode steps run in one jitted ``lax.while_loop``: no host round trip between tokens, the KV cache and the answers
    are updated in place. A row stops at a stop token, the loop when every row has. Each call of the loop makes as many
    steps as take about a quarter of a second, so that Ctrl-C is heard.

    Args:
        model: a `Llama` or a `DeepSeek`; of `load_gguf` and `load_checkpoint` their ``.model``.
        prompts: token ids in ``[0, vocab_size)`` of each prompt, at least one each: lists or integer arrays.
        max_new_tokens: most new tokens per prompt, at least 1.
        stop_token_ids: tokens that end a row.
        sampling: how tokens are chosen, and what else ends a row: one for each prompt, or one for all, with a seed of
            its own for each answer, one more than that before; None takes the most likely tokens.
        tokenizer: of the model, where the sampling has stop texts; anything with `decode`.
        page_size: tokens per page of the KV cache.
        num_pages: pages per layer; ``None`` takes just enough for prompts and answers.
        cache_dtype: of the KV cache; ``None`` means the model's. ``float8_e4m3fn``, ``float8_e5m2`` and ``int8``
            store each page's KV heads with scales of their own, which grow with what the page holds; a `DeepSeek` takes
            ``float8_e4m3fn`` alone, for latents of 656 bytes a token.
        prefill_chunk: prompts are read so many tokens at a time, which bounds the memory that activations take;
            ``None`` reads them whole. Where rotary frequencies depend on the length, chunks have those of the longest
            prompt and answer.
        return_logits: also return the scores, ``4 * vocab_size`` bytes per token.
        batch_invariant: each row's scores and tokens have the same bits whatever the other prompts are, and however
            many: all go through an `Engine` with that option (see there what it costs), of 16 rows and steps of 256
            tokens, or of `prefill_chunk`, of whose size the bits are. So has a model that was made with it. Rotary
            frequencies that depend on the length are those of the model's whole context.
        progress: called with (steps done, steps at most) after the prefill, which is the first, and each call of the
            loop.

    Raises:
        TypeError: the model is none that this function can run, or an argument of another type than said above.
        ValueError: an argument is out of its range, there are more prompts than pages, or a prompt and its
            answer do not fit in the pages or in the model's context.
    """
    check_model("generate", model)
    prompts = _checked_prompts(prompts, model.config.vocab_size)
    for name, size in (
        ("max_new_tokens", max_new_tokens),
        ("page_size", page_size),
        ("prefill_chunk", prefill_chunk),
    ):
        if size is not None or name != "prefill_chunk":
            check_int("generate", name, size, least=1)
    if num_pages is not None:
        check_int("generate", "num_pages", num_pages)
    samplings = _of_answers(sampling, len(prompts))
    prompts = [prompt for prompt, each in zip(prompts, samplings, strict=True) for _ in each]
    each_row = [one for each in samplings for one in each]
    if tokenizer is None and any(one.stop for one in each_row):
        fail("generate", "tokenizer", "one, for texts that end an answer", "none")
    stops = checked_stops("generate", stop_token_ids, model.config.vocab_size)
    for one in each_row:
        checked_stops("generate", one.stop_token_ids, model.config.vocab_size, "sampling.stop_token_ids")
    how, num_read = How.of(each_row), sum(map(len, prompts))
    ArgumentChecker("generate").flag("batch_invariant", batch_invariant)
    block_tables, num_pages = _plan_pages(model, prompts, max_new_tokens, page_size, num_pages)
    report = progress or (lambda done, most: None)
    if batch_invariant or getattr(model, "batch_invariant", False):
        options = dict(num_pages=num_pages, page_size=page_size, cache_dtype=cache_dtype)
        options |= dict(stop_token_ids=stop_token_ids, tokenizer=tokenizer)
        how_many = dict(max_new_tokens=max_new_tokens, prefill_chunk=prefill_chunk)
        more: dict[str, Any] = options | how_many | dict(return_logits=return_logits, report=report)
        return Generation(**through_engine(model, prompts, each_row, **more))
    if prefill_chunk is not None:
        model = for_lengths(model, max(map(len, prompts)) + max_new_tokens)

    config, num_seqs = model.config, len(prompts)
    state = _State(
        cache=model.create_cache(
            num_pages=num_pages,
            page_size=page_size,
            block_tables=jnp.asarray(block_tables),
            dtype=cache_dtype,
        ),
        tokens=jnp.full((num_seqs, max_new_tokens), -1, jnp.int32),
        lengths=jnp.zeros(num_seqs, jnp.int32),
        done=jnp.zeros(num_seqs, bool),
        step=jnp.int32(0),
        rows=Rows(*map(jnp.asarray, Rows.of(each_row))),
        seen=_seen(prompts, config.vocab_size) if how.penalised else None,
        logits=jnp.zeros((num_seqs, max_new_tokens, config.vocab_size), jnp.float32)
        if return_logits
        else None,
        logprobs=_no_logprobs(num_seqs, max_new_tokens, config.vocab_size) if how.logprobs else None,
    )
    tokens, positions = _pad(prompts, prefill_chunk)
    graph, weights = nnx.split(model)
    static: dict[str, Any] = {
        "graph": graph,
        "how": how,
        "stop_token_ids": stops,
    }

    started = time.perf_counter()
    prefill = _prefill.lower(weights, tokens, positions, state, **static).compile()
    decode = _decode.lower(weights, state, jnp.int32(0), **static).compile()
    compiled = time.perf_counter()
    try:
        state = prefill(weights, tokens, positions, state)
        jax.block_until_ready(state)
        prefilled = time.perf_counter()
        done, steps = 1, 1  # the prefill gave the first token
        report(done, max_new_tokens)
        while done < max_new_tokens and not np.asarray(state.done).all():
            began = time.perf_counter()
            state = decode(weights, state, jnp.int32(min(done + steps, max_new_tokens)))
            state, done = _stopped(state, each_row, tokenizer), int(state.step)
            steps = _next_stretch(steps, time.perf_counter() - began)
            report(done, max_new_tokens)
    except BaseException:
        # The device keeps running, and some of JAX's clients abort a process that exits meanwhile.
        jax.block_until_ready([x for x in jax.tree.leaves(state) if not x.is_deleted()])
        raise
    decoded = time.perf_counter()
    lengths = _lengths(state, each_row, tokenizer)
    logs = jax.tree.map(np.asarray, state.logprobs)
    return Generation(
        tokens=np.where(np.arange(max_new_tokens) < lengths[:, None], state.tokens, -1),
        lengths=lengths,
        logits=None if state.logits is None else np.asarray(state.logits),
        num_prompt_tokens=num_read,
        compile_seconds=compiled - started,
        prefill_seconds=prefilled - compiled,
        decode_seconds=decoded - prefilled,
        logprobs=[
            [token_logprobs(logs, (row, column), one.logprobs) for column in range(lengths[row])]
            if one.logprobs is not None
            else []
            for row, one in enumerate(each_row)
        ],
    )


def _of_answers(sampling: Any, num_prompts: int) -> list[list[Sampling]]:
    """Of each prompt's answers."""
    if isinstance(sampling, Sampling | None):
        one = sampling or Sampling()
        return [
            [one.shifted(index * one.n + answer) for answer in range(one.n)] for index in range(num_prompts)
        ]
    if not isinstance(sampling, Sequence) or not all(isinstance(one, Sampling) for one in sampling):
        fail(
            "generate", "sampling", "a Sampling, one for each prompt, or None", described(sampling), TypeError
        )
    if len(sampling) != num_prompts:
        fail("generate", "sampling", f"{num_prompts} of them, as prompts", str(len(sampling)))
    return [one.answers() for one in sampling]


def _seen(prompts: Sequence[Sequence[int]], vocab_size: int) -> choosing.Seen:
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.full((len(prompts), lengths.max()), -1, np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return choosing.Seen.of(jnp.asarray(tokens), jnp.asarray(lengths), vocab_size)


def _no_logprobs(num_seqs: int, columns: int, vocab_size: int) -> choosing.Logprobs:
    scores = jax.ShapeDtypeStruct((num_seqs, vocab_size), jnp.float32)
    one = jax.eval_shape(choosing.logprobs, scores, jax.ShapeDtypeStruct((num_seqs,), jnp.int32))
    return jax.tree.map(lambda x: jnp.zeros((x.shape[0], columns, *x.shape[1:]), x.dtype), one)


def _lengths(state: _State, each_row: Sequence[Sampling], tokenizer: Any) -> np.ndarray:
    """Lengths of the answers up to the token that completes a stop text."""
    lengths = np.array(state.lengths)
    for row, one in enumerate(each_row):
        if one.stop:
            new = np.asarray(state.tokens[row, : lengths[row]]).tolist()
            found = first_stop(tokenizer.decode, [], new, one.stop)
            lengths[row] = lengths[row] if found is None else found
    return lengths


def _stopped(state: _State, each_row: Sequence[Sampling], tokenizer: Any) -> _State:
    """Marks rows with a stop text as done, after the call of the loop in which it appeared."""
    if not any(one.stop for one in each_row):
        return state
    ended = _lengths(state, each_row, tokenizer) < np.asarray(state.lengths)
    return dataclasses.replace(state, done=state.done | jnp.asarray(ended))


def _next_stretch(steps: int, seconds: float) -> int:
    """How many steps the next call makes, given the time of the last `steps`."""
    wanted = int(steps * _STRETCH_SECONDS / max(seconds, 1e-6))
    return max(1, min(wanted, steps * _STRETCH_GROWTH))


@functools.partial(jax.jit, static_argnames=("graph", "how", "stop_token_ids"), donate_argnames="state")
def _prefill(weights, tokens, positions, state: _State, *, graph, how, stop_token_ids) -> _State:
    """Runs the prompts, chunk after chunk, writes their keys and values into the pages and takes each row's first
    token. `tokens` and `positions` are [num_chunks, num_seqs, n]."""
    model: Llama | DeepSeek = nnx.merge(graph, weights)

    def one_chunk(carry, chunk):
        cache, newest = carry
        tokens, positions = chunk
        hidden, cache = model(tokens, positions, cache)
        last = jnp.argmax(positions, axis=1)
        hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
        # A prompt that ended in an earlier chunk has no tokens here.
        return (cache, jnp.where(jnp.max(positions, axis=1, keepdims=True) >= 0, hidden, newest)), None

    hidden = jax.eval_shape(model, tokens[0], positions[0], state.cache)[0]
    newest = jnp.zeros((hidden.shape[0], hidden.shape[2]), hidden.dtype)
    (cache, hidden), _ = jax.lax.scan(one_chunk, (state.cache, newest), (tokens, positions))
    state = dataclasses.replace(state, cache=cache)
    return _append(state, model.logits(hidden), how, stop_token_ids)


@functools.partial(jax.jit, static_argnames=("graph", "how", "stop_token_ids"), donate_argnames="state")
def _decode(weights, state: _State, stop, *, graph, how, stop_token_ids) -> _State:
    """Generates until column `stop` is reached or every row is done."""
    model: Llama | DeepSeek = nnx.merge(graph, weights)
    forward = for_a_loop(model)

    def go_on(state: _State):
        return (state.step < stop) & ~jnp.all(state.done)

    def one_step(state: _State) -> _State:
        last = jax.lax.dynamic_index_in_dim(state.tokens, state.step - 1, axis=1)
        # A finished row attends to nothing and writes nothing.
        positions = jnp.where(state.done, -1, state.cache.seq_lens)[:, None]
        hidden, cache = forward(jnp.maximum(last, 0), positions, state.cache)
        state = dataclasses.replace(state, cache=cache)
        return _append(state, model.logits(hidden[:, 0]), how, stop_token_ids)

    return jax.lax.while_loop(go_on, one_step, state)


def _append(state: _State, logits: jax.Array, how: How, stop_token_ids: tuple[int, ...]) -> _State:
    """Chooses each row's next token and records it."""
    token = choosing.choose(logits, state.cache.seq_lens, state.rows, how, state.seen)
    stops = jnp.isin(token, jnp.array(stop_token_ids, jnp.int32))
    stops |= (token[:, None] == state.rows.stops).any(axis=1)
    new = jnp.where(state.done, -1, token)

    def put(rows, column):
        return jax.lax.dynamic_update_index_in_dim(rows, column, state.step, axis=1)

    recorded = None
    if state.logits is not None:
        recorded = put(state.logits, jnp.where(state.done[:, None], 0.0, logits))
    logs = state.logprobs
    if logs is not None:
        logs = jax.tree.map(put, logs, choosing.logprobs(logits, token))
    return dataclasses.replace(
        state,
        tokens=put(state.tokens, new),
        lengths=state.lengths + ~state.done,
        done=state.done | stops,
        step=state.step + 1,
        seen=state.seen and state.seen.plus(new),
        logits=recorded,
        logprobs=logs,
    )


def _pad(prompts: Sequence[Sequence[int]], chunk: int | None) -> tuple[jax.Array, jax.Array]:
    """Right-padded tokens and positions ``[num_chunks, num_seqs, n]``; positions of padding are -1."""
    lengths = np.array([len(prompt) for prompt in prompts])
    n = -(-int(lengths.max()) // _PROMPT_MULTIPLE) * _PROMPT_MULTIPLE
    n = n if chunk is None else min(n, chunk)
    num_chunks = -(-int(lengths.max()) // n)
    tokens = np.zeros((len(prompts), num_chunks * n), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    columns = np.arange(num_chunks * n, dtype=np.int32)
    positions = np.where(columns < lengths[:, None], columns, -1)

    def chunked(rows: np.ndarray) -> jax.Array:
        return jnp.asarray(rows.reshape(len(prompts), num_chunks, n).swapaxes(0, 1))

    return chunked(tokens), chunked(positions)


def _plan_pages(
    model: Llama | DeepSeek,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    page_size: int,
    num_pages: int | None,
) -> tuple[np.ndarray, int]:
    """Reserves the pages of every prompt and its answer: block tables ``[num_seqs, max_pages]``, num_pages."""
    context = model.config.context_length
    wanted = [len(prompt) + max_new_tokens for prompt in prompts]
    longest = max(range(len(prompts)), key=wanted.__getitem__)
    got = f"{len(prompts[longest])} + {max_new_tokens} tokens"
    together = f"prompt and max_new_tokens of together at most {context} tokens (the model's context)"
    if wanted[longest] > context:
        fail("generate", f"prompts[{longest}]", together, got)

    pages = [-(-tokens // page_size) for tokens in wanted]
    if num_pages is None:
        num_pages = sum(pages)
    if num_pages < len(prompts):
        fail("generate", "num_pages", f"at least one page for each of {len(prompts)} prompts", str(num_pages))
    capacity = f"{num_pages} pages x {page_size} = {num_pages * page_size} tokens (the cache)"
    if pages[longest] > num_pages:
        together = f"prompt and max_new_tokens of together at most {capacity}"
        fail("generate", f"prompts[{longest}]", together, got)
    if sum(pages) > num_pages:
        needed = f"at least {sum(pages)} ({len(prompts)} prompts with max_new_tokens={max_new_tokens})"
        fail("generate", "num_pages", needed, str(num_pages))

    allocator = PageAllocator(num_pages)
    tables = np.full((len(prompts), max(pages)), -1, np.int32)
    for row, count in zip(tables, pages, strict=True):
        row[:count] = allocator.allocate(count)
    return tables, num_pages


def _checked_prompts(prompts: Any, vocab_size: int) -> list[tuple[int, ...]]:
    if isinstance(prompts, str) or not hasattr(prompts, "__len__"):
        fail("generate", "prompts", "a sequence of prompts", described(prompts), TypeError)
    if len(prompts) == 0:
        fail("generate", "prompts", "at least one prompt", "none")
    return [
        checked_prompt("generate", f"prompts[{i}]", prompt, vocab_size) for i, prompt in enumerate(prompts)
    ]
