"""How a request's tokens are chosen: its settings, and arrays of many rows' settings for the device (choosing.py)."""

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pallas_attn._call.checks import LARGEST_FLOAT32, LEAST_FLOAT32, check_int, fail, is_number, plain

from .arguments import checked_tokens, described

MOST_STOPS = 16
"""The most stop ids of a request's own; the device checks this many for each row."""
MOST_LOGPROBS = 20
_EVERY = int(np.iinfo(np.int32).max)  # larger than any vocabulary
# Of transformers' generation, with the values that change nothing.
_UNSERVED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("num_beams", "num_beam_groups", "guidance_scale", "encoder_repetition_penalty", "typical_p"), (1,)
    ),
    **dict.fromkeys(
        ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), (0,)
    ),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "diversity_penalty"), (0,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"), ([], {})),
    **dict.fromkeys(
        ("stop_strings", "forced_bos_token_id", "forced_eos_token_id", "watermarking_config"), ([],)
    ),
    **dict.fromkeys(("exponential_decay_length_penalty", "top_h", "dola_layers"), ()),
}


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen, and what ends it. `generate`, `Engine` and the command line take the same.

    Penalties come first, then the temperature, then what cuts tokens off.

    Attributes:
        temperature: 0 takes the most likely token; above 0 the logits are divided by it and sampled. What is too small
            to divide by in float32 (below 1.2e-38) is 0.
        top_k: sample among so many of the most likely tokens; None: all. Of equal ones the lower id counts as likelier,
            here and below.
        top_p: in (0, 1]: sample among the fewest tokens whose probabilities together reach it.
        seed: in ``[0, 2**32)``. What is drawn depends on it and on the place in the text alone.
        min_p: in [0, 1]: leave out what is less probable than the likeliest token by this factor.
        repetition_penalty: above 0; positive logits of tokens of the prompt and the answer are divided by it, negative
            ones multiplied.
        presence_penalty, frequency_penalty: subtracted from the logits of the answer's tokens: once, and as often as
            they are there.
        stop: texts that end the answer, and are no part of it; they need a tokenizer.
        stop_token_ids: up to 16 tokens that end this answer, besides those that end every one.
        logprobs: None, or how many of the likeliest tokens (up to 20) to report with each token: log-probabilities by
            the model, before penalties, temperature and cuts.
        n: answers to the prompt; the seed of each is one more than that before.

    Raises:
        TypeError, ValueError: a field of another type or out of its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self):
        numbers = {"temperature": "a finite number of at least 0", "top_p": "a number in (0, 1]"}
        numbers |= {"min_p": "a number in [0, 1]", "repetition_penalty": "a finite number above 0"}
        numbers |= dict.fromkeys(("presence_penalty", "frequency_penalty"), "a finite number")
        for name, expected in numbers.items():
            if not is_number(value := getattr(self, name)):
                fail("Sampling", name, "a number", described(value), TypeError)
            value = plain(value)
            fits = {
                "temperature": 0 <= value <= LARGEST_FLOAT32,
                "top_p": 0 < value <= 1,
                "min_p": 0 <= value <= 1,
                "repetition_penalty": LEAST_FLOAT32 <= value <= LARGEST_FLOAT32,
            }.get(name, -LARGEST_FLOAT32 <= value <= LARGEST_FLOAT32)
            if not fits:
                fail("Sampling", name, expected, str(getattr(self, name)))
        # JAX would use only the lower 32 bits of larger ones.
        check_int("Sampling", "seed", self.seed, least=0, most=2**32 - 1)
        if self.top_k is not None:
            check_int("Sampling", "top_k", self.top_k, least=1)
        if self.logprobs is not None:
            check_int("Sampling", "logprobs", self.logprobs, least=0, most=MOST_LOGPROBS)
        check_int("Sampling", "n", self.n, least=1)
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, Sequence) or not all(isinstance(text, str) for text in stops):
            fail("Sampling", "stop", "strings", described(self.stop), TypeError)
        if "" in stops:
            fail("Sampling", "stop", "strings with at least one character", "''")
        ids = checked_stops("Sampling", self.stop_token_ids)
        if len(ids) > MOST_STOPS:
            fail("Sampling", "stop_token_ids", f"at most {MOST_STOPS} of them", str(len(ids)))
        # Tuples, so that a Sampling is hashable and can be compared.
        object.__setattr__(self, "stop", tuple(stops))
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def greedy(self) -> bool:
        return plain(self.temperature) < LEAST_FLOAT32

    @property
    def penalised(self) -> bool:
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        return any(penalties)

    def answers(self) -> list["Sampling"]:
        """The sampling of each of the `n` answers."""
        return [self.shifted(index) for index in range(self.n)]

    def shifted(self, by: int) -> "Sampling":
        """The same for one answer, with another seed."""
        return dataclasses.replace(self, seed=(self.seed + by) % 2**32, n=1)

    def cut(self, text: str) -> str:
        """An answer's text without the first stop text and what follows it."""
        ends = [found for stop in self.stop if (found := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    @classmethod
    def from_generation_config(cls, settings: Mapping[str, Any]) -> "Sampling":
        """What a model's generation_config.json asks for, with transformers' defaults. Warns of what would change
        answers and is not served."""
        for name, values in _UNSERVED.items():
            if (asked := settings.get(name)) is not None and asked not in values:
                warnings.warn(
                    f"load_checkpoint: generation_config.json: {name} = {asked!r:.60} is not served, and passed over",
                    stacklevel=2,
                )
        options: dict[str, Any] = {}
        if (penalty := settings.get("repetition_penalty")) is not None:
            options["repetition_penalty"] = penalty
        if settings.get("do_sample"):
            usual = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
            given = {name: settings[name] for name in usual if settings.get(name) is not None}
            options |= usual | given
            options["top_k"] = options["top_k"] or None
        return cls(**options)


def checked_stops(
    function: str, tokens: Any, vocab_size: int | None = None, name: str = "stop_token_ids"
) -> tuple[int, ...]:
    """Ids that a token of the vocabulary may have; None: of any."""
    ids = checked_tokens(function, name, tokens)
    for token in ids:
        if not 0 <= token < (vocab_size or 2**31):
            fail(function, name, f"token ids in [0, {vocab_size or '2**31'})", str(token))
    return ids


class Rows(NamedTuple):
    """`Sampling` of many rows, each field [num_rows], stops [num_rows, 16]; a temperature of 0 is greedy."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    repetition_penalty: Any
    presence_penalty: Any
    frequency_penalty: Any
    seed: Any
    stops: Any

    @classmethod
    def greedy(cls, num_rows: int) -> "Rows":
        """Arrays on the host, to be filled in."""
        usual = (0.0, _EVERY, 1.0, 0.0, 1.0, 0.0, 0.0, 0)
        dtypes = (np.float32, np.int32, *[np.float32] * 5, np.uint32)
        fields = [np.full(num_rows, value, dtype) for value, dtype in zip(usual, dtypes, strict=True)]
        return cls._make([*fields, np.full((num_rows, MOST_STOPS), -1, np.int32)])

    @classmethod
    def of(cls, samplings: Sequence[Sampling]) -> "Rows":
        rows = cls.greedy(len(samplings))
        for row, sampling in enumerate(samplings):
            rows.fill(row, sampling)
        return rows

    def fill(self, row: int, sampling: Sampling) -> None:
        self.temperature[row] = 0.0 if sampling.greedy else sampling.temperature
        self.top_k[row] = min(sampling.top_k or _EVERY, _EVERY)
        for name in ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"):
            getattr(self, name)[row] = getattr(sampling, name)
        self.stops[row] = -1
        self.stops[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids


class How(NamedTuple):
    """The features that a program is compiled with: only those that some row needs."""

    sampled: bool = False
    cut: bool = False
    penalised: bool = False
    logprobs: bool = False

    @classmethod
    def of(cls, samplings: Iterable[Sampling]) -> "How":
        samplings = list(samplings)
        drawn = [each for each in samplings if not each.greedy]
        return cls(
            sampled=bool(drawn),
            cut=any(each.top_k is not None or each.top_p < 1 or each.min_p > 0 for each in drawn),
            penalised=any(each.penalised for each in samplings),
            logprobs=any(each.logprobs is not None for each in samplings),
        )


class TokenLogprobs(NamedTuple):
    """Log-probabilities by the model, of the token that was chosen and of the likeliest ones, likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logs: Any, index: Any, most: int) -> TokenLogprobs:
    """From one entry of `choosing.Logprobs` on the host."""
    top = zip(logs.ids[index][:most].tolist(), logs.top[index][:most].tolist(), strict=True)
    return TokenLogprobs(float(logs.chosen[index]), tuple(top))
