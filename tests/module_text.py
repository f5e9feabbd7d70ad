"""The text of what a call lowers to, without what may differ between two ways of writing the same call.

Kernels' Triton IR stands without source locations, and their arguments in the order in which the body needs them. The
module around them stands as the expression that its results are: values are numbered as they are first needed, a
function that is called is what it does, a kernel is called by the text it has. So neither names of functions nor the
order of operands show.
"""

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import lowering
import triton_kernels
from jax._src.lib import triton as triton_lib
from jax._src.lib.mlir import ir

from pallas_attn._lowering.private import PTX_CALL

ARGUMENT, NUMBERED, VALUE = (re.compile(one) for one in (r"%arg\d+", r"%\d+\b", r"%\w+"))
ZERO = "(0 : i32)"


def texts(lowered: Any, written: list[triton_kernels.Written]) -> dict[str, str]:
    """Of each kernel, and of the module. `written` are the kernels that lowering has written by itself."""
    kernels = [
        (f"{name} warps {num_warps}, stages {num_stages}", _plain(bytecode))
        for name, bytecode, num_warps, num_stages in lowering.triton_kernels(lowered)
    ]
    own = [(f"{one.name} warps {one.num_warps}, stages {one.num_stages}", one.text) for one in written]
    ordered = [(head, *in_order(text)) for head, text in kernels + own]
    found = {f"{i} {head}": text for i, (head, text, _) in enumerate(ordered)}
    module = lowered.compiler_ir("stablehlo")
    found["module"] = "\n".join(_Expression(module, [(text, order) for _, text, order in ordered]).lines())
    return found


def _plain(bytecode: bytes) -> str:
    with ir.Context() as context:
        triton_lib.dialect.register_dialect(context)
        text = ir.Module.parse(bytecode).operation.get_asm(enable_debug_info=False)
    return _without_places(text)


def _without_places(text: str) -> str:
    """Pallas begins a kernel with the place of its block in each operand, in their order: all of them 0, by which it
    then counts. Here constants stand where they are used, and a product with 0 is one."""
    stands_for: dict[str, str] = {}
    lines: list[str] = []
    for line in text.splitlines():
        line = VALUE.sub(lambda match: stands_for.get(match[0], match[0]), line)
        name, _, made = line.strip().partition(" = ")
        if made.startswith("arith.constant "):
            stands_for[name] = f"({made.removeprefix('arith.constant ')})"
        elif made.startswith(f"arith.muli {ZERO}, "):
            stands_for[name] = ZERO
        else:
            lines.append(line)
    numbers: dict[str, str] = {}
    return NUMBERED.sub(lambda match: numbers.setdefault(match[0], f"%{len(numbers)}"), "\n".join(lines))


def in_order(text: str) -> tuple[str, list[int]]:
    """A kernel's text with its arguments in the order in which the body names them, and that order."""
    head, opening, rest = text.partition("tt.func public @")
    signature, end, body = rest.partition(") {\n")
    if not end:
        signature, end, body = rest.partition(") attributes")
    name, _, listed = signature.partition("(")
    types = re.findall(r"%arg(\d+): (.*?)(?=, %arg|$)", listed)
    given = {int(number): kind for number, kind in types}
    numbers = list(dict.fromkeys(int(one[4:]) for one in ARGUMENT.findall(body)))
    order = [n for n in numbers if n in given]
    order += sorted(given.keys() - set(order), key=lambda n: (given[n], n))
    renamed = {
        f"%arg{n}": f"%arg{i}" for i, n in enumerate([*order, *(n for n in numbers if n not in given)])
    }
    body = ARGUMENT.sub(lambda match: renamed[match[0]], body)
    listed = ", ".join(f"%arg{i}: {given[n]}" for i, n in enumerate(order))
    return f"{head}{opening}{name}({listed}{end}{body}", order


class _Scope:
    """A block: values that it defines have their lines in it."""

    def __init__(self, block: ir.Block, arguments: list[str], outer: "_Scope | None", lines: list[str]):
        self.block, self.outer, self.lines = block, outer, lines
        self.names: dict[Any, str] = dict(zip(block.arguments, arguments, strict=True))

    def of(self, value: ir.Value) -> "_Scope":
        owner = value.owner
        block = owner if isinstance(owner, ir.Block) else owner.operation.block
        scope: _Scope | None = self
        while scope is not None and scope.block != block:
            scope = scope.outer
        assert scope is not None
        return scope


