"""Layouts and their builders, each against a mask over tokens written the obvious way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import unchecked

from pallas_attn import LocalStride, SparseLayout
from pallas_attn.cli import main, show_layout
from pallas_attn.ops.blocksparse_attention import builders
from pallas_attn.ops.blocksparse_attention.layout import rows_of
from pallas_attn.testing.blocksparse import PHI3_SMALL

pytestmark = pytest.mark.once


def obvious(length, heads, sees):
    """[heads, length, length]: sees(head, query, key) for keys up to the query."""
    mask = np.zeros((heads, length, length), bool)
    for head in range(heads):
        for query in range(length):
            for key in range(query + 1):
                mask[head, query, key] = sees(head, query, key)
    return mask


def check(layout: SparseLayout, expected: np.ndarray) -> None:
    layout.check()
    length = expected.shape[1]
    np.testing.assert_array_equal(layout.to_dense_mask()[:, :length, :length], expected)


@pytest.mark.parametrize("sizes", [(16, 16), (32, 16), (16, 32)])
def test_dense_causal(sizes):
    layout = builders.dense_causal(70, block_size=sizes[0], q_block_size=sizes[1])
    check(layout, obvious(70, 1, lambda head, query, key: True))
    assert layout.live_fraction() == 1.0
    assert layout.max_len >= 70


@pytest.mark.parametrize(("window", "q_block_size"), [(1, 16), (16, 16), (17, 16), (40, 32)])
def test_sliding_window(window, q_block_size):
    layout = builders.sliding_window(window, 90, block_size=16, q_block_size=q_block_size)

    def sees(head, query, key):
        first = query // q_block_size * q_block_size
        return any(first_key <= key // 16 * 16 + 15 for first_key in [first - window + 1])

    check(layout, obvious(90, 1, sees))
    mask = layout.to_dense_mask()[0]
    for query in range(90):
        assert mask[query, max(0, query - window + 1) : query + 1].all(), "a token of the window is missing"


@pytest.mark.parametrize(
    ("pattern", "heads", "kv_heads", "q_block_size"),
    [
        (LocalStride(16, 2, 4, 1), 4, 2, 16),
        (LocalStride(16, 1, 3, -1), 4, 2, 16),
        (LocalStride(16, 2, 3), 4, 2, 16),
        (LocalStride(16, 1, 5, 2, tp_rank=1), 3, 1, 16),
        (LocalStride(32, 1, 4, 1), 2, 2, 16),
    ],
    ids=str,
)
def test_local_stride(pattern, heads, kv_heads, q_block_size):
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "q_block_size": q_block_size}
    layout = builders.local_stride(pattern, 100, **sizes)
    block, step = pattern.block_size, pattern.head_sliding_step

    def sees(head, query, key):
        if step >= 0:
            offset = (pattern.tp_rank * heads + head) * step + 1
        else:
            offset = (pattern.tp_rank * kv_heads + head // (heads // kv_heads)) * -step + 1
        remote = (key // block + offset) % pattern.vert_stride == 0
        return remote or query // block - key // block < pattern.local_blocks

    assert layout.layout_heads == (heads if step else 1)
    check(layout, obvious(100, layout.layout_heads, sees))


def test_a_tensor_parallel_slice_is_the_slice_of_the_whole():
    whole = builders.local_stride(LocalStride(16, 1, 4, 1), 200, num_heads=8, num_kv_heads=4)
    for rank in range(2):
        pattern = LocalStride(16, 1, 4, 1, tp_rank=rank)
        part = builders.local_stride(pattern, 200, num_heads=4, num_kv_heads=2)
        np.testing.assert_array_equal(part.to_block_mask(), whole.to_block_mask()[4 * rank : 4 * rank + 4])


def test_phi3_small_keeps_an_eighth_and_a_band():
    layout = builders.local_stride(PHI3_SMALL, 8192, num_heads=8, num_kv_heads=2)
    layout.check()
    last = layout.to_block_mask()[:, -1]
    assert last.shape == (8, 128)
    assert last[:, -16:].all()
    np.testing.assert_array_equal(last[:, :112].sum(axis=1), 14)
    np.testing.assert_array_equal(last[:, :112].sum(axis=0), 1)  # heads take turns


@pytest.mark.parametrize("sizes", [(16, 16), (32, 16), (16, 64)])
def test_from_block_mask(sizes):
    block, q_block = sizes
    blocks = np.random.default_rng(0).random((3, -(-130 // q_block), -(-130 // block))) < 0.4
    layout = builders.from_block_mask(blocks, block_size=block, q_block_size=q_block)
    check(layout, obvious(130, 3, lambda head, query, key: blocks[head, query // q_block, key // block]))
    traced = jax.jit(
        functools.partial(builders.from_block_mask, block_size=block, q_block_size=q_block, nnz=60)
    )(blocks)
    assert traced.columns.shape == (3, 60)
    np.testing.assert_array_equal(traced.to_block_mask(), layout.to_block_mask())


def test_room_that_does_not_suffice_spoils_only_the_rows_behind():
    blocks = np.ones((1, 4, 4), bool)
    make = functools.partial(builders.from_block_mask, block_size=16, nnz=4)
    with pytest.raises(ValueError, match=r"from_block_mask: argument 'nnz': expected at least 10 \(blocks"):
        make(blocks)
    layout = jax.jit(make)(blocks)
    np.testing.assert_array_equal(rows_of(layout)[1], [[False, False, True, True]])
    with pytest.raises(ValueError, match="'row_pointers': expected 0 <= pointers <= nnz"):
        layout.check()


def vertical_slash_sees(vertical, slash, block):
    def sees(head, query, key):
        lines = any(v >= 0 and v // block == key // block for v in vertical[head])
        row = query // block * block
        near = any(
            (row + i - s) // block == key // block for s in slash[head] if s >= 0 for i in range(block)
        )
        return lines or near

    return sees


def test_vertical_slash():
    vertical = np.array([[0, 37], [90, -1]], np.int32)
    slash = np.array([[0, 50, 16], [5, -1, 200]], np.int32)
    layout = builders.vertical_slash(vertical, slash, 100, block_size=16)
    check(layout, obvious(100, 2, vertical_slash_sees(vertical, slash, 16)))
    traced = jax.jit(functools.partial(builders.vertical_slash, max_len=100, block_size=16, nnz=50))(
        vertical, slash
    )
    np.testing.assert_array_equal(traced.to_dense_mask(), layout.to_dense_mask())


def test_live_fraction_counts_blocks():
    blocks = np.zeros((1, 4, 4), bool)
    blocks[0, 3, 0] = blocks[0, 1, 1] = True
    assert builders.from_block_mask(blocks, block_size=16).live_fraction() == pytest.approx(2 / 10)


def test_a_layout_is_a_pytree():
    layout = builders.dense_causal(64, block_size=16)
    doubled = jax.tree.map(lambda x: 2 * x, layout)
    assert doubled.block_size == 16
    np.testing.assert_array_equal(doubled.columns, 2 * layout.columns)
    assert len(jax.tree.leaves(layout)) == 2


def broken(**changes):
    parts = {"row_pointers": [[0, 1, 3]], "columns": [[0, 0, 1]], "block_size": 16, "q_block_size": 16}
    parts |= changes
    arrays = {name: np.array(parts.pop(name), np.int32) for name in ("row_pointers", "columns")}
    return SparseLayout(**arrays, **parts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 24}, "'block_size': expected a power of two from 16 to 2\\*\\*30, got 24"),
        ({"block_size": 2**31}, "'block_size': expected a power of two from 16 to 2\\*\\*30, got 2147483648"),
        ({"q_block_size": 8}, "'q_block_size': expected a power of two from 16 to 2\\*\\*30, got 8"),
        (
            {"row_pointers": [[0, 1, 4]]},
            r"'row_pointers': expected 0 <= pointers <= nnz \(3\), ascending, got 4",
        ),
        ({"row_pointers": [[0, 2, 1]]}, "'row_pointers': expected 0 <= pointers"),
        ({"row_pointers": [[-1, 1, 3]]}, "'row_pointers': expected 0 <= pointers"),
        (
            {"columns": [[0, 0, 2]]},
            "'columns': expected blocks from 0 up to the row's own positions, got 2 for",
        ),
        ({"columns": [[-1, 0, 1]]}, "'columns': expected blocks from 0"),
        ({"columns": [[0, 1, 0]]}, "'columns': expected ascending blocks"),
        ({"columns": [[0, 1, 1]]}, "'columns': expected ascending blocks"),
        ({"row_pointers": [[0]]}, "'row_pointers': expected at least one row"),
    ],
    ids=str,
)
def test_what_cannot_be_a_layout_is_refused(changes, message):
    broken().check()
    with pytest.raises(ValueError, match=f"SparseLayout: argument {message}"):
        broken(**changes).check()
    if "size" not in message and "at least one row" not in message:
        assert bool(jnp.any(rows_of(broken(**changes))[1])), "the traced check must see it too"
    for method in (SparseLayout.to_block_mask, SparseLayout.to_dense_mask, SparseLayout.live_fraction):
        with pytest.raises(ValueError, match=f"SparseLayout: argument {message}"):
            method(broken(**changes))
        with pytest.raises(ValueError, match=r"to_block_mask: argument 'self': .* got traced ones"):
            jax.eval_shape(lambda layout, method=method: method(layout), broken())


def test_builders_refuse():
    with pytest.raises(TypeError, match="local_stride: argument 'pattern': expected a LocalStride"):
        unchecked(builders.local_stride)(3, 64, num_heads=2, num_kv_heads=1)
    with pytest.raises(ValueError, match="'q_block_size': expected at most the pattern's block_size"):
        builders.local_stride(LocalStride(16, 1, 2), 64, num_heads=2, num_kv_heads=1, q_block_size=32)
    with pytest.raises(ValueError, match="'num_heads': expected a multiple of num_kv_heads"):
        builders.local_stride(LocalStride(16, 1, 2), 64, num_heads=3, num_kv_heads=2)
    with pytest.raises(ValueError, match="dense_causal: argument 'block_size': expected a power of two"):
        builders.dense_causal(64, block_size=20)
    with pytest.raises(ValueError, match="sliding_window: argument 'window': expected at least 1"):
        builders.sliding_window(0, 64, block_size=16)
    with pytest.raises(TypeError, match="from_block_mask: argument 'mask': expected dtype bool"):
        builders.from_block_mask(np.ones((1, 2, 2), np.int32), block_size=16)
    with pytest.raises(ValueError, match="'nnz': expected an int for a mask that is traced"):
        jax.jit(functools.partial(builders.from_block_mask, block_size=16))(np.ones((1, 2, 2), bool))


def test_show_layout_says_what_its_colours_mean(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure))
    show_layout.draw(builders.sliding_window(256, 512, block_size=64), tmp_path / "layout.png")
    (legend,) = figures[0].legends
    named = zip(legend.texts, legend.get_patches(), strict=True)
    colours = {text.get_text(): patch.get_facecolor()[:3] for text, patch in named}
    picture = figures[0].axes[0].images[0].get_array()
    assert colours["ahead of the queries (causal)"] == pytest.approx(tuple(picture[0, -1]))
    assert colours["left out by the layout"] == pytest.approx(tuple(picture[-1, 0]))
    assert colours["seen"] == pytest.approx(tuple(picture[0, 0]))


def test_show_layout_draws_a_picture(tmp_path, capsys):
    picture = tmp_path / "layout.png"
    options = ["--max-len", "512", "--block-size", "32", "--local-blocks", "2", "--output", str(picture)]
    assert main(["show-layout", *options]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "4 heads, live fraction 0." in capsys.readouterr().out
    assert main(["show-layout", "--block-size", "20"]) == 2
    assert "'block_size': expected a power of two >= 16, got 20" in capsys.readouterr().err


def test_show_layout_of_more_than_there_is_memory_for_is_one_line(monkeypatch, tmp_path, capsys):
    def too_much(*_, **__):
        raise MemoryError("Unable to allocate 364. GiB")

    monkeypatch.setattr(builders, "dense_causal", too_much)
    picture = tmp_path / "layout.png"
    assert main(["show-layout", "--pattern", "dense", "--output", str(picture)]) == 2
    assert capsys.readouterr().err == "pallas-attn: error: Unable to allocate 364. GiB\n"
    assert not picture.exists()


def test_layouts_are_told_apart_by_themselves():
    """Their arrays are not compared, which may be traced."""
    layout = builders.dense_causal(70, block_size=16)
    assert layout == layout
    assert layout != builders.dense_causal(70, block_size=16)


def test_show_layout_writes_a_png_whatever_the_file_is_called(tmp_path, capsys):
    for name in ("layout", "layout.jpg"):
        picture = tmp_path / name
        assert main(["show-layout", "--pattern", "dense", "--max-len", "128", "--output", str(picture)]) == 0
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert f"{name}: all heads alike, live fraction 1.000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--pattern", "dense", "--window", "5"],
            "show-layout: argument '--window': expected none with --pattern dense, got 5",
        ),
        (
            ["--pattern", "window", "--num-heads", "2"],
            "show-layout: argument '--num-heads': expected none with --pattern window, got 2",
        ),
    ],
)
def test_show_layout_refuses_what_a_pattern_does_not_take(options, message, tmp_path, capsys):
    picture = tmp_path / "layout.png"
    assert main(["show-layout", *options, "--output", str(picture)]) == 2
    assert message in capsys.readouterr().err
    assert not picture.exists()
