"""What `make` installs is fixed to the version, complete, and says nothing of where it came from."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import lowering
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.once
ROOT = Path(__file__).parents[1]
LOCK = ROOT / ".ci/lock"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
PYTHONS = ["3.12", "3.13"]


def locked(name: str, python: str = "3.12", machine: str = "x86_64") -> dict[str, str]:
    """{package: version} that pip installs on Linux from one of the files."""
    here = dict(
        python_version=python,
        python_full_version=f"{python}.0",
        sys_platform="linux",
        platform_machine=machine,
    )
    found = {}
    for line in (LOCK / f"{name}.txt").read_text().splitlines():
        if not (text := line.split("#")[0].strip()):
            continue
        requirement = Requirement(text)
        assert re.fullmatch(r"==[^*]+", str(requirement.specifier)), f"{name}.txt: {line} is no exact version"
        if requirement.marker is None or requirement.marker.evaluate(here):
            package = canonicalize_name(requirement.name)
            assert package not in found, f"{name}.txt has {package} twice"
            found[package] = str(requirement.specifier).removeprefix("==")
    return found


def wanted(extra: str) -> Iterator[Requirement]:
    for text in EXTRAS[extra] if extra else PYPROJECT["project"]["dependencies"]:
        requirement = Requirement(text)
        if requirement.name == "pallas-attn":
            for inner in requirement.extras:
                yield from wanted(inner)
        else:
            yield requirement


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(
    ("name", "extras"), [("test", ["", "dev"]), ("demo", ["", "models"]), ("cuda", ["", "cuda"])]
)
def test_holds_what_pyproject_asks_for(name, extras, python):
    """Without this, `make lock` was forgotten."""
    versions = locked(name, python)
    for requirement in (requirement for extra in extras for requirement in wanted(extra)):
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"{name}.txt lacks {requirement}"
        assert requirement.specifier.contains(version), f"{name}.txt has {version}, asked is {requirement}"


@pytest.mark.parametrize("python", PYTHONS)
def test_files_installed_together_agree(python):
    tests = locked("test", python)
    for name in ("demo", "cuda"):
        for package, version in locked(name, python).items():
            assert tests.get(package, version) == version, f"{name}.txt has {package} {version}"


def test_stays_below_the_caps():
    caps = [Requirement(text) for text in PYPROJECT["tool"]["uv"]["constraint-dependencies"]]
    assert [str(cap) for cap in caps] == ["torch<=2.14.1"]
    for cap in caps:
        assert cap.specifier.contains(locked("test")[cap.name])


def test_build_requirements_are_fixed():
    versions = locked("build")
    for text in [*PYPROJECT["build-system"]["requires"], "cmake", "ninja", "nvidia-cuda-nvcc==13.0.*"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), text


def test_what_a_build_asks_for_is_found():
    """By `make lock`, whose list build.txt is made of."""
    told = subprocess.run(
        [sys.executable, str(LOCK / "build_requires.py")], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    asked = {canonicalize_name(Requirement(line).name) for line in told.stdout.splitlines()}
    assert {"scikit-build-core", "jaxlib", "cmake", "nvidia-cuda-nvcc"} <= asked <= set(locked("build"))


def test_the_installer_is_fixed():
    assert list(locked("uv")) == ["uv"]


def test_the_oldest_jax_is_the_lower_bound():
    [path] = LOCK.glob("jax-*.txt")
    oldest = path.stem.removeprefix("jax-")
    assert locked(path.stem) == {"jax": oldest, "jaxlib": oldest}
    for requirement in wanted(""):
        if requirement.name in ("jax", "jaxlib"):
            assert f">={oldest}" in str(requirement.specifier)


def test_several_tritons_are_read():
    found = [locked(path.stem) for path in LOCK.glob("triton-*.txt")]
    assert sorted(versions["triton"] for versions in found) == ["3.6.0", "3.8.0", "3.9.0"]
    for path in LOCK.glob("triton-*.txt"):
        assert path.stem == f"triton-{locked(path.stem)['triton']}"
    claimed = ["3.6.0", "3.8.0", "3.9.0"] if not (Path(sys.prefix) / "triton-latest").exists() else ["latest"]
    assert claimed == lowering.TRITONS


@pytest.mark.parametrize("path", sorted(LOCK.glob("*.txt")), ids=lambda path: path.name)
def test_names_no_host_and_no_path(path):
    for line in path.read_text().splitlines():
        assert not re.search(r"://|^--|^-[a-z]|\bfile:|/(home|root|opt)/", line), line
