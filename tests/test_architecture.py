"""What is known of GPUs, and the rule for one that is not: `_call/architecture.py`, and nobody else, asks."""

import ast
import dataclasses
from pathlib import Path

import lowering
import pytest

from pallas_attn._call import architecture, dispatch
from pallas_attn._call.device import Device, current_device

pytestmark = pytest.mark.once

PACKAGE = Path(__file__).parents[1] / "pallas_attn"
# What Triton's own passes and PTX are called, by capability, is Triton's to say.
TRITON = "_lowering/"


def device(capability: int | None, name: str = "NVIDIA Something") -> Device:
    return Device("gpu", name, 100, capability)


def asks(source: str) -> list[int]:
    """Lines that compare a compute capability with a number."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and "capability" in ast.unparse(node):
            numbers = [part for part in ast.walk(node) if isinstance(part, ast.Constant)]
            found += [node.lineno] if any(isinstance(part.value, int) for part in numbers) else []
    return found


def test_nobody_else_asks_what_a_gpu_is():
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        if name != "_call/architecture.py" and not name.startswith(TRITON):
            assert not asks(path.read_text()), name


@pytest.mark.parametrize(
    "line",
    ["d.compute_capability == 90", "capability is None or capability >= 89", "x.capability in (None, 90)"],
)
@pytest.mark.control
def test_who_asked_would_be_seen(line):
    assert asks(line)


@pytest.mark.parametrize(
    ("capability", "taken_for"),
    [(None, 90), (60, 80), (80, 80), (88, 87), (91, 90), (101, 100), (104, 103), (119, 110), (130, 121)],
)
def test_a_gpu_is_taken_for_the_newest_known_before_it(capability, taken_for):
    assert device(capability).architecture.capability == taken_for


def test_cards_are_of_architectures_in_order():
    known = [one.capability for one in architecture.ARCHITECTURES]
    assert known == sorted(known)
    for card in architecture.CARDS:
        assert card.capability in known or architecture.too_old(card.capability), card
        # An abstract device is known by its name alone: a name within another's comes behind it.
        assert architecture.capability_of(f"NVIDIA {card.name}") == card.capability


@pytest.mark.parametrize("sm", lowering.DEVICES)
def test_an_abstract_gpu_is_known_by_its_name(sm):
    with lowering.abstract_mesh(lowering.DEVICES[sm]):
        found = current_device()
    assert (found.compute_capability, found.num_cores) == (sm, lowering.DEVICES[sm][1])


@pytest.mark.parametrize(
    ("implementation", "capability", "said"),
    [
        ("pallas", 75, "needs sm_80 or newer, the device is sm_75"),
        ("triton", None, "the compute capability of 'NVIDIA Something' is not known"),
        ("cuda", None, "needs an sm_90 GPU"),
        ("cuda", 91, "needs an sm_90 GPU"),
    ],
)
def test_code_for_hopper_is_not_for_what_is_taken_for_one(implementation, capability, said):
    assert said in dispatch._DEVICES[implementation](device(capability))


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("implementation", ["pallas", "triton"])
def test_known_gpus_are_served(implementation, capability):
    assert dispatch._DEVICES[implementation](device(capability)) is None


def test_features_come_with_generations():
    """A later GPU of the data centre loses none but the products that are Hopper's own."""
    features = ("asynchronous_products", "dependent_launch", "converts_e4m3")
    of = {sm: device(sm).architecture for sm in (80, 89, 90, 100, 120)}
    assert [[getattr(of[sm], name) for name in features] for sm in (80, 89, 90, 100)] == [
        [False, False, False], [False, False, True], [True, True, True], [True, True, True],
    ]  # fmt: skip
    assert [sm for sm, one in of.items() if one.warpgroup_products] == [90]
    assert [sm for sm, one in of.items() if one.tensor_memory] == [100]


def test_a_device_that_is_replaced_is_another():
    hopper = device(90)
    assert hopper.architecture is architecture.HOPPER
    assert dataclasses.replace(hopper, compute_capability=80).architecture is architecture.AMPERE
