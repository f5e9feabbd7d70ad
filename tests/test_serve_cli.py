"""`pallas-attn serve` as a process: from its README's lines to its end."""

import contextlib
import dataclasses
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from models_support import smollm2, write_tiny

from pallas_attn._call.optional import requirements
from pallas_attn.cli.serve import ServeOptions
from pallas_attn.cli.serve_command import serve
from pallas_attn.models import generate
from pallas_attn.serve import Limits, bound
from pallas_attn.serve.server import is_local

ROOT = Path(__file__).parent.parent
LINES = re.search(r"```sh\n(.*?)```", (ROOT / "pallas_attn/serve/README.md").read_text(), re.DOTALL)
# Long enough for a signal in the middle of an answer.
CONTEXT = 20_000
SMALL = (
    "--max-len",
    CONTEXT,
    "--page-size",
    64,
    "--num-rows",
    1,
    "--step-tokens",
    16,
    "--stop-timeout",
    3600,
)
# Compiling is most of it, here as in other tests.
ENVIRONMENT = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "no_proxy": "*", "NO_PROXY": "*"}


@contextlib.contextmanager
def process(*options: object) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server that listens, and its URL."""
    command = [sys.executable, "-m", "pallas_attn", "serve", "--port", "0", *map(str, options)]
    started = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    try:
        said = []
        for line in started.stderr:
            said.append(line)
            if line.startswith("ready"):
                break
        else:
            pytest.fail("".join(said))
        yield started, line.split()[1]
    finally:
        started.kill()
        started.communicate()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", context_length=CONTEXT, eos=None)


@pytest.mark.slow
@pytest.mark.once
def test_a_stop_finishes_what_was_accepted(model):
    with process("--model", model, *SMALL) as (server, url):
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        asked = dict(model="tiny", prompt="ab", max_tokens=64, stream_options={"include_usage": True})
        stream = client.completions.create(**asked, stream=True)
        next(stream)
        server.send_signal(signal.SIGTERM)
        *_, end, usage = stream
        assert end.choices[0].finish_reason == "length"
        assert usage.usage.completion_tokens == 64
        assert server.wait() == 0
        assert "stopping" in server.stderr.read()


@pytest.mark.once
@pytest.mark.slow
def test_a_second_signal_ends_at_once(model):
    with process("--model", model, *SMALL) as (server, url):
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        stream = client.completions.create(model="tiny", prompt="ab", max_tokens=CONTEXT - 2, stream=True)
        next(stream)
        server.send_signal(signal.SIGINT)
        assert any(line.startswith("stopping: 1 ") for line in server.stderr)
        server.send_signal(signal.SIGINT)
        assert server.wait() == 130


@pytest.mark.once
def test_a_port_that_is_taken_is_said_at_once():
    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            OSError, match=f"serve: argument 'host and port': expected .*127.0.0.1:{port} .*in use"
        ):
            bound("127.0.0.1", port)
    with pytest.raises(OSError, match="an address to listen on"):
        bound("no such host.invalid", 0)


@pytest.mark.once
def test_help_has_every_limit_with_its_default():
    defaults = {name: parameter.default for name, parameter in inspect.signature(serve).parameters.items()}
    for field in dataclasses.fields(Limits):
        assert defaults[field.name] == field.default
    assert {field.name for field in dataclasses.fields(ServeOptions)} - {"limits"} <= {*defaults}


@pytest.mark.once
def test_a_missing_package_is_named_with_all_that_the_extra_brings(monkeypatch):
    """Not the package itself, which no index has."""
    declared = [
        'flax>=0.12; extra == "models"',
        'pallas-attn[models]; extra == "serve"',
        'uvicorn; extra == "serve"',
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: declared)
    assert requirements("serve") == ["flax>=0.12", "uvicorn"]


@pytest.mark.once
def test_addresses():
    for host in ("127.0.0.1", "localhost"):
        with bound(host, 0) as listener:
            assert is_local(listener)
            assert listener.proto == socket.IPPROTO_TCP  # else asyncio leaves TCP_NODELAY out

    class Open(socket.socket):
        def getsockname(self):
            return "0.0.0.0", 80

    with Open() as listener:
        assert not is_local(listener)


@pytest.mark.once
@pytest.mark.slow
def test_three_lines_from_install_to_a_streamed_answer(tmp_path):
    """As they stand, but for the installation, where the program is, and a port that is free."""
    loaded = smollm2()
    install, serve_line, ask = LINES[1].strip().split("\n")
    assert install.startswith('pip install ".[serve]"')
    with bound("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    program = f"{sys.executable} -m pallas_attn"
    assert serve_line == "pallas-attn serve &"
    small = f"--port {port} --max-len 128 --num-rows 2 --step-tokens 16"
    serve_line = serve_line.replace("pallas-attn serve", f"exec {program} serve {small}")
    shell = f"({serve_line.removesuffix(' &')}) &\necho $! > {tmp_path}/pid\n{ask.replace('8000', str(port))}"
    try:
        # A file, not a pipe: the server has it too, and goes on.
        with (tmp_path / "out").open("w") as out:
            subprocess.run(["bash", "-c", shell], cwd=ROOT, env=ENVIRONMENT, stdout=out, check=True)
        lines = (tmp_path / "out").read_text().split("\n")
        *events, last = [line.removeprefix("data: ") for line in lines if line]
        assert last == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events]
        # Some text: this answer is sampled, and as long as chance has it.
        assert "".join(choice["delta"].get("content", "") for choice in choices)
        assert choices[-1]["finish_reason"] in ("stop", "length")

        # A greedy answer is `generate`'s.
        client = openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0)
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        (name,) = [each.id for each in client.models.list()]
        said = client.chat.completions.create(model=name, messages=messages, temperature=0, max_tokens=12)
        expected = generate(
            loaded.model,
            [loaded.tokenizer.encode_chat(messages)],
            max_new_tokens=12,
            stop_token_ids=loaded.tokenizer.stop_token_ids,
        )
        assert said.choices[0].message.content == loaded.tokenizer.decode(expected.row(0))
        assert "Paris" in said.choices[0].message.content
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
