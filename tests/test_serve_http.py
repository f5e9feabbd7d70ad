"""The server over a scripted engine: what is answered, what is refused and how, keys, ends."""

import contextlib
import http.client
import json
import threading

import openai
import pytest
from serve_support import NUM_ROWS, byte_tokenizer, post, running, scripted, waited

from pallas_attn.serve import Limits

pytestmark = pytest.mark.once

TEXT = "Größe: 日本 🙂 and so on"
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server():
    with running(served_=scripted(TEXT)) as found:
        yield found


def exchanged(server, request: bytes) -> tuple[http.client.HTTPResponse, bytes]:
    """The answer to raw bytes."""
    with server.raw() as connection:
        connection.sendall(request)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer, answer.read()


def error_of(body: bytes) -> dict:
    return json.loads(body)["error"]


def test_streams_say_what_answers_say(server):
    whole = server.client.chat.completions.create(model="tiny", messages=HELLO)
    assert whole.choices[0].message.content == TEXT
    assert whole.choices[0].finish_reason == "stop"
    stream = server.client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    *events, last = stream
    assert [event.choices[0].delta.role for event in events][:2] == ["assistant", None]
    pieces = [event.choices[0].delta.content or "" for event in events]
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(map(bool, pieces)) > 1
    assert [event.choices[0].finish_reason for event in events][-2:] == [None, "stop"]
    assert all(event.usage is None for event in events)
    assert not last.choices
    assert last.usage == whole.usage

    said = server.client.completions.create(model="tiny", prompt="x", max_tokens=64)
    assert said.choices[0].text == TEXT
    events = list(server.client.completions.create(model="tiny", prompt="x", max_tokens=64, stream=True))
    assert "".join(event.choices[0].text for event in events) == TEXT
    assert events[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_texts_are_no_part_of_an_answer(server, stream):
    options = dict(model="tiny", prompt="x", max_tokens=64, stop=["nd so", "本 🙃"], stream=stream)
    answer = server.client.completions.create(**options)
    events = list(answer) if stream else [answer]
    assert "".join(event.choices[0].text for event in events) == "Größe: 日本 🙂 a"
    assert events[-1].choices[0].finish_reason == "stop"


def test_an_answer_that_is_cut_says_so(server):
    answer = server.client.completions.create(model="tiny", prompt="x", max_tokens=4)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Grö", "length")
    assert answer.usage.completion_tokens == 4
    several = server.client.completions.create(model="tiny", prompt=["x", "yz"], max_tokens=2, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.usage.prompt_tokens == 3
    assert several.usage.completion_tokens == 8


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called(stream):
    says = 'I add.<tool_call>{"name": "add", "arguments": {"a": [1, "ü"]}}</tool_call>'
    with running(served_=scripted(says)) as server:
        create = server.client.chat.completions.create
        answer = create(model="tiny", messages=HELLO, tools=[TOOL], stream=stream)
        if stream:
            deltas = [event.choices[0] for event in answer]
            content = "".join(each.delta.content or "" for each in deltas)
            (call,) = [call for each in deltas for call in each.delta.tool_calls or ()]
            assert call.index == 0
            reason = deltas[-1].finish_reason
        else:
            message, reason = answer.choices[0].message, answer.choices[0].finish_reason
            content, (call,) = message.content, message.tool_calls
        assert (content, reason, call.type) == ("I add.", "tool_calls", "function")
        assert call.function.name == "add"
        assert json.loads(call.function.arguments) == {"a": [1, "ü"]}
        # The conversation goes on with what was answered, as the client has it.
        if not stream:
            result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
            create(model="tiny", messages=[*HELLO, message, result], tools=[TOOL])
            prompt = byte_tokenizer().decode(server.app.worker.engine.submitted[-1].prompt)
            assert 'add{"a": [1, "ü"]}' in prompt
        # Without tools, and with those that are not to be called, it is text.
        for none in ({}, {"tools": [TOOL], "tool_choice": "none"}):
            plain = create(model="tiny", messages=HELLO, **none).choices[0]
            assert (plain.message.content, plain.finish_reason) == (says, "stop")


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MALFORMED = [
    (COMPLETION, b"", 400, "body: expected JSON"),
    (COMPLETION, b"{", 400, "body: expected JSON"),
    (COMPLETION, b'{"prompt": "\xff"}', 400, "body: expected JSON"),
    (COMPLETION, b'{"prompt": "x", "top_p": NaN}', 400, "NaN is none of JSON's numbers"),
    (COMPLETION, b"[" * 100_000, 400, "body: expected JSON of reasonable depth"),
    (COMPLETION, [], 400, "body: expected a JSON object, got an array"),
    (COMPLETION, {}, 400, "prompt: expected a string or an array, got none"),
    (COMPLETION, {"prompt": 3}, 400, "prompt: expected a string or an array, got 3"),
    (COMPLETION, {"prompt": ""}, 400, "prompt: expected at least one token, got none"),
    (COMPLETION, {"prompt": []}, 400, "prompt: expected at least one token, got none"),
    (COMPLETION, {"prompt": ["x", 3]}, 400, "prompt: expected a string, token ids, or an array of either, got 3"),
    (COMPLETION, {"prompt": [7]}, 400, "prompt: expected no 7, got 7"),  # refused by the engine
    (COMPLETION, {"prompt": "\ud800"}, 400, "prompt: expected text that is Unicode"),
    (COMPLETION, {"prompt": "x" * 300}, 400, "prompt: expected with max_tokens together at most 256 tokens, got 300"),
    (COMPLETION, {"model": "gpt-4"}, 404, "model: expected 'tiny', got 'gpt-4'"),
    (COMPLETION, {"max_tokens": 0}, 400, "max_tokens: expected at least 1, got 0"),
    (COMPLETION, {"max_tokens": 1.5}, 400, "max_tokens: expected an integer, got 1.5"),
    (COMPLETION, {"max_tokens": 10**6}, 400, "together at most 256 tokens, got 1 + 1000000"),
    (COMPLETION, {"temperature": -1}, 400, "temperature: expected a finite number of at least 0, got -1.0"),
    (COMPLETION, {"temperature": 10**400}, 400, "temperature: expected a number of reasonable size, got"),
    (COMPLETION, {"temperature": "hot"}, 400, 'temperature: expected a number, got "hot"'),
    (COMPLETION, {"temperature": True}, 400, "temperature: expected a number, got true"),
    (COMPLETION, {"top_p": 0}, 400, "top_p: expected a number in (0, 1], got 0.0"),
    (COMPLETION, {"top_k": -2}, 400, "top_k: expected at least 1, got -2"),
    (COMPLETION, {"min_p": 2}, 400, "min_p: expected a number in [0, 1], got 2.0"),
    (COMPLETION, {"repetition_penalty": 0}, 400, "repetition_penalty: expected a finite number above 0"),
    (COMPLETION, {"logprobs": 21}, 400, "logprobs: expected at most 20, got 21"),
    (COMPLETION, {"n": 0}, 400, "n: expected at least 1, got 0"),
    (COMPLETION, {"n": 17}, 400, "n: expected prompts times n of at most 16, got 17"),
    (COMPLETION, {"stop": [1]}, 400, "stop: expected strings, got"),
    (COMPLETION, {"stop": ""}, 400, "stop: expected strings with at least one character"),
    (COMPLETION, {"stop": ["x"] * 17}, 400, "stop: expected at most 16 texts of at most 256 characters"),
    (COMPLETION, {"stop_token_ids": [-1]}, 400, "stop_token_ids: expected token ids in [0,"),
    (COMPLETION, {"stream": "yes"}, 400, 'stream: expected a boolean, got "yes"'),
    (COMPLETION, {"stream_options": {}}, 400, "stream_options: expected none without stream"),
    (COMPLETION, {"stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x: expected no field"),
    (COMPLETION, {"best_of": 2}, 400, "best_of: expected 1 (no other is served), got 2"),
    (COMPLETION, {"echo": True}, 400, "echo: expected false (no other is served), got true"),
    (COMPLETION, {"suffix": "end"}, 400, 'suffix: expected "" (no other is served)'),
    (COMPLETION, {"logit_bias": {"5": 1}}, 400, "logit_bias: expected {} (no other is served)"),
    (COMPLETION, {"tempreature": 0}, 400, "tempreature: expected no field that is not served, got 0"),
    (CHAT, {"messages": "hello"}, 400, 'messages: expected an array, got "hello"'),
    (CHAT, {"messages": []}, 400, "messages: expected at least one, got none"),
    (CHAT, {"messages": ["x"]}, 400, 'messages[0]: expected an object, got "x"'),
    (CHAT, {"messages": [{"role": "clown", "content": ""}]}, 400, "messages[0].role: expected 'system' or"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content: expected a string, got none"),
    (CHAT, {"messages": [*HELLO, {"role": "user", "content": [{"type": "image_url"}]}]}, 400,
     'messages[1].content[0].type: expected "text" (no other is served), got "image_url"'),
    (CHAT, {"messages": [{"role": "user", "content": "x", "mood": 1}]}, 400, "messages[0].mood: expected no field"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]}, 400,
     "messages[0].tool_calls[0].function.arguments: expected an object in JSON"),
    (CHAT, {"tools": [{"type": "retrieval"}]}, 400, 'tools[0].type: expected "function", got "retrieval"'),
    (CHAT, {"tools": [{"function": {"name": "f", "strict": True}}]}, 400, "tools[0].function.strict: expected false"),
    (CHAT, {"tools": [TOOL], "tool_choice": "required"}, 400, 'tool_choice: expected "auto" or "none"'),
    (CHAT, {"response_format": {"type": "json_object"}}, 400, 'response_format: expected {"type": "text"} (no other'),
    (CHAT, {"parallel_tool_calls": False}, 400, "parallel_tool_calls: expected true (no other is served), got false"),
    (CHAT, {"logprobs": 3}, 400, "logprobs: expected a boolean, got 3"),
    (CHAT, {"top_logprobs": 3}, 400, "top_logprobs: expected none without logprobs, got 3"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs: expected no variable named"),
    (CHAT, {"reasoning_effort": "high"}, 400, "reasoning_effort: expected no field that is not served"),
]  # fmt: skip


@pytest.mark.usefixtures("as_users_have_it")
def test_malformed_requests_are_refused_in_words(server):
    assert len(MALFORMED) >= 30
    wrong = []
    for path, given, status, message in MALFORMED:
        usual = {"prompt": "x"} if path == COMPLETION else {"messages": HELLO}
        body = {**usual, **given} if isinstance(given, dict) and given else given
        answer, said = exchanged(server, post(path, body))
        error = error_of(said)
        if answer.status != status or message not in error["message"] or "\n" in error["message"]:
            wrong.append((given if len(str(given)) < 200 else path, answer.status, error))
        assert set(error) == {"message", "type", "param", "code"}
        assert answer.headers["content-type"] == "application/json"
    assert not wrong
    # None of them has harmed what comes after.
    assert server.client.completions.create(model="tiny", prompt="x", max_tokens=64).choices[0].text == TEXT


def test_what_asks_for_nothing_passes(server):
    nothing = {"best_of": 1, "echo": False, "suffix": "", "logit_bias": {}, "user": "me", "metadata": {"a": "b"},
               "service_tier": "auto", "store": False, "top_k": -1, "logprobs": None, "stop": None}  # fmt: skip
    answer, _ = exchanged(server, post(COMPLETION, {"prompt": [9, 10], **nothing}))
    assert answer.status == 200
    nothing = {"response_format": {"type": "text"}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
               "modalities": ["text"], "functions": None, "max_completion_tokens": 5}  # fmt: skip
    parts = [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    answer, _ = exchanged(server, post(CHAT, {"messages": parts, "seed": -5, **nothing}))
    assert answer.status == 200
    prompt = byte_tokenizer().decode(server.app.worker.engine.submitted[-1].prompt, skip_special_tokens=False)
    assert prompt == "<|start|>system:ab<|end|><|start|>assistant:"
    answer, _ = exchanged(
        server, post(CHAT, {"messages": HELLO, "chat_template_kwargs": {"greeting": "Hi!"}})
    )
    prompt = byte_tokenizer().decode(server.app.worker.engine.submitted[-1].prompt)
    assert prompt.startswith("Hi!")


def test_a_template_without_tools_refuses_them():
    deaf = byte_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    with running(served_=scripted(TEXT, tokenizer=deaf)) as server:
        answer, body = exchanged(server, post(CHAT, {"messages": HELLO, "tools": [TOOL]}))
        assert answer.status == 400
        assert error_of(body)["message"].startswith(
            "tools: expected none, since the model's chat template has no"
        )
    with running(served_=scripted(TEXT, tokenizer=byte_tokenizer(None))) as server:
        answer, body = exchanged(server, post(CHAT, {"messages": HELLO}))
        assert (answer.status, "a model with a chat template" in str(body)) == (400, True)
        assert exchanged(server, post(COMPLETION, {"prompt": "x"}))[0].status == 200


@pytest.mark.parametrize(
    ("request_", "status", "message"),
    [
        (b"GET /v1/nothing HTTP/1.1\r\nhost: x\r\n\r\n", 404, "path: expected one of /health, /metrics, /v1/chat"),
        (b"GET /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n", 405, "path: expected POST, got GET /v1/completions"),
        (b"GET /v1/models/other HTTP/1.1\r\nhost: x\r\n\r\n", 404, "model: expected 'tiny', got 'other'"),
        (post(COMPLETION, {"prompt": "x"}, **{"content-type": "text/plain"}), 415, "expected application/json, got"),
        (b"hello\r\n\r\n", 400, "Invalid HTTP request"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"x" * 100_000, 431, "Invalid HTTP request"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400, "Invalid HTTP request"),
    ],
)  # fmt: skip
def test_what_is_no_request(server, request_, status, message):
    answer, body = exchanged(server, request_)
    assert answer.status == status
    assert message in error_of(body)["message"]


def test_models_health_and_metrics(server):
    assert [model.id for model in server.client.models.list()] == ["tiny"]
    assert server.client.models.retrieve("tiny").id == "tiny"
    server.client.completions.create(model="tiny", prompt="x")
    assert json.loads(exchanged(server, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")[1]) == {"status": "ok"}
    answer, body = exchanged(server, b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
    lines = body.decode().splitlines()
    assert answer.headers["content-type"].startswith("text/plain")
    for line in ("pallas_attn_pages 9.0", "pallas_attn_generated_tokens_total 1.0",
                 'pallas_attn_finished_total{reason="stop"} 4.0', "pallas_attn_failing 0.0"):  # fmt: skip
        assert line in lines
    counted = [line for line in lines if line.startswith("pallas_attn_http_requests_total")]
    assert any('path="/v1/completions",status="200"' in line for line in counted)
    assert not any("nothing" in line for line in counted)  # paths that anybody can make up
    assert any(line.startswith("pallas_attn_time_to_first_token_seconds_count") for line in lines)
    assert any(line.startswith("process_resident_memory_bytes") for line in lines)


def test_the_key_is_asked_for():
    with running(served_=scripted(TEXT), api_key="secrét") as server:
        client = server.client
        with pytest.raises(openai.AuthenticationError, match="API key"):
            client.models.list()
        for header in ("Bearer secret", "secrét", "Basic secrét", "Bearer ", "Bearer secrét2"):
            request = post(COMPLETION, {"prompt": "x"}, authorization=header)
            assert exchanged(server, request)[0].status == 401
        good = post(COMPLETION, {"prompt": "x"}, authorization="Bearer secrét")
        assert exchanged(server, good)[0].status == 200
        assert exchanged(server, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")[0].status == 200


@contextlib.contextmanager
def held(limits=None, **options):
    """A server whose engine has stopped in the middle."""
    with running(limits, scripted(TEXT, **options)) as server:
        engine = server.app.worker.engine
        engine.held.set()
        try:
            yield server, engine
        finally:
            engine.held.clear()


def test_more_than_can_wait_is_refused():
    with held(Limits(max_waiting=2)) as (server, engine):
        results = []

        def ask():
            results.append(server.client.completions.create(model="tiny", prompt="x", max_tokens=64))

        threads = [threading.Thread(target=ask) for _ in range(NUM_ROWS + 2)]
        for thread in threads:
            thread.start()
        waited(lambda: len(engine.submitted) == NUM_ROWS + 2)
        answer, body = exchanged(server, post(COMPLETION, {"prompt": "x"}))
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert error_of(body)["code"] == "queue_full"
        assert exchanged(server, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")[0].status == 200
        engine.held.clear()
        for thread in threads:
            thread.join()
        assert [result.choices[0].text for result in results] == [TEXT] * len(threads)
        # Several answers count as many, and more than ever fit need not be tried again.
        assert exchanged(server, post(COMPLETION, {"prompt": "x", "n": NUM_ROWS + 3}))[0].status == 400
        assert exchanged(server, post(COMPLETION, {"prompt": "x", "n": NUM_ROWS + 2}))[0].status == 200
        engine.held.set()
        thread = threading.Thread(target=ask)
        thread.start()
        waited(lambda: engine.busy)
        assert exchanged(server, post(COMPLETION, {"prompt": "x", "n": NUM_ROWS + 2}))[0].status == 503
        engine.held.clear()
        thread.join()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_takes_only_so_long(stream):
    with held(Limits(request_timeout=0.2)) as (server, engine):
        while (
            not engine.submitted
        ):  # where the machine is busy, the time may be over before the engine hears of it
            answer, body = exchanged(server, post(COMPLETION, {"prompt": "x", "stream": stream}))
            assert (answer.status, error_of(body)["code"]) == (504, "timeout")
            assert answer.headers["x-should-retry"] == "false"
        waited(lambda: engine.submitted[0].done)
        assert engine.submitted[0].finish_reason == "cancelled"


def test_a_stream_that_takes_too_long_ends_with_an_error():
    limits = Limits(request_timeout=0.5)
    with running(limits, scripted(TEXT, seconds=0.1)) as server:
        events = []
        with pytest.raises(openai.APIError, match=r"longer than 0\.5 s"):
            events.extend(
                server.client.completions.create(model="tiny", prompt="x", stream=True, max_tokens=64)
            )


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_away_is_not_worked_for(stream):
    with running(served_=scripted("x" * 200, burst=1, holds_after=9)) as server:
        engine = server.app.worker.engine
        with server.raw() as connection:
            connection.sendall(post(COMPLETION, {"prompt": "x", "stream": stream, "max_tokens": 200}))
            if stream:
                assert b"200" in connection.recv(100)
            else:
                waited(lambda: engine.submitted and engine.submitted[0].answer)
        waited(lambda: engine.submitted[0].done)
        assert engine.submitted[0].finish_reason == "cancelled"


def test_an_engine_that_fails():
    with running(served_=scripted(TEXT)) as server:
        engine = server.app.worker.engine
        engine.fails = 3
        with pytest.raises(openai.InternalServerError, match="the engine failed"):
            server.client.completions.create(model="tiny", prompt="x")
        answer, body = exchanged(server, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (answer.status, json.loads(body)["status"]) == (503, "failing")
        engine.refuses = True
        with pytest.raises(openai.InternalServerError, match="the engine failed"):
            server.client.completions.create(model="tiny", prompt="x")
        engine.refuses = False
        assert (
            server.client.completions.create(model="tiny", prompt="x", max_tokens=64).choices[0].text == TEXT
        )
        assert exchanged(server, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")[0].status == 200


def test_a_stop_loses_nothing_that_was_accepted():
    with held() as (server, engine):
        results = []

        def ask(stream):
            said = server.client.completions.create(model="tiny", prompt="x", max_tokens=64, stream=stream)
            parts = list(said) if stream else [said]
            results.append("".join(part.choices[0].text for part in parts))

        threads = [threading.Thread(target=ask, args=(bool(i % 2),)) for i in range(2 * NUM_ROWS)]
        for thread in threads:
            thread.start()
        waited(lambda: len(engine.submitted) == 2 * NUM_ROWS)
        server.server.stop()
        waited(lambda: server.app.gate.closed)
        answer, body = exchanged(server, post(COMPLETION, {"prompt": "x"}))
        assert (answer.status, error_of(body)["code"]) == (503, "stopping")
        answer, body = exchanged(server, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (answer.status, json.loads(body)["status"]) == (503, "stopping")
        engine.held.clear()
        for thread in threads:
            thread.join()
        assert results == [TEXT] * len(threads)


def test_a_stop_does_not_wait_for_ever():
    with held(Limits(stop_timeout=0.1)) as (server, engine):
        said = []
        thread = threading.Thread(
            target=lambda: said.append(exchanged(server, post(COMPLETION, {"prompt": "x"})))
        )
        thread.start()
        waited(lambda: engine.submitted)
        server.server.stop()
        thread.join()
        answer, body = said[0]
        assert (answer.status, error_of(body)["code"]) == (503, "stopped")
