"""What type checkers see of the public functions is what they do."""

import ast
import inspect
import json
import re
import subprocess
import sys
import typing
from pathlib import Path

import jaxtyping
import pytest

import pallas_attn
from pallas_attn import _types
from pallas_attn._call import dispatch
from pallas_attn._call.hopper_forward import heads_in_l2

ROOT = Path(__file__).parents[1]
CALLS = Path(__file__).with_name("typed_calls.py")
FLAGS = {"dot_product_attention": "return_residual"}
FUNCTIONS = {name: getattr(pallas_attn, name) for name in pallas_attn.__all__}
WITH_LSE = [name for name, f in FUNCTIONS.items() if inspect.isfunction(f) and typing.get_overloads(f)]
EXPECTED = re.compile(r"# (is|refused): (.*)")


def found_by_pyright() -> dict[int, list[str]]:
    """What pyright says, by line."""
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", str(CALLS)],
        capture_output=True, text=True, cwd=CALLS.parents[1],
    )  # fmt: skip
    found: dict[int, list[str]] = {}
    for said in json.loads(done.stdout)["generalDiagnostics"]:
        found.setdefault(said["range"]["start"]["line"] + 1, []).append(said["message"])
    return found


@pytest.mark.slow
@pytest.mark.once
def test_pyright_sees_what_calls_return_and_which_names_there_are():
    found, wrong = found_by_pyright(), []
    for number, line in enumerate(CALLS.read_text().splitlines(), 1):
        said = found.pop(number, [])
        match EXPECTED.search(line):
            case None if said:
                wrong.append(f"line {number}: nothing expected, got {said}")
            case re.Match() as m:
                kind, what = m.groups()
                wanted = f'" is "{what}"' if kind == "is" else f"""Literal['{what}']" cannot be assigned"""
                if not any(wanted in message.splitlines()[0] for message in said):
                    wrong.append(f"line {number}: {kind} {what} expected, got {said}")
    assert not wrong, "\n".join(wrong)
    assert not found


def test_every_flag_that_changes_the_result_has_overloads():
    with_flag = {
        name
        for name, f in FUNCTIONS.items()
        if inspect.isfunction(f) and {"return_lse", "return_residual"} & set(inspect.signature(f).parameters)
    }
    assert with_flag == set(WITH_LSE)
    text = CALLS.read_text()
    assert not [name for name in with_flag if text.count(f"reveal_type(pa.{name}(") < 2]


@pytest.mark.parametrize("name", WITH_LSE)
def test_overloads_differ_from_the_function_in_the_flag_alone(name):
    module = ast.parse(inspect.getsource(sys.modules[FUNCTIONS[name].__module__]))
    written = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == name]
    *overloads, whole = [parameters(function) for function in written]
    flags = [signature.pop(FLAGS.get(name, "return_lse")) for signature in (*overloads, whole)]
    assert flags == [
        ("Literal[False]", "False"),
        ("Literal[True]", None),
        ("bool", "False"),
        ("bool", "False"),
    ]
    assert all(list(signature.items()) == list(whole.items()) for signature in overloads)
    without, with_lse, *either = [ast.unparse(function.returns) for function in written if function.returns]
    assert either == 2 * [f"{without} | {with_lse}"]


def parameters(function: ast.FunctionDef) -> dict[str, tuple[str, str | None]]:
    """Annotation and default of each, as written, in order."""
    args = function.args
    defaults = [None] * (len(args.args) - len(args.defaults)) + args.defaults + args.kw_defaults
    return {
        arg.arg: (ast.unparse(arg.annotation), default and ast.unparse(default))
        for arg, default in zip(args.args + args.kwonlyargs, defaults, strict=True)
        if arg.annotation
    }


@pytest.mark.parametrize("op", dispatch.available_implementations())
def test_names_in_types_are_those_that_there_are(op):
    """An op's parameter says which names it takes; what is registered says which those are."""
    annotation = inspect.signature(FUNCTIONS[op]).parameters["implementation"].annotation
    names = {name for part in typing.get_args(annotation) for name in typing.get_args(part)}
    assert names == set(dispatch.available_implementations()[op])


def test_layouts_in_types_are_those_that_there_are():
    from pallas_attn._call.pools import LAYOUTS

    assert typing.get_args(_types.Layout) == LAYOUTS


@pytest.mark.once
def test_no_two_sets_of_names_have_one_name():
    """The checker of annotations takes `Name | None` of one module for that of another."""
    sources = (ROOT / "pallas_attn").rglob("*.py")
    names = [
        name for path in sources for name in re.findall(r"^type (\w+) = Literal", path.read_text(), re.M)
    ]
    assert len(names) > 5
    assert len(set(names)) == len(names)


@pytest.mark.once
def test_annotations_are_checked_but_in_a_sample(pytestconfig):
    right = heads_in_l2(8, 4096)
    if pytestconfig.option.sample:
        assert heads_in_l2(8, 4096.0) == right  # pyright: ignore[reportArgumentType]
    else:
        with pytest.raises(jaxtyping.TypeCheckError, match="heads_in_l2"):
            heads_in_l2(8, 4096.0)  # pyright: ignore[reportArgumentType]
