"""Every setting of `Sampling`: what it does to a row, that no row touches another's, and that `generate` and `Engine`
serve the same."""

import dataclasses
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models_support import TINY, import_torch, tiny_llama

from pallas_attn.models import Engine, Sampling, choosing, generate
from pallas_attn.models.sampling import How, Rows
from pallas_attn.models.stopping import Held, first_stop

VOCAB = 97
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15]]


def logits_of(seed: int, rows: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (rows, VOCAB)).astype(np.float32)


@pytest.fixture(scope="module")
def choose():
    program = jax.jit(choosing.choose, static_argnums=3)

    def run(logits, samplings, texts=None, places=None, how=None) -> np.ndarray:
        """texts: (prompt, answer) of each row."""
        how, seen = how or How.of(samplings), None
        if how.penalised:
            texts = texts or [((), ())] * len(logits)
            tokens = np.full((len(texts), 12), -1, np.int32)
            for row, (prompt, answer) in zip(tokens, texts, strict=True):
                row[: len(prompt) + len(answer)] = [*prompt, *answer]
            lengths = np.array([len(prompt) for prompt, _ in texts], np.int32)
            seen = choosing.Seen.of(jnp.asarray(tokens), jnp.asarray(lengths), logits.shape[-1])
        places = np.arange(len(logits), dtype=np.int32) if places is None else places
        return np.asarray(program(jnp.asarray(logits), jnp.asarray(places), Rows.of(samplings), how, seen))

    return run


def support(choose, logits: np.ndarray, sampling: Sampling, draws: int = 3000) -> set[int]:
    many = np.broadcast_to(logits, (draws, logits.shape[-1]))
    return set(choose(many, [sampling] * draws).tolist())


