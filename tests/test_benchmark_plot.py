"""benchmarks/plot.py: what is in the axes, not only that there is a file."""

import benchmark_rows
import looks
import plot
import pytest
import results

pytestmark = pytest.mark.once


def row(
    implementation: str, us: float, *, batch=128, seqlen=1024, heads=16, q_len=1, **fields
) -> results.Row:
    """A cell of 1000 bytes a token and sequence, whose roof is 50% above what 100 us reach."""
    options = f"-qlen{q_len}" if q_len > 1 else ""
    sizes = dict(batch=batch, seqlen=seqlen, heads=heads, q_len=q_len)
    figures = dict(tflops=1.0, gbs=batch * seqlen / us, roof_percent=100 * 100 / us / 1.5)
    case = f"b{batch}-s{seqlen}-q{heads}kv{fields.get('kv_heads', 1)}-d576-p64-bf16{options}"
    return benchmark_rows.row(
        **{**sizes, **figures, "case": case, "us": us, "implementation": implementation, **fields}
    )


def drawn(axes) -> dict[str, list[tuple[float, float]]]:
    return {line.get_label(): [tuple(point) for point in line.get_xydata()] for line in axes.get_lines()}


def visible(figure) -> list:
    return [axes for axes in figure.axes if axes.axison]


def test_a_line_an_implementation_under_the_roof():
    rows = [
        row("FlashMLA", 100, seqlen=4096),
        row("FlashMLA", 50),
        row("ours, CUDA", 40),
        row("FA3 (vLLM)", 80),
    ]
    (axes,) = visible(plot.bandwidth(rows))
    lines = drawn(axes)
    assert lines["FlashMLA"] == [(1024, 128 * 1024 / 50), (4096, 128 * 4096 / 100)]
    assert lines["pallas_attn, CUDA"] == [(1024, 128 * 1024 / 40)]
    roof = dict(lines[plot.ROOF])
    assert roof[1024] == pytest.approx(128 * 1024 * 1.5 / 100)
    assert roof[4096] == pytest.approx(128 * 4096 * 1.5 / 100)
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1k", "4k"]
    assert (axes.get_title(), axes.get_ylabel()) == ("128 sequences, 16 heads", "GB/s")
    assert axes.get_xlabel() == "tokens a sequence"
    assert axes.get_ylim()[0] == 0
    (legend,) = axes.figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["pallas_attn, CUDA", "FlashMLA", "FA3 (vLLM)", plot.ROOF]


def test_a_panel_a_batch_and_head_count_in_a_grid():
    rows = [
        row(name, us, batch=batch, heads=heads, seqlen=seqlen, q_len=q_len)
        for name, us in (("ours", 40), ("FlashMLA", 50))
        for batch, heads, q_len in ((1, 16, 1), (1, 128, 1), (128, 16, 1), (128, 16, 2))
        for seqlen in (1024, 8192)
    ]
    figure = plot.bandwidth([*rows, row("ours", 3, case="b128-normal4096-q16kv1", seqlen=4050)])
    titles = [axes.get_title() for axes in visible(figure)]
    assert titles == [
        "1 sequence, 16 heads",
        "1 sequence, 128 heads",
        "128 sequences, 16 heads",
        "128 sequences x 2 tokens, 16 heads",
    ]
    columns = {axes.get_title(): axes.get_subplotspec().colspan.start for axes in visible(figure)}
    assert list(columns.values()) == [0, 1, 0, 0]
    colors = [{line.get_label(): line.get_color() for line in axes.get_lines()} for axes in visible(figure)]
    assert all(color == colors[0] for color in colors)
    assert len(set(colors[0].values())) == 3
    assert all(len(points) == 2 for axes in visible(figure) for points in drawn(axes).values()), (
        "varied lengths"
    )


def test_no_lines_where_lengths_do_not_differ():
    assert plot.bandwidth([row("ours", 40)]) is None


