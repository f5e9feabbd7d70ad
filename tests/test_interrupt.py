"""Ctrl-C with the output piped, in a real process: over at once, whatever it is doing."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from models_support import write_tiny

pytestmark = pytest.mark.once  # signals and processes

NUM_TOKENS = 100_000  # minutes, in one call of the loop
MOST_SECONDS = 20  # of computing: a quarter of a second, and Python's own end
# As pip would install it, but for what the marked step puts in.
PROGRAM = """
import importlib, sys
from pathlib import Path
from pallas_attn.cli import main

def mark(owner, name, then):
    real = getattr(owner, name)
    def marked(*arguments, **options):
        Path(sys.argv[-1]).touch()
        return then(real, *arguments, **options)
    setattr(owner, name, marked)

{marked}
sys.exit(main(sys.argv[1:-1]))
"""
LIBRARY = """
import sys
from pathlib import Path
from pallas_attn.models import generate, load_gguf

def progress(done, most):
    Path(sys.argv[3]).touch()

generate(load_gguf(sys.argv[1]).model, [[5]], max_new_tokens=int(sys.argv[2]), progress=progress)
"""
# Becomes the command it is given: else that would inherit that this process ignores the signal, if it does.
DEFAULT_SIGNAL = (
    "import os, signal, sys; signal.signal(2, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"
)
COMPILING = "import jax; mark(jax.stages.Lowered, 'compile', lambda real, *a: real(*a))"
# All steps in a single call: nothing but a thread beside it can hear the signal.
DECODING = """loop = importlib.import_module("pallas_attn.models.generate")
mark(loop, "_next_stretch", lambda *_: 10**9)"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", context_length=2 * NUM_TOKENS, eos=None)


def interrupted(command: list[str], begun) -> tuple[int, float, str, str]:
    """(status, seconds of computing from the signal to the end, stdout, stderr) of a process that gets SIGINT once
    `begun` is true of its id."""
    before = computed_by_children()
    process = subprocess.Popen(
        [sys.executable, "-c", DEFAULT_SIGNAL, sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not begun(process.pid):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)
        time.sleep(0.1)
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        computed = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
        return process.returncode, computed_by_children() - before - computed, out, err
    finally:
        process.kill()


def computed_by_children() -> float:
    """Seconds, of processors: those of a clock depend on who else uses the machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("phase", ["importing", "compiling", "decoding"])
@pytest.mark.sweep(phase=None)
def test_the_command_ends_at_once_and_quietly(phase, model, tmp_path):
    program, marker = tmp_path / "pallas-attn", tmp_path / "begun"
    marked = {"importing": "", "compiling": COMPILING, "decoding": DECODING}[phase]
    program.write_text(PROGRAM.format(marked=marked))
    options = ["--model", str(model), "--raw", "--prompt", "a", "--max-new-tokens", str(NUM_TOKENS)]

    def begun(pid: int) -> bool:
        return "jaxlib" in Path(f"/proc/{pid}/maps").read_text() if phase == "importing" else marker.exists()

    status, seconds, out, err = interrupted([str(program), "generate", *options, str(marker)], begun)
    assert (status, out, err) == (130, "", "")
    assert seconds < MOST_SECONDS


def test_as_a_module_too():
    def begun(pid: int) -> bool:
        return "jaxlib" in Path(f"/proc/{pid}/maps").read_text()

    status, _, out, err = interrupted(["-m", "pallas_attn", "doctor"], begun)
    assert (status, out, err) == (130, "", "")


@pytest.mark.slow
def test_generate_hears_it_in_a_program_of_the_users(model, tmp_path):
    marker = tmp_path / "begun"
    command = ["-c", LIBRARY, str(model), str(NUM_TOKENS), str(marker)]
    status, seconds, _, err = interrupted(command, lambda pid: marker.exists())
    assert status == -signal.SIGINT, err[-3000:]
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    assert seconds < MOST_SECONDS


def test_other_programs_keep_their_own_handler():
    code = (
        "import signal; before = signal.getsignal(signal.SIGINT); import pallas_attn; "
        "print(signal.getsignal(signal.SIGINT) is before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