@pytest.mark.parametrize(
    "setting",
    [
        dict(top_k=5),
        dict(top_p=0.7),
        dict(min_p=0.2),
        dict(top_k=8, top_p=0.8),
        dict(top_k=20, top_p=0.9, min_p=0.05),
        dict(repetition_penalty=1.7, top_k=3),
        dict(temperature=2.5, top_p=0.3),
    ],
)
def test_the_tokens_to_draw_from_are_those_of_transformers(choose, setting):
    torch = import_torch()
    from transformers.generation import logits_process

    sampling, row = Sampling(**{"temperature": 1.5, **setting}), logits_of(1)
    prompt = [3, 4, 5, int(row.argmax())]
    processors: list[Any] = [
        logits_process.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        logits_process.TemperatureLogitsWarper(sampling.temperature),
    ]
    if sampling.top_k:
        processors.append(logits_process.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(logits_process.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(logits_process.MinPLogitsWarper(sampling.min_p))
    scores = torch.tensor(row)
    for processor in processors:
        scores = processor(torch.tensor([prompt]), scores)
    expected = torch.softmax(scores[0], -1).numpy()
    draws = 20000
    many = np.broadcast_to(row, (draws, VOCAB))
    got = np.bincount(choose(many, [sampling] * draws, [(prompt, ())] * draws), minlength=VOCAB) / draws
    assert set(np.flatnonzero(got)) <= set(np.flatnonzero(expected))
    np.testing.assert_allclose(got, expected, atol=0.02)


def test_equal_tokens_are_counted_by_their_ids(choose):
    """100 equal ones: the fewest that reach 0.1 are 10, and the 7 likeliest are the first."""
    equal = np.zeros((1, 100), np.float32)
    assert support(choose, equal, Sampling(1.0, top_p=0.1)) == set(range(10))
    assert support(choose, equal, Sampling(1.0, top_k=7)) == set(range(7))
    assert choose(equal, [Sampling()]).tolist() == [0]
    mixed = equal.copy()
    mixed[0, [40, 60, 80]] = 5.0
    assert support(choose, mixed, Sampling(1.0, top_k=2)) == {40, 60}


def test_penalties_are_what_they_say(choose):
    row = logits_of(2)
    best, second = np.argsort(-row[0])[:2]
    gap = float(row[0, best] - row[0, second])

    def chosen(text, **penalty) -> int:
        return int(choose(row, [Sampling(**penalty)], [text])[0])

    once, twice, asked = ((), (best,)), ((), (best, best)), ((best,), ())
    for name in ("presence_penalty", "frequency_penalty"):
        assert chosen(once, **{name: gap * 1.01}) == second
        assert chosen(once, **{name: gap * 0.99}) == best
        assert chosen(asked, **{name: gap * 2}) == best, "prompts are not penalised"
    assert chosen(twice, frequency_penalty=gap * 0.6) == second
    assert chosen(twice, presence_penalty=gap * 0.6) == best
    ratio = float(row[0, best] / row[0, second])
    assert chosen(asked, repetition_penalty=ratio * 1.01) == second
    assert chosen(asked, repetition_penalty=ratio * 0.99) == best


def test_what_is_infinitely_likely_is_drawn(choose):
    """By its logits, or by a penalty, there is nothing that the others could be drawn for."""
    row = logits_of(2)
    row[0, 7] = np.inf
    drawn = dict(temperature=1.0, top_p=0.9)
    assert choose(row, [Sampling(**drawn)])[0] == 7
    for penalty in (dict(frequency_penalty=-3e38), dict(presence_penalty=-3e38, frequency_penalty=-3e38)):
        assert choose(logits_of(2), [Sampling(**drawn, **penalty)], [((), (9, 9))])[0] == 9


EACH: list[dict[str, Any]] = [
    {},
    dict(temperature=1.0),
    dict(temperature=1.0, top_k=4, seed=3),
    dict(temperature=0.7, top_p=0.6, seed=4),
    dict(temperature=1.5, min_p=0.1),
    dict(repetition_penalty=1.5),
    dict(temperature=1.0, frequency_penalty=0.5, presence_penalty=0.3),
]


def test_a_row_does_not_depend_on_its_neighbours(choose):
    samplings = [Sampling(**setting) for setting in EACH]
    logits, places = logits_of(3, len(EACH)), np.arange(20, 20 + len(EACH), dtype=np.int32)
    texts = [((row, 3), (row + 1, row + 1)) for row in range(len(EACH))]
    together = choose(logits, samplings, texts, places)
    order = np.random.default_rng(0).permutation(len(EACH))
    transposed = choose(
        logits[order], [samplings[i] for i in order], [texts[i] for i in order], places[order]
    )
    np.testing.assert_array_equal(transposed, together[order])
    for row, sampling in enumerate(samplings):
        alone = choose(logits[[row]], [sampling], [texts[row]], places[[row]])
        assert alone[0] == together[row], EACH[row]


class Letters:
    """A tokenizer of a letter a token."""

    def decode(self, ids, **_) -> str:
        return "".join(chr(ord("!") + i) for i in ids)


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def by_generate(model, samplings, **options):
    got = generate(model, PROMPTS, max_new_tokens=10, page_size=4, sampling=samplings, **options)
    return [got.row(row) for row in range(len(got.tokens))], got.logprobs


def by_engine(model, samplings, order=(0, 1), **options):
    engine = Engine(model, num_rows=4, page_size=4, max_len=24, step_tokens=8, burst=3, **options)
    requests = {
        index: engine.submit_all(PROMPTS[index], max_new_tokens=10, sampling=samplings[index])
        for index in order
    }
    while engine.busy:
        engine.step()
    answers = [request for index in range(len(PROMPTS)) for request in requests[index]]
    return [request.answer for request in answers], [request.logprobs for request in answers]


SERVED: dict[str, tuple[Sampling, Sampling]] = {
    "drawn": (Sampling(1.3, 30, 0.9, 7, min_p=0.01), Sampling()),
    "penalties": (
        Sampling(repetition_penalty=1.4, frequency_penalty=0.4),
        Sampling(1.0, presence_penalty=1.0, seed=2),
    ),
    "logprobs": (Sampling(logprobs=3), Sampling(1.0, seed=5, logprobs=0)),
    "several": (Sampling(1.0, seed=8, n=2), Sampling(1.5, seed=9)),
}


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.parametrize("name", SERVED)
def test_generate_and_engine_serve_the_same(model, name):
    samplings = SERVED[name]
    answers, logprobs = by_generate(model, samplings)
    for order in ((0, 1), (1, 0)):
        served, reported = by_engine(model, samplings, order)
        assert served == answers
        for ours, theirs in zip(logprobs, reported, strict=True):
            assert len(ours) == len(theirs)
            for one, other in zip(ours, theirs, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert [token for token, _ in one.top] == [token for token, _ in other.top]
    plain, _ = by_generate(model, Sampling())
    assert answers[0] != plain[0] or name == "logprobs"
    assert len(answers) == sum(sampling.n for sampling in samplings)
    if name == "several":
        assert answers[0] != answers[1]
        alone, _ = by_generate(model, (Sampling(1.0, seed=9), Sampling()))
        assert answers[1] == alone[0], "the second answer has the next seed"


@pytest.mark.once
def test_logprobs_are_the_models(model):
    got = generate(
        model, PROMPTS, max_new_tokens=6, page_size=4, return_logits=True,
        sampling=Sampling(1.0, seed=4, top_k=2, presence_penalty=2.0, logprobs=3),
    )  # fmt: skip
    logs = np.asarray(jax.nn.log_softmax(got.logits, axis=-1))
    for row in range(2):
        for column, token in enumerate(got.row(row)):
            one = got.logprobs[row][column]
            assert one.logprob == pytest.approx(logs[row, column, token], abs=1e-5)
            best = np.argsort(-logs[row, column], kind="stable")[:3]
            assert [token for token, _ in one.top] == best.tolist()
            np.testing.assert_allclose([value for _, value in one.top], logs[row, column, best], atol=1e-5)


@pytest.mark.once
def test_what_ends_an_answer(model):
    """A token of the request's own, and a text, which may lie across tokens."""
    (answer, other), _ = by_generate(model, Sampling())
    text = Letters().decode(answer)
    # The first place where two tokens make a text that was not there before.
    at = next(i for i in range(1, 9) if text[i : i + 2] not in text[: i + 1])
    stops = Sampling(stop=[text[at : at + 2]], stop_token_ids=())
    ids = Sampling(stop_token_ids=[answer[at]])
    first = answer.index(answer[at]) + 1
    for serve in (by_generate, by_engine):
        served, _ = serve(model, (stops, Sampling()), tokenizer=Letters())
        assert served == [answer[: at + 2], other]
        assert stops.cut(Letters().decode(served[0])) == text[:at]
        served, _ = serve(model, (ids, Sampling()))
        assert served == [answer[:first], other]
    with pytest.raises(ValueError, match=r"generate: argument 'tokenizer': expected one, for texts that end"):
        generate(model, PROMPTS, sampling=stops)
    engine = Engine(model, num_rows=1, page_size=4, max_len=24)
    with pytest.raises(ValueError, match=r"'sampling.stop': expected none in an Engine without tokenizer"):
        engine.submit(PROMPTS[0], sampling=stops)
    with pytest.raises(
        ValueError, match=r"'sampling.n': expected 1 \(submit_all gives several answers\), got 2"
    ):
        engine.submit(PROMPTS[0], sampling=Sampling(n=2))


@pytest.mark.once
@pytest.mark.slow
def test_penalties_survive_being_sent_back(model):
    """Two requests and pages for hardly more than one: what was said before counts on."""
    samplings = (Sampling(repetition_penalty=1.4, frequency_penalty=0.4),) * 2
    expected, _ = by_generate(model, samplings)
    engine = Engine(model, num_rows=2, page_size=4, max_len=24, step_tokens=8, burst=3, num_pages=6)
    requests = [engine.submit(prompt, max_new_tokens=10, sampling=samplings[0]) for prompt in PROMPTS]
    while engine.busy:
        engine.step()
    assert [request.answer for request in requests] == expected
    assert any(request.preempted for request in requests)


def test_texts_are_found_as_tokens_come():
    decode = Letters().decode
    assert first_stop(decode, [1, 2], [3, 4, 5], [decode([2, 3, 4])]) == 2
    assert first_stop(decode, [1, 2], [3, 4, 5], [decode([9])]) is None
    looks = []
    assert first_stop(lambda ids: looks.append(ids) or decode(ids), [], [3, 4, 5], [decode([9])]) is None
    assert len(looks) == 1
    # Some decoders show nothing of bytes that end within a character, and the text was there all the same.
    broken = [*"aé".encode(), 0xE2]

    def strict(ids):
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(ids)

    assert first_stop(strict, [], broken, ["é"]) == 3
    held = Held(["end", "ne"])
    assert [held.shown(piece) for piece in ("a e", "x", " en", "d b")] == ["a ", "ex", " ", ""]
    assert (held.ended, held.rest()) == (True, "")
    held = Held(["end"])
    assert (held.shown("the e"), held.rest(), held.ended) == ("the ", "e", False)
    assert Held([]).shown("end") == "end"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Sampling()),
        (dict(do_sample=False, temperature=0.6, top_p=0.9), Sampling()),
        (dict(do_sample=True), Sampling(1.0, 50)),
        (
            dict(do_sample=True, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05),
            Sampling(0.7, 20, 0.8, repetition_penalty=1.05),
        ),
        (dict(do_sample=True, top_k=0, min_p=0.1), Sampling(1.0, None, min_p=0.1)),
    ],
)
def test_what_a_model_asks_for(settings, expected):
    assert Sampling.from_generation_config(settings) == expected


