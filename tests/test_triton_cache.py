"""Compiled kernels that are kept on disk: who may fill the folder, who may read it, and what is spoilt. No GPU."""

import errno
import functools
import subprocess
import sys
import threading

import lowering
import pytest
import triton_kernels

import pallas_attn
from pallas_attn._lowering import cache, compiler
from pallas_attn._tile import triton as tile_triton


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "kernels"))
    compiler.made.cache_clear()
    yield tmp_path / "kernels"
    compiler.made.cache_clear()


def test_a_kernel_in_the_cache_needs_no_triton(kept, monkeypatch):
    compiled = compiler.compile_kernel(triton_kernels.NOTHING, 90, 4, 3)
    assert ".entry nothing" in compiled.ptx
    assert ".target sm_90a" in compiled.ptx
    assert [path.suffix for path in kept.iterdir()] == [".json"]
    compiler.made.cache_clear()
    monkeypatch.setattr(compiler, "installed", lambda: None)
    assert compiler.compile_kernel(triton_kernels.NOTHING, 90, 4, 3) == compiled
    with pytest.raises(RuntimeError, match="Triton is not installed: pip install 'triton>="):
        compiler.compile_kernel(triton_kernels.NOTHING, 90, 8, 3)


def test_a_kernel_that_a_folder_lacks_is_named_with_both_ways_out(kept, monkeypatch):
    """As where neither Triton is nor Pallas' lowering, and the folder was filled with other shapes."""
    cache.keep(
        cache.Request(triton_kernels.NOTHING, 90, 4, 3, 80), cache.Compiled("nothing", "", 0, 4, "3.9.0")
    )
    monkeypatch.setattr(compiler, "installed", lambda: None)
    monkeypatch.setattr(tile_triton, "plgpu", None)
    attend = functools.partial(pallas_attn.paged_attention, implementation=None)
    with pytest.raises(RuntimeError) as raised:
        lowering.lower_for_gpu(attend, *triton_kernels.arguments())
    (line,) = str(raised.value).splitlines()
    assert line.startswith("pallas_attn_paged_attention of bfloat16[64, 16, 2, 64], bfloat16[4, 1, 8, 64], ")
    assert f"not among the kernels in {kept}" in line
    assert "pip install 'triton>=3.6,<3.10'" in line
    assert (
        "make this call where Triton and an sm_90 GPU are, with PALLAS_ATTN_KERNELS naming a folder" in line
    )


def test_a_spoilt_file_of_the_cache_is_compiled_again(kept):
    compiled = compiler.compile_kernel(triton_kernels.NOTHING, 80, 4, 3)
    (path,) = kept.iterdir()
    for spoilt in ("", "{", "[]", '{"name": "nothing"}'):
        path.write_text(spoilt)
        compiler.made.cache_clear()
        assert compiler.compile_kernel(triton_kernels.NOTHING, 80, 4, 3) == compiled


def test_a_kernel_is_found_again_by_the_version_it_is_looked_for_with(kept, monkeypatch):
    """A package built from source has its commit in it, which Triton's own name for itself has not."""
    monkeypatch.setattr(compiler, "installed", lambda: "3.9.0+git1a2b3c4d")
    compiled = compiler.compile_kernel(triton_kernels.NOTHING, 90, 4, 3)
    compiler.made.cache_clear()
    monkeypatch.setattr(compiler.stages, "to_ptx", lambda **_: pytest.fail("compiled again"))
    assert compiler.compile_kernel(triton_kernels.NOTHING, 90, 4, 3) == compiled


def test_what_cannot_be_read_hides_nothing_older(kept):
    request = cache.Request(triton_kernels.NOTHING, 90, 4, 3, 80)
    cache.keep(request, cache.Compiled("nothing", "", 0, 4, "3.6.0"))
    (kept / f"{request.digest}-3.9.0.json").mkdir()
    assert (cache.find(request, None) or request).triton == "3.6.0"


def test_others_may_read_what_one_has_filled(kept):
    """As when a container is filled by root, and runs as somebody else."""
    cache.keep(
        cache.Request(triton_kernels.NOTHING, 90, 4, 3, 80), cache.Compiled("nothing", "", 0, 4, "3.9.0")
    )
    (path,) = kept.iterdir()
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_full_disk_keeps_nothing(kept, monkeypatch):
    def dump(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache.json, "dump", dump)
    request = cache.Request(triton_kernels.NOTHING, 90, 4, 3, 80)
    cache.keep(request, cache.Compiled("nothing", "", 0, 4, "3.9.0"))
    assert list(kept.iterdir()) == []
    assert cache.find(request, None) is None


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(cache.FOLDER, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache.Path, "home", home)
    request = cache.Request(triton_kernels.NOTHING, 90, 4, 3, 80)
    cache.keep(request, cache.Compiled("nothing", "", 0, 4, "3.9.0"))
    assert not cache.holds_any()
    assert cache.find(request, None) is None


def test_many_may_fill_the_cache_at_once(kept):
    made: list[cache.Compiled] = []
    keepers = [
        threading.Thread(
            target=lambda: made.append(compiler.compile_kernel(triton_kernels.NOTHING, 90, 4, 3))
        )
        for _ in range(4)
    ]
    for keeper in keepers:
        keeper.start()
    for keeper in keepers:
        keeper.join()
    assert len(made) == 4
    assert len({one.ptx for one in made}) == 1
    assert len(list(kept.iterdir())) == 1


KEEPER = """
import importlib.util, sys, threading
spec = importlib.util.spec_from_file_location("cache", sys.argv[1])
cache = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cache)
request, seen, rounds = cache.Request("kernel", 90, 4, 3, 80), set(), 0
told_to_end = threading.Thread(target=sys.stdin.read, daemon=True)
told_to_end.start()
while told_to_end.is_alive():
    cache.keep(request, cache.Compiled("kernel", 100_000 * sys.argv[2], 0, 4, "3.9.0"))
    found = cache.find(request, None)
    assert len(found.ptx) == 100_000 and len(set(found.ptx)) == 1, "half of a file, or of two"
    seen.add(found.ptx[0])
    rounds += 1
    if rounds >= 100 and len(seen) > 1:
        print("met", flush=True)
        rounds = -(10**9)
"""


@pytest.mark.slow
@pytest.mark.once
def test_processes_that_fill_the_cache_at_once_read_whole_files(kept):
    """Each writes another text under one name, and reads what any wrote, until all have read what another wrote."""
    command = [sys.executable, "-S", "-c", KEEPER, cache.__file__]
    keepers = [
        subprocess.Popen([*command, letter], **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE))
        for letter in "abcd"
    ]
    try:
        met = [keeper.stdout.readline() for keeper in keepers]
        ended = [(*keeper.communicate(), keeper.returncode) for keeper in keepers]
    finally:
        for keeper in keepers:
            keeper.kill()
    assert not [error for _, error, status in ended if status], ended
    assert met == [b"met\n"] * 4
    assert len(list(kept.iterdir())) == 1, "nothing is left behind"


def test_the_newest_triton_of_several_serves_without_one(kept):
    request = cache.Request(triton_kernels.NOTHING, 90, 4, 3, 80)
    for version in ("3.9.0", "3.10.0", "3.6.0"):
        cache.keep(request, cache.Compiled("nothing", version, 0, 4, version))
    assert (cache.find(request, "3.6.0") or request).ptx == "3.6.0"
    assert (cache.find(request, None) or request).ptx == "3.10.0"
    assert cache.find(request, "3.8.0") is None
