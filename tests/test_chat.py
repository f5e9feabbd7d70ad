"""`pallas-attn chat`: what it answers, what it keeps, and Ctrl-C in a real process."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from models_support import write_tiny
from rich.console import Console

from pallas_attn import _interrupt
from pallas_attn.cli import main
from pallas_attn.cli.chat import Chat, ChatOptions, pieces
from pallas_attn.cli.wrap import Wrapped
from pallas_attn.models import Engine, Sampling, generate, load_gguf

pytestmark = pytest.mark.once

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}!{% endfor %}a"
NEW = 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return str(write_tiny(folder / "tiny.gguf", template=TEMPLATE, eos=None, context_length=20_000))


def chat(tiny: str, lines: list[str], monkeypatch, capsys, *options: str) -> tuple[list[str], str]:
    """(answers, stderr)"""
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    sizes = ["--max-len", "160", "--max-new-tokens", str(NEW), "--page-size", "4", "--prefill-chunk", "16"]
    assert main(["chat", "--model", tiny, *sizes, *options]) == 0
    captured = capsys.readouterr()
    return captured.out.splitlines(), captured.err


@pytest.mark.slow
def test_every_turn_answers_the_whole_conversation(tiny, monkeypatch, capsys):
    answers, err = chat(tiny, ["hello", "", "abc", "/new", "hello"], monkeypatch, capsys, "--system", "x")
    loaded = load_gguf(tiny)
    conversation = "sx!uhello!a"
    for turn, answer in zip(("abc", None), answers, strict=False):
        prompt = loaded.tokenizer.encode(conversation)
        row = generate(loaded.model, [prompt], max_new_tokens=NEW, page_size=4).row(0)
        assert answer == loaded.tokenizer.decode(row)
        conversation = f"{conversation[:-1]}a{answer}!u{turn}!a"
    assert len(answers) == 3
    assert answers[2] == answers[0], "a new conversation"
    figures = re.findall(
        r"\[(\d+) tokens, [\d.]+ a second; of (\d+) before them (\d+) were in the cache\]", err
    )
    counts = [tuple(map(int, figure)) for figure in figures]
    assert [new for new, *_ in counts] == [NEW] * 3
    assert counts[0][2] == 0
    assert counts[1][2] >= counts[0][1], "the first question at least is still there"
    assert counts[2][2] == (counts[2][1] - 1) // 4 * 4, "all full pages before the last token"


def test_the_oldest_turns_are_forgotten_when_nothing_fits(tiny, monkeypatch, capsys):
    lines = ["".join(chr(ord("b") + i) * 30) for i in range(5)]
    answers, err = chat(tiny, lines, monkeypatch, capsys)
    assert len(answers) == 5
    assert err.count("[the oldest turn no longer fits and is forgotten]") >= 2
    answers, err = chat(tiny, ["z" * 200, "b"], monkeypatch, capsys)
    assert "too long: 203 tokens, of at most 159 (--max-len)" in err
    assert len(answers) == 1, "the question that was too long is not part of the conversation"


def test_commands_are_no_questions(tiny, monkeypatch, capsys):
    answers, err = chat(tiny, ["/help", "/hlep", "/new", "/no command"], monkeypatch, capsys)
    assert len(answers) == 1, "what only begins like a command is a question"
    assert err.count("Ctrl-C stops an answer") == 3, "at the beginning, and twice when asked"
    assert "There is no /hlep. Ctrl-C" in err


@pytest.mark.parametrize(
    ("width", "text", "lines"),
    [
        (12, "one two three four", ["one two", "three four"]),
        (8, "a word ends", ["a word", "ends"]),  # which fits to the last column
        (9, "if x:\n    do it\n\n  end", ["if x:", "    do it", "", "  end"]),
        (8, "a abcdefghijk b", ["a", "abcdefghijk b"]),  # in two lines of the terminal
        (6, "ab 中文字 c", ["ab 中", "文字 c"]),
        (16, "a\tbcd efghi", ["a\tbcd", "efghi"]),
        (40, "nothing  to do ", ["nothing  to do"]),
    ],
)
def test_lines_end_between_words(width, text, lines):
    """In whatever pieces it comes."""
    for size in (1, 2, 5, 99):
        wrapped = Wrapped(lambda: width)
        shown = [wrapped.shown(text[at : at + size]) for at in range(0, len(text), size)]
        assert "".join([*shown, wrapped.rest()]).split("\n") == lines


def test_a_word_is_shown_as_soon_as_it_ends():
    wrapped = Wrapped(lambda: 20)
    assert [wrapped.shown(piece) for piece in ("wo", "rd", " an", "d 中", "文")] == [
        "",
        "",
        "word",
        " and 中",
        "文",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_answers_are_wrapped_on_a_terminal_alone(tiny, terminal, monkeypatch):
    out = Console(file=io.StringIO(), force_terminal=terminal, width=14, soft_wrap=True, color_system=None)
    err = Console(file=io.StringIO())
    text = "They are words of a sentence."
    options = ChatOptions(
        model=None, system=None, template={}, max_new_tokens=NEW, max_len=160, sampling={}, dtype="float32",
        cache_dtype=None, page_size=4, prefill_chunk=16, attention="gqa", implementation=None, batch_invariant=False,
    )  # fmt: skip
    loaded = load_gguf(tiny)
    monkeypatch.setattr(loaded.tokenizer, "decode", lambda tokens: bytes(tokens).decode())
    engine = Engine(loaded.model, max_len=160, num_rows=1)
    monkeypatch.setattr(engine, "stream", lambda *_: iter(text.encode()))
    talk = Chat(loaded, engine, options, Sampling(), out, err)
    talk._answer("hello")
    shown = "They are words\nof a sentence.\n" if terminal else f"{text}\n"
    assert out.file.getvalue() == shown
    assert talk.messages[-1] == {"role": "assistant", "content": text}


def test_a_model_without_a_template_is_refused_before_the_first_question(tmp_path, capsys):
    assert main(["chat", "--model", str(write_tiny(tmp_path / "tiny.gguf"))]) == 1
    assert "expected a model with a chat template, got one without" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        ("strict", "chat: argument 'standard input': expected UTF-8 text, got byte 0xff"),
        ("surrogateescape", "argument 'text': expected text that is Unicode, got half a character, at 2"),
    ],
)
def test_input_that_is_no_text_is_named(tiny, errors, message, monkeypatch, capsys):
    """Which of the two depends on the locale."""
    monkeypatch.setattr(Engine, "compile", lambda *_: None)  # no step is made
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"b\xff\n"), "utf-8", errors))
    assert main(["chat", "--model", tiny, "--max-len", "160"]) == 1
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_text_comes_in_whole_characters():
    def decode(tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace").removeprefix(" ")

    text = " Straße für 5 €!"
    assert "".join(pieces(decode, text.encode())) == text.removeprefix(" ")
    assert list(pieces(decode, "ß".encode())) == ["", "ß"]
    assert "".join(pieces(decode, "aß".encode()[:-1])) == "a\ufffd"


def test_an_answer_may_be_stopped_while_its_prompt_is_read(tiny, monkeypatch, capsys):
    """A long prompt takes many steps before the first token of its answer."""
    step, made, stop = Engine.step, [], threading.Event()

    def interrupted(engine):
        made.append(step(engine))
        if len(made) == 2:
            stop.set()
        return made[-1]

    monkeypatch.setattr(_interrupt, "heard", lambda: contextlib.nullcontext(stop))
    monkeypatch.setattr(Engine, "step", interrupted)
    _, err = chat(tiny, ["z" * 100], monkeypatch, capsys)
    assert made == [{}, {}], "two steps of 16 tokens, and no further one"
    assert "[0 tokens" in err
    assert "stopped]" in err


DEFAULT_SIGNAL = (
    "import os, signal, sys; signal.signal(2, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"
)


@pytest.mark.slow
def test_an_interrupt_stops_an_answer_and_then_leaves(tiny):
    """The first Ctrl-C during an answer stops it, and the conversation goes on; one between answers leaves."""
    sizes = ["--max-len", "16000", "--max-new-tokens", "12000"]
    program = [sys.executable, "-u", "-m", "pallas_attn", "chat", "--model", tiny, *sizes]
    with subprocess.Popen(
        [sys.executable, "-c", DEFAULT_SIGNAL, *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "NO_COLOR": "1"},
        bufsize=0,
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        try:
            for question in (b"hello\n", b"abc\n"):
                process.stdin.write(question)
                assert process.stdout.read(8), "it has begun to answer"
                process.send_signal(signal.SIGINT)
                while b"stopped]" not in (line := process.stderr.readline()):
                    assert line, process.poll()
                # The rest of this answer is not the beginning of the next one.
                os.set_blocking(process.stdout.fileno(), False)
                while process.stdout.read(4096):
                    pass
                os.set_blocking(process.stdout.fileno(), True)
            process.send_signal(signal.SIGINT)
            process.communicate()
            assert process.returncode == 130
        finally:
            process.kill()