@pytest.mark.parametrize(
    ("name", "value", "usual"),
    [
        ("num_beams", 4, 1),
        ("typical_p", 0.9, 1.0),
        ("no_repeat_ngram_size", 3, 0),
        ("suppress_tokens", [1, 2], []),
    ],
)
def test_what_a_model_asks_for_in_vain_is_said(name, value, usual):
    asked = Sampling.from_generation_config({name: usual, "max_new_tokens": 9})
    with pytest.warns(
        UserWarning, match=rf"generation_config.json: {name} = {re.escape(str(value))} is not served"
    ):
        assert Sampling.from_generation_config({name: value}) == asked


@pytest.mark.usefixtures("as_users_have_it")
def test_what_a_model_asks_for_is_checked():
    with pytest.raises(
        TypeError, match=r"^Sampling: argument 'repetition_penalty': expected a number, got 'high'"
    ):
        Sampling.from_generation_config({"repetition_penalty": "high"})


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (dict(temperature=-1.0), ValueError, "'temperature': expected a finite number of at least 0, got -1.0"),
        (dict(temperature=float("nan")), ValueError, "'temperature': expected a finite number of at least 0"),
        (dict(temperature=1e39), ValueError, "'temperature': expected a finite number of at least 0"),
        (dict(temperature=np.float16("inf")), ValueError, "'temperature': expected a finite number"),
        (dict(temperature="1"), TypeError, "'temperature': expected a number, got '1' of type str"),
        (dict(top_p=0.0), ValueError, "'top_p': expected a number in (0, 1], got 0.0"),
        (dict(top_k=0), ValueError, "'top_k': expected at least 1, got 0"),
        (dict(min_p=1.5), ValueError, "'min_p': expected a number in [0, 1], got 1.5"),
        (dict(repetition_penalty=0), ValueError, "'repetition_penalty': expected a finite number above 0, got 0"),
        (dict(presence_penalty=float("inf")), ValueError, "'presence_penalty': expected a finite number, got inf"),
        (dict(seed=-1), ValueError, "'seed': expected at least 0, got -1"),
        (dict(seed=2**32), ValueError, "'seed': expected at most 4294967295, got 4294967296"),
        (dict(seed=0.5), TypeError, "'seed': expected an int, got 0.5 of type float"),
        (dict(stop=[3]), TypeError, "'stop': expected strings, got [3] of type list"),
        (dict(stop=""), ValueError, "'stop': expected strings with at least one character, got ''"),
        (dict(stop_token_ids=[2**31]), ValueError, "'stop_token_ids': expected token ids in [0, 2**31), got"),
        (dict(stop_token_ids=range(17)), ValueError, "'stop_token_ids': expected at most 16 of them, got 17"),
        (dict(logprobs=21), ValueError, "'logprobs': expected at most 20, got 21"),
        (dict(n=0), ValueError, "'n': expected at least 1, got 0"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("as_users_have_it")
def test_settings_are_checked(settings, error, message):
    with pytest.raises(error, match=f"^Sampling: argument {re.escape(message)}"):
        Sampling(**settings)


def test_the_command_line_changes_what_a_model_asks_for():
    from pallas_attn.cli.generate import sampling_of

    asked = Sampling(0.7, 20, repetition_penalty=1.1)
    said = dict(temperature=None, top_k=5, min_p=0.0, stop=["x"], seed=3, n=2)
    expected = Sampling(0.7, 5, seed=3, repetition_penalty=1.1, stop=["x"], n=2)
    assert sampling_of(asked, said) == expected


@pytest.mark.parametrize("stop", [-1, VOCAB, 2**31 - 1, 2**31])
def test_stop_ids_that_are_no_tokens_are_refused_where_they_are_given(model, stop):
    expected = rf"argument '%s': expected token ids in \[0, {VOCAB}\), got {stop}$"
    with pytest.raises(ValueError, match="^Engine: " + expected % "stop_token_ids"):
        Engine(model, num_rows=1, max_len=24, stop_token_ids=[3, stop])
    with pytest.raises(ValueError, match="^generate: " + expected % "stop_token_ids"):
        generate(model, PROMPTS, stop_token_ids=[3, stop])
    if 0 <= stop < 2**31:  # a Sampling by itself does not know the vocabulary
        sampling, engine = Sampling(stop_token_ids=[3, stop]), Engine(model, num_rows=1, max_len=24)
        with pytest.raises(ValueError, match=r"^Engine.submit: " + expected % "sampling.stop_token_ids"):
            engine.submit(PROMPTS[0], max_new_tokens=2, sampling=sampling)
        with pytest.raises(ValueError, match="^generate: " + expected % "sampling.stop_token_ids"):
            generate(model, PROMPTS, sampling=sampling)
        assert not engine.busy


def test_a_sampling_can_be_compared_and_kept():
    one = Sampling(stop="a", stop_token_ids=[3])
    assert one == Sampling(stop=["a"], stop_token_ids=(3,))
    assert hash(one) == hash(dataclasses.replace(one))
    assert json.loads(json.dumps(dataclasses.asdict(one)))["stop"] == ["a"]
    assert TINY.vocab_size == VOCAB


def test_more_than_any_vocabulary_is_all_of_it():
    rows = Rows.greedy(2)
    for row, top_k in enumerate((None, 2**40)):
        rows.fill(row, Sampling(temperature=1.0, top_k=top_k))
    assert rows.top_k[0] == rows.top_k[1] == 2**31 - 1
