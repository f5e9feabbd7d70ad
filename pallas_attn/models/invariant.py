"""`generate` with answers that do not depend on each other: by an engine whose sizes do not depend on the prompts."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .engine import Engine
from .sampling import Sampling
from .steps import Decoder

NUM_ROWS, STEP_TOKENS = 16, 256


def through_engine(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    *,
    max_new_tokens: int,
    prefill_chunk: int | None,
    return_logits: bool,
    report: Callable[[int, int], None],
    **options: Any,
) -> dict[str, Any]:
    """The fields of a `Generation`; `options` are the engine's, `report` is `generate`'s progress."""
    engine = Engine(
        model,
        max_len=model.config.context_length,
        num_rows=NUM_ROWS,
        step_tokens=max(prefill_chunk or STEP_TOKENS, NUM_ROWS),
        batch_invariant=True,
        **options,
    )
    engine.scores = {} if return_logits else None
    started, prefilled, compiled = time.perf_counter(), 0.0, 0.0
    requests = [
        engine.submit(prompt, max_new_tokens=max_new_tokens, sampling=sampling)
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    while engine.busy:
        engine.step()
        if not prefilled and all(request.answer for request in requests):
            prefilled, compiled = time.perf_counter(), engine.compile_seconds
        report(max(len(request.answer) for request in requests), max_new_tokens)
    decoding = time.perf_counter() - prefilled - (engine.compile_seconds - compiled)

    rows, lengths = len(prompts), np.array([len(request.answer) for request in requests], np.int32)
    tokens = np.full((rows, max_new_tokens), -1, np.int32)
    logits = np.zeros((rows, max_new_tokens, model.config.vocab_size), np.float32) if return_logits else None
    for row, request in enumerate(requests):
        tokens[row, : lengths[row]] = request.answer
        if logits is not None and engine.scores is not None:
            logits[row, : lengths[row]] = engine.scores[request][: lengths[row]]
    return dict(
        tokens=tokens,
        lengths=lengths,
        logits=logits,
        num_prompt_tokens=sum(map(len, prompts)),
        compile_seconds=engine.compile_seconds,
        prefill_seconds=prefilled - started - compiled,
        decode_seconds=decoding,
        logprobs=[request.logprobs for request in requests],
    )