class _Expression:
    """A module's results."""

    def __init__(self, module: ir.Module, kernels: list[tuple[str, list[int]]]):
        self._functions = {
            ir.StringAttr(op.attributes["sym_name"]).value: op for op in module.body.operations
        }
        self._kernels = kernels
        # Both lowerings number their calls as they come in the module.
        self._pallas = self._number_calls(module)

    def _number_calls(self, module: ir.Module) -> dict[Any, int]:
        found: dict[Any, int] = {}

        def visit(op: Any) -> ir.WalkResult:
            if "call_target_name" in op.attributes and "triton" in str(op.attributes["call_target_name"]):
                found[op.results[0]] = len(found)
            return ir.WalkResult.ADVANCE

        module.operation.walk(visit)
        return found

    def lines(self) -> list[str]:
        main, lines = self._functions["main"], []
        block = main.regions[0].blocks[0]
        results = self._results(
            _Scope(block, [f"given{i}" for i in range(len(block.arguments))], None, lines)
        )
        return [*sorted(lines), f"return {', '.join(results)}"]

    def _results(self, scope: _Scope) -> list[str]:
        operations = list(scope.block.operations)
        return [self._name(value, scope) for value in operations[-1].operands]

    def _name(self, value: ir.Value, scope: _Scope) -> str:
        scope = scope.of(value)
        if value not in scope.names:
            op = value.owner
            scope.names.update(zip(op.results, self._operation(op, scope), strict=True))
        return scope.names[value]

    def _operation(self, op: Any, scope: _Scope) -> list[str]:
        if op.name == "func.call":
            block = self._functions[ir.FlatSymbolRefAttr(op.attributes["callee"]).value].regions[0].blocks[0]
            given = [self._name(value, scope) for value in op.operands]
            inner = _Scope(block, given, None, scope.lines)
            return self._results(inner)
        attributes = {name: str(op.attributes[name]) for name in self._attributes(op)}
        operands = self._operands(op, attributes)
        given = [self._name(value, scope) for value in operands]
        # What a kernel is given and does not look at has no order.
        used = int(attributes.pop("used", len(given)))
        given = [*given[:used], *sorted(given[used:])]
        regions = [line for region in op.regions for line in self._region(region, scope)]
        kinds = ", ".join(str(result.type) for result in op.results)
        shown = " ".join(f"{name}={text}" for name, text in sorted(attributes.items()))
        text = f"{op.name} {shown}({', '.join(given)}) : {kinds}" + "".join(f"\n  {line}" for line in regions)
        name = f"%{hashlib.sha256(text.encode()).hexdigest()[:10]}"
        if f"{name} = {text}" not in scope.lines:
            scope.lines.append(f"{name} = {text}")
        return [f"{name}#{i}" for i in range(len(op.results))]

    def _attributes(self, op: Any) -> Iterator[str]:
        return (one if isinstance(one, str) else one.name for one in op.attributes)

    def _operands(self, op: Any, attributes: dict[str, str]) -> list[ir.Value]:
        """A kernel's in the order of its arguments; its text takes the place of what stands in the attributes."""
        operands = list(op.operands)
        config = attributes.get("mhlo.backend_config", "")
        if op.results and op.results[0] in self._pallas:
            number = self._pallas[op.results[0]]
            attributes["mhlo.backend_config"] = re.sub(r'\bir = "[^"]*", ', "", config)
        elif attributes.get("call_target_name") == f'"{PTX_CALL}"' and (
            own := re.search(r"kernel (\d+)", config)
        ):
            number, operands = int(own[1]), operands[:-2]
            attributes["mhlo.backend_config"] = config.replace(own[0], "")
        else:
            return operands
        text, order = self._kernels[number]
        body = text.partition(") {\n")[2] or text.partition(") attributes")[2]
        used = {int(one[4:]) for one in ARGUMENT.findall(body)}
        attributes["used"] = str(sum(i in used and n < len(operands) for i, n in enumerate(order)))
        order = [n for n in order if n < len(operands)]
        attributes["kernel"] = hashlib.sha256(text.encode()).hexdigest()[:16]
        attributes.pop("operand_layouts", None)
        if aliases := attributes.get("output_operand_aliases"):
            attributes["output_operand_aliases"] = re.sub(
                r"operand_index = (\d+)",
                lambda match: f"operand_index = {order.index(int(match[1]))}",
                aliases,
            )
        return [operands[n] for n in order]

    def _region(self, region: Any, scope: _Scope) -> list[str]:
        block, lines = region.blocks[0], []
        depth = 0
        outer: _Scope | None = scope
        while outer is not None:
            depth, outer = depth + 1, outer.outer
        arguments = [f"block{depth}.{i}" for i in range(len(block.arguments))]
        results = self._results(_Scope(block, arguments, scope, lines))
        split = [part for line in sorted(lines) for part in line.split("\n")]
        return ["{", *split, f"yield {', '.join(results)}", "}"]