def test_ratio_to_the_best_peer():
    rows = [
        row("ours", 100),
        row("ours, CUDA", 90),
        row("FlashMLA", 120),
        row("FA3 (vLLM)", 110),
        row("ours, plain jnp", 9000),
        row("ours, CUDA", 100, heads=32),
        row("ours, Pallas", 95, heads=32),
        row("FlashMLA", 76, heads=32),
        row("FlashMLA", 5, heads=64),
    ]
    found = {cell.ours.heads: cell for cell in plot.ratios(rows)}
    assert found.keys() == {16, 32}, "where there are both"
    assert found[16].ratio == pytest.approx(1.1), "what a call takes by itself, though another is faster"
    assert found[32].ratio == pytest.approx(0.8), "or else the fastest"
    assert found[16].peer.implementation == "FA3 (vLLM)"
    (cell,) = plot.ratios(rows, "ours, Pallas")
    assert cell.ratio == pytest.approx(76 / 95)


def test_heat_map_marks_where_we_lose():
    rows = [
        *(row("ours", 100, heads=heads, batch=batch) for heads in (16, 128) for batch in (1, 128)),
        row("FlashMLA", 80, heads=16, batch=1),
        row("FlashMLA", 99.7, heads=16, batch=128),
        row("FlashInfer", 150, heads=128, batch=1),
        row("ours", 100, case="b128-normal4096-q16kv1", seqlen=4050),
        row("FlashMLA", 99, case="b128-normal4096-q16kv1", seqlen=4050),
    ]
    figure = plot.ratio(rows)
    axes = figure.axes[0]
    texts = {text.get_text(): (text.get_position(), text.get_weight()) for text in axes.texts}
    assert texts == {
        "0.80  FM": ((0, 0), "bold"),
        "1.00  FM": ((0, 1), "normal"),
        "1.50  FI": ((1, 0), "normal"),
        "0.99  FM": ((0, 2), "bold"),
    }
    frames = sorted(tuple(patch.get_center()) for patch in axes.patches)
    assert frames == [pytest.approx((0, 0)), pytest.approx((0, 2))]
    assert "framed: we lose (2 of 4)" in axes.get_title()
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "1 x 1024",
        "128 x 1024",
        "128 x 4050 (varied)",
    ]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["16 heads", "128 heads"]
    assert figure.get_supxlabel() == "best peer:  FM = FlashMLA,  FI = FlashInfer"
    image = axes.images[0].get_array()
    assert image[1, 0] == pytest.approx(0.997)
    assert image.mask[1, 1], "no peer there"


def test_heat_map_tells_options_apart():
    rows = [
        row(name, 10, kv_heads=8, heads=32, case=f"b1-s1024-q32kv8-d128-p16-bf16{option}")
        for name in ("ours", "FA3 (vLLM)")
        for option in ("", "-kve4m3", "-w1024")
    ]
    axes = plot.ratio(rows).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "32 heads\nover 8",
        "32 heads\nover 8\nkve4m3",
        "32 heads\nover 8\nw1024",
    ]
    assert plot.ratio([row("ours", 1)]) is None


def test_files_lie_beside_the_table_or_where_asked(tmp_path, capsys):
    path = tmp_path / "h100.csv"
    rows = [row(name, 50, seqlen=seqlen) for name in ("ours", "FlashMLA") for seqlen in (1024, 2048)]
    results.write(path, [*rows, row("ours", 1, op="roof"), row("ours", 1, heads=77, ok=False)])
    assert plot.main([str(path)]) == 0
    names = [f"h100-mla_decode-{kind}.png" for kind in ("bandwidth", "ratio", "roof")]
    assert sorted(p.name for p in tmp_path.glob("*.png")) == names
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
    assert str(tmp_path / names[0]) in capsys.readouterr().out
    (tmp_path / "pictures").mkdir()
    assert plot.main([str(path), "--out", str(tmp_path / "pictures"), "--format", "svg"]) == 0
    svg = (tmp_path / "pictures" / "h100-mla_decode-bandwidth.svg").read_text()
    assert "<svg" in svg


