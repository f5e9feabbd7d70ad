"""The same prompts through transformers and torch, on the same weights: what `--check` prints."""

import contextlib
import dataclasses
import io
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_attn._call.checks import fail
from pallas_attn._call.optional import needs_extra

with needs_extra("check", user="the comparison with transformers"):
    import accelerate  # noqa: F401  transformers refuses a GGUF file without it
    import torch
    import transformers

from .generate import Generation


@dataclasses.dataclass(frozen=True)
class PromptComparison:
    """Agreement on one prompt.

    Attributes:
        tokens_equal: whether both chose the same new tokens, to the end.
        num_equal: new tokens before the first difference.
        num_tokens: new tokens of ours.
        max_logit_difference: largest |ours - theirs| over all scores our new tokens were chosen from, theirs
            computed on our tokens so that one difference does not spread.
    """

    tokens_equal: bool
    num_equal: int
    num_tokens: int
    max_logit_difference: float


class TransformersModel:
    """The model of a GGUF file or a folder in transformers, on a GPU if torch sees one, else on the CPU.

    Args:
        path: the GGUF file, or the folder.
        dtype: ``"float32"`` or ``"bfloat16"``.
    """

    def __init__(self, path: str | pathlib.Path, dtype: str):
        path = pathlib.Path(path)
        transformers.logging.set_verbosity_error()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        # Its progress bars cannot all be disabled and would mix with ours.
        with contextlib.redirect_stderr(io.StringIO()):
            folder, file = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=getattr(torch, dtype), **file
            )
        # The caller of `generate` decides what ends an answer, not the file.
        model.generation_config.eos_token_id = None
        self._model = model.to(self.device).eval()

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
        """Scores ``[len(answer), vocab_size]`` float32 that each token of `answer` is chosen from."""
        tokens = torch.tensor([[*prompt, *answer[:-1]]], device=self.device)
        scores = self._model(tokens).logits[0, len(prompt) - 1 :]
        return scores.float().cpu().numpy()

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_token_ids: Sequence[int]
    ) -> tuple[list[list[int]], float]:
        """Greedy answers, each to its stop token, and the seconds the batch took."""
        width = max(map(len, prompts))
        # Padded on the left, behind a mask.
        tokens = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        started = time.perf_counter()
        output = self._model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=list(stop_token_ids) or None,
            pad_token_id=0,
        )
        rows = output[:, width:].tolist()
        seconds = time.perf_counter() - started
        return [_until_stop(row, stop_token_ids) for row in rows], seconds

    def decode_tokens_per_second(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_token_ids: Sequence[int]
    ) -> float:
        """New tokens per second of its own batched generate, without the prefill and each row's first token, as in
        `Generation`: these are timed by a run that stops there."""
        _, prefill_seconds = self.generate(prompts, 1, stop_token_ids)
        rows, seconds = self.generate(prompts, max_new_tokens, stop_token_ids)
        return sum(len(row) - 1 for row in rows) / max(seconds - prefill_seconds, 1e-9)


def _until_stop(row: list[int], stop_token_ids: Sequence[int]) -> list[int]:
    ends = [index for index, token in enumerate(row) if token in stop_token_ids]
    return row[: ends[0] + 1] if ends else row


def compare(
    reference: TransformersModel,
    prompts: Sequence[Sequence[int]],
    ours: Generation,
    *,
    stop_token_ids: Sequence[int],
) -> list[PromptComparison]:
    """Runs greedy decoding in transformers and holds our answers against it.

    Args:
        reference: the same file in the same dtype.
        prompts: the token ids `ours` was generated from.
        ours: a greedy `generate` with ``return_logits=True``.
        stop_token_ids: as given to `generate`.

    Returns:
        One entry per prompt.

    Raises:
        ValueError: `ours` holds no logits.
    """
    if ours.logits is None:
        fail("compare", "ours", "a result of generate(..., return_logits=True)", "one without logits")
    theirs, _ = reference.generate(prompts, ours.tokens.shape[1], stop_token_ids)
    rows = []
    for index, prompt in enumerate(prompts):
        mine = ours.row(index)
        scores = reference.logits(prompt, mine)
        difference = float(np.max(np.abs(scores - ours.logits[index, : len(mine)])))
        pairs = zip(mine, theirs[index], strict=False)
        num_equal = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(mine), len(theirs[index])))
        rows.append(PromptComparison(mine == theirs[index], num_equal, len(mine), difference))
    return rows
