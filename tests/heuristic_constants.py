"""The constants that the choice of a paged call's tile and splits goes by: `python tests/heuristic_constants.py`.

Counted are, in the modules that the choice reads, numbers that somebody chose or measured: of each assignment one, of a
table one for each column that has numbers, and each number inside a function. Not counted: 0, 1 and 2; what a row of a
table is found by; a config's defaults, which are for callers who name a tile themselves (the choice sets every field).
What a call is (its rows, its longest sequence), and how a kernel deals splits when it runs, is not the choice's.
"""

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1] / "pallas_attn"
MODULES = (
    "_call/architecture.py", "_call/device.py", "_call/configs.py", "_call/budget.py", "_split/waves.py",
    "ops/paged_attention/config.py",
)  # fmt: skip
FOUND_BY = {"ARCHITECTURES": {0}, "CARDS": {0, 1}}
"""Columns: a capability, a name."""


class Constant(NamedTuple):
    module: str
    line: int
    name: str


def constants() -> list[Constant]:
    return [one for module in MODULES for one in of_source(module, (ROOT / module).read_text())]


def of_source(module: str, source: str) -> list[Constant]:
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            for name, value in _assigned(node):
                columns = sorted(_columns(value) - FOUND_BY.get(name, set()))
                found += [Constant(module, node.lineno, f"{name}[{column}]") for column in columns]
                if not columns and name not in FOUND_BY and _numbers(value):
                    found.append(Constant(module, node.lineno, name))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found += [Constant(module, line, node.name) for line in _numbers(node)]
    return found


def _assigned(node: ast.Assign) -> list[tuple[str, ast.expr]]:
    """Each name with its own value; of names that are given one value together the first."""
    target = node.targets[0]
    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
        return [(ast.unparse(name), value) for name, value in zip(target.elts, node.value.elts, strict=True)]
    return [(ast.unparse(target), node.value)]


def _columns(value: ast.expr) -> set[int]:
    """Of a table, a row of which is a call or a tuple: those with numbers."""
    if not isinstance(value, ast.Tuple | ast.List):
        return set()
    rows = [row.value if isinstance(row, ast.NamedExpr) else row for row in value.elts]
    cells = [row.args if isinstance(row, ast.Call) else getattr(row, "elts", [row]) for row in rows]
    return {column for row in cells for column, cell in enumerate(row) if _numbers(cell)}


def _numbers(tree: ast.AST) -> list[int]:
    """Lines of numbers, but of fields' defaults."""
    lines = []
    for child in ast.iter_child_nodes(tree):
        default = isinstance(tree, ast.ClassDef) and isinstance(child, ast.AnnAssign)
        lines += [] if default else _numbers(child)
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int | float):
        lines += [tree.lineno] if abs(tree.value) > 2 or tree.value % 1 else []
    return lines


if __name__ == "__main__":
    for number, constant in enumerate(constants(), 1):
        print(number, *constant)