def test_percent_of_the_roof_beside_the_peers():
    rows = [
        row("ours, CUDA", 100),
        row("FlashMLA", 200),
        row("ours, CUDA", 50, heads=32),
        row("FA3 (vLLM)", 1, heads=8),
    ]
    measured = [row("measured roof", 1, case="read", op="roof", gbs=3200.0)]
    figure = plot.roof_chart(
        [plot.Table(rows, measured), plot.Table([row("ours", 75, op="flash_attention")], [])]
    )
    mla, flash = visible(figure)
    lines = drawn(mla)
    assert lines["pallas_attn, CUDA"] == [(pytest.approx(100 / 1.5), 0), (pytest.approx(200 / 1.5), 1)]
    assert lines["FlashMLA"] == [(pytest.approx(50 / 1.5), 0)]
    assert [x for x, _ in lines["roof"]] == [100, 100]
    assert mla.get_title() == f"MLA decode\nbf16, {rows[0].device}\nroof: 3200 GB/s"
    labels = [label.get_text() for label in mla.get_yticklabels()]
    assert labels == [f"128 x 1024 tokens, {heads} heads" for heads in (16, 32, 8)]
    assert flash.get_title() == f"Flash attention, forward\nbf16, {rows[0].device}, 16 heads", "said once"
    assert [label.get_text() for label in flash.get_yticklabels()] == ["128 x 1024 tokens"]
    (legend,) = figure.legends
    named = {text.get_text() for text in legend.get_texts()}
    assert named == {"pallas_attn", "pallas_attn, CUDA", "FlashMLA", "FA3 (vLLM)", "roof"}
    assert plot.roof_chart([plot.Table([row("ours", 1, roof_percent=None)], [])]) is None


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("b8-t2048s2048-q16kv16-d128-bf16-causal", "8 x 2048 tokens, 32 heads over 8, dim 128, causal"),
        ("b1-2048on30720-q32kv8-d64-p16-bf16-t2048-kve4m3", 
         "2048 new tokens on 30720, 32 heads over 8, dim 64, e4m3 cache"),
        ("b66-64decodes2prompts-q32kv8-d128-p16-bf16-t4160", "64 decodes and 2 prompts, 32 heads over 8, dim 128"),
        ("b4-s1024-q32kv8-d128-p16-bf16-w512", "4 x 1024 tokens, 32 heads over 8, dim 128, window 512"),
        ("8192of8192-q32kv8-d128-0.125-b64x64-bfloat16",
         "8192 tokens, 32 heads over 8, dim 128, 0.125 of the blocks, blocks of 64"),
        ("b2-unheard-of-q32kv8", "unheard, 32 heads over 8, of"),
    ],
)  # fmt: skip
def test_cells_in_words(case, words):
    batch = int(case[1 : case.index("-")]) if case.startswith("b") else 1
    assert looks.cell(row("ours", 1, case=case, batch=batch, heads=32, kv_heads=8)) == words.split(", ")


def test_several_tables_are_one_picture(tmp_path):
    for name in ("a", "b"):
        results.write(tmp_path / f"{name}.csv", [row("ours", 50), row("FlashMLA", 60)])
    assert plot.main([str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]) == 0
    assert [path.name for path in tmp_path.glob("*.png")] == ["a-roof.png"]


def test_a_picture_for_a_page(tmp_path):
    """The same file from the same table, named as it, with letters that are letters."""
    path = tmp_path / "2026-h100.csv"
    results.write(path, [row("ours", 50), row("ours, CUDA", 50), row("FlashMLA", 60)])
    pictures = []
    for _ in range(2):
        assert plot.main([str(path), "--page", "--without", "ours, CUDA"]) == 0
        pictures.append((tmp_path / "2026-h100.svg").read_bytes())
    assert pictures[0] == pictures[1]
    assert b"FlashMLA</text>" in pictures[0]
    assert b"CUDA" not in pictures[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["none.csv"], "No such file"),
        (["t.csv", "--cells", "x"], "expected right figures of cells that can be drawn, found none"),
        (["t.csv", "--cells", "("], "missing )"),
        (["t.csv", "--out", "no/such"], "No such file"),
    ],
)
def test_what_cannot_be_drawn(tmp_path, monkeypatch, capsys, options, words):
    monkeypatch.chdir(tmp_path)
    results.write(tmp_path / "t.csv", [row("ours", 50), row("FlashMLA", 60)])
    with pytest.raises(SystemExit) as stopped:
        plot.main(options)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("plot.py: error: ")
    assert words in line
    assert not list(tmp_path.glob("*.png"))
