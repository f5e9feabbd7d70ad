"""How a call of the CUDA MLA kernel is launched: decided by plain C++ from the call and the device. No GPU."""

import ctypes

import pytest
from host_build import build_library

NOTHING_IS_CUT, INSIDE, KERNEL_FOLLOWS = range(3)
H100 = (132, 1)


COUNTS = ("batch", "query_len", "num_kv_heads", "group", "num_pages", "max_blocks", "num_sm_parts")


class Call(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in (*COUNTS, "merge_apart"))


class Tile(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 16),
        ("base", ctypes.c_uint64),
        ("extent", ctypes.c_uint64 * 3),
        ("strides_bytes", ctypes.c_uint64 * 2),
        ("box", ctypes.c_uint32 * 3),
    )


class Plan(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_int * 3),
        *((name, ctypes.c_int) for name in ("threads", "shared_bytes", "merging", "cooperative")),
        ("tiles", Tile * 3),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_library(
        tmp_path_factory.mktemp("plan"), "tests/launch_plan_host.cc", "csrc/mla/sm90/dense/launch_plan.cc"
    )


def planned(library: ctypes.CDLL, device: tuple[int, int] = H100, **call: int) -> Plan:
    usual = dict(batch=128, query_len=1, num_kv_heads=1, group=128, num_pages=8192, max_blocks=64)
    usual |= dict(num_sm_parts=66, merge_apart=0)
    plan = Plan()
    library.plan_on_host(ctypes.byref(Call(**(usual | call))), *device, ctypes.byref(plan))
    return plan


def test_the_grid(library: ctypes.CDLL) -> None:
    plan = planned(library, query_len=3, num_kv_heads=2, group=50, num_sm_parts=22)
    assert list(plan.grid) == [3, 22, 2]  # 150 rows of a KV head in tiles of 64
    assert (plan.threads, plan.shared_bytes) == (384, 226324)


def test_the_tensor_maps(library: ctypes.CDLL) -> None:
    plan = planned(library, batch=5, query_len=3, num_kv_heads=2, group=50, num_pages=4_000_000)
    tiles = {
        tile.name: (tile.base, [*tile.extent], [*tile.strides_bytes], [*tile.box]) for tile in plan.tiles
    }
    assert tiles == {
        b"query": (0x1000, [576, 150, 10], [1152, 150 * 1152], [64, 64, 1]),
        # The KV heads of a token are one row; 4 million pages are far above 2^31 elements.
        b"latent_cache": (0x2000, [1152, 64, 4_000_000], [2304, 64 * 2304], [64, 64, 1]),
        b"out": (0x3000, [512, 150, 10], [1024, 150 * 1024], [64, 16, 1]),
    }


@pytest.mark.parametrize(
    ("device", "call", "merging"),
    [
        (H100, dict(num_sm_parts=1), NOTHING_IS_CUT),
        (H100, {}, INSIDE),  # 2 row tiles x 66 parts: exactly as many as multiprocessors
        (H100, dict(num_sm_parts=67), KERNEL_FOLLOWS),
        (H100, dict(group=64, num_sm_parts=132), INSIDE),
        (H100, dict(group=64, num_sm_parts=133), KERNEL_FOLLOWS),
        (H100, dict(num_kv_heads=2, num_sm_parts=33), INSIDE),
        (H100, dict(num_kv_heads=2, num_sm_parts=34), KERNEL_FOLLOWS),
        (H100, dict(merge_apart=1), KERNEL_FOLLOWS),
        (H100, dict(merge_apart=1, num_sm_parts=1), NOTHING_IS_CUT),
        # Fewer multiprocessors than the schedule was made for: MPS, a green context.
        ((66, 1), {}, KERNEL_FOLLOWS),
        ((131, 1), {}, KERNEL_FOLLOWS),
        # No CTA fits, whatever the reason: the launch itself will say so.
        ((132, 0), {}, KERNEL_FOLLOWS),
        ((66, 2), {}, INSIDE),
        # Few rows over many splits are merged faster by a kernel made for them.
        (H100, dict(batch=1, group=16, max_blocks=512, num_sm_parts=132), KERNEL_FOLLOWS),
        (H100, dict(batch=1, group=128, max_blocks=512, num_sm_parts=66), INSIDE),
        (H100, dict(batch=2, group=128, max_blocks=4, num_sm_parts=66), KERNEL_FOLLOWS),
        # More cuts than the kernel can list.
        ((600, 1), dict(batch=256, num_sm_parts=256), INSIDE),
        ((600, 1), dict(batch=256, num_sm_parts=300), INSIDE),
        ((600, 1), dict(batch=257, num_sm_parts=257), KERNEL_FOLLOWS),
    ],
)
def test_who_merges(library: ctypes.CDLL, device: tuple[int, int], call: dict, merging: int) -> None:
    plan = planned(library, device, **call)
    assert plan.merging == merging
    assert plan.cooperative == (merging == INSIDE)


def test_every_plan_of_a_cooperative_launch_fits_the_device(library: ctypes.CDLL) -> None:
    for num_sms in (1, 16, 66, 114, 132):
        for parts in range(1, 140):
            for group, heads in ((1, 1), (64, 1), (65, 1), (128, 2), (512, 1)):
                plan = planned(library, (num_sms, 1), group=group, num_kv_heads=heads, num_sm_parts=parts)
                assert not plan.cooperative or plan.grid[0] * plan.grid[1] * plan.grid[2] <= num_sms
