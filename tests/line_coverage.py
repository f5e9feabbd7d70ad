"""Which lines of the package tests run: `LINE_COVERAGE=ONE pytest ...`, then `python tests/line_coverage.py ONE OTHER`.

Each line is noticed once, so that a run takes no longer. The folder that the environment names gets a file from each
process. Told is the share of the package's lines in each folder, and where ONE lacks most of OTHER's.
"""

import collections
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = f"{ROOT / 'pallas_attn'}{os.sep}"
TOOL = sys.monitoring.COVERAGE_ID


def pytest_configure() -> None:
    seen: set[tuple[str, int]] = set()
    folder = Path(os.environ["LINE_COVERAGE"])
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"{os.getpid()}.txt").open("a", buffering=1)

    def met(code, line: int, package: str = PACKAGE, once=sys.monitoring.DISABLE):
        name = code.co_filename
        if name.startswith(package) and (name, line) not in seen:
            seen.add((name, line))
            file.write(f"{name[len(package) :]}:{line}\n")  # at once: the process may be killed
        return once

    sys.monitoring.use_tool_id(TOOL, "lines")
    sys.monitoring.register_callback(TOOL, sys.monitoring.events.LINE, met)
    sys.monitoring.set_events(TOOL, sys.monitoring.events.LINE)


def lines_of(folder: str) -> set[str]:
    return {line for file in Path(folder).glob("*.txt") for line in file.read_text().splitlines()}


def all_lines() -> set[str]:
    """That code is compiled for, whether or not anything runs it."""
    found: set[str] = set()
    for path in Path(PACKAGE).rglob("*.py"):
        todo = [compile(path.read_text(), str(path), "exec")]
        while todo:
            code = todo.pop()
            todo += [constant for constant in code.co_consts if hasattr(constant, "co_code")]
            found |= {f"{path.relative_to(PACKAGE)}:{line}" for _, _, line in code.co_lines() if line}
    return found


def main(one: str, other: str) -> None:
    everything, few, many = all_lines(), lines_of(one), lines_of(other)
    for name, lines in ((one, few), (other, many)):
        run = len(lines & everything)
        print(f"{name}: {run} of {len(everything)} lines, {run / len(everything):.1%}")
    missed = collections.Counter(line.partition(":")[0] for line in (many - few) & everything)
    for path, count in missed.most_common(20):
        print(f"{count:5} {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
