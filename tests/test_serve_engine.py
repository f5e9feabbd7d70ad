"""The server over a real engine: answers are `generate`'s, whatever runs beside them and whoever goes away."""

import contextlib
import functools
import http.client
import json
import random
import threading

import pytest
from serve_support import END, byte_tokenizer, engine, model, post, running

from pallas_attn.models import Sampling, generate

PROMPTS = [
    "Once upon a time there was a king.",
    "Once upon a time there was a queen.",
    "x",
    "abc " * 20,
    "日本語",
    "Once upon a time there was a king who",
]
LENGTH = 40


@pytest.fixture(scope="module")
def server():
    with running() as found:
        yield found


@functools.cache
def answers(sampling: Sampling = Sampling()) -> list[list[int]]:  # noqa: B008
    """One batch, not one by one: by what `generate` promises these are the same."""
    tokenizer = byte_tokenizer()
    generation = generate(
        model(),
        [tokenizer.encode(prompt) for prompt in PROMPTS],
        max_new_tokens=LENGTH,
        stop_token_ids=[END],
        sampling=sampling,
    )
    return [generation.row(index) for index in range(len(generation.tokens))]


def test_answers_are_those_of_generate(server):
    tokenizer, client = byte_tokenizer(), server.client
    options = dict(model="tiny", max_tokens=LENGTH, temperature=0)
    together = client.completions.create(prompt=PROMPTS, **options)
    for choice, prompt, expected in zip(together.choices, PROMPTS, answers(), strict=True):
        text = tokenizer.decode(expected)
        assert choice.text == text
        alone = client.completions.create(prompt=tokenizer.encode(prompt), **options)
        assert alone.choices[0].text == text
        assert alone.usage.completion_tokens == len(expected)
        assert alone.choices[0].finish_reason == ("stop" if expected[-1] == END else "length")
        events = list(client.completions.create(prompt=prompt, stream=True, **options))
        assert "".join(event.choices[0].text for event in events) == text


def test_what_was_found_in_the_cache_is_told(server):
    def usage(text):
        messages = [{"role": "user", "content": text}]
        said = server.client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=2, temperature=0
        )
        return said.usage

    first, second = usage("what is said once is known " * 3), usage("what is said once is known " * 3)
    assert first.prompt_tokens == second.prompt_tokens
    assert first.prompt_tokens_details.cached_tokens < 16
    assert second.prompt_tokens - 10 < second.prompt_tokens_details.cached_tokens < second.prompt_tokens


@pytest.mark.once
@pytest.mark.slow
def test_samples_are_those_of_generate(server):
    """Drawn, several to a prompt, with log-probabilities."""
    expected = answers(Sampling(temperature=1.5, seed=3, n=2, frequency_penalty=0.5, logprobs=2))
    said = server.client.completions.create(
        model="tiny",
        prompt=PROMPTS,
        max_tokens=LENGTH,
        temperature=1.5,
        seed=3,
        n=2,
        frequency_penalty=0.5,
        logprobs=2,
    )
    decode = byte_tokenizer().decode
    assert [choice.text for choice in said.choices] == [decode(row) for row in expected]
    for choice, row in zip(said.choices, expected, strict=True):
        logprobs = choice.logprobs
        assert len(logprobs.tokens) == len(row) - (row[-1] == END)
        assert all(logprob <= 0 for logprob in logprobs.token_logprobs)
        assert all(1 <= len(top) <= 2 for top in logprobs.top_logprobs)
    # Without a seed no two are alike.
    drawn = {
        server.client.completions.create(model="tiny", prompt="x", max_tokens=20, frequency_penalty=0.5, logprobs=1)
        .choices[0].text for _ in range(4)
    }  # fmt: skip
    assert len(drawn) > 1


CLIENTS, ROUNDS = 64, 4


@pytest.mark.slow
def test_many_clients_some_of_whom_go_away(server):
    """Nothing is lost: each answer that was waited for is the one of its prompt, and each page comes back."""
    decode, wrong, kept = byte_tokenizer().decode, [], []

    def visit(seed):
        rng = random.Random(seed)
        for _ in range(ROUNDS):
            place, count, stream = rng.randrange(len(PROMPTS)), rng.randint(1, LENGTH), rng.random() < 0.5
            asked = {"prompt": PROMPTS[place], "max_tokens": count, "temperature": 0, "stream": stream}
            with server.raw() as connection:
                connection.sendall(post("/v1/completions", asked))
                if rng.random() < 0.3:  # gone, before the answer or in the middle
                    if rng.random() < 0.7:
                        connection.settimeout(rng.random() * 0.3)
                        with contextlib.suppress(TimeoutError):
                            connection.recv(1)
                    continue
                answer = http.client.HTTPResponse(connection)
                answer.begin()
                text = text_of(answer.read(), stream)
                kept.append(place)
                if text != (expected := decode(answers()[place][:count])):
                    wrong.append((place, count, stream, text, expected))

    answers()
    threads = [threading.Thread(target=visit, args=(seed,)) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(kept) > CLIENTS * ROUNDS / 2
    while engine().busy:  # what the last ones have left behind
        pass
    stats = engine().stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.finished["cancelled"] > 0
    assert stats.free_pages + stats.cached_pages == stats.pages


def text_of(body: bytes, stream: bool) -> str:
    if not stream:
        return json.loads(body)["choices"][0]["text"]
    *events, done, _ = body.split(b"\n\n")
    assert done == b"data: [DONE]"
    return "".join(json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events)
