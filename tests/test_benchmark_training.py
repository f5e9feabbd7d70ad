"""benchmarks/training.py: what it packs, that it learns, who is told of documents and how, and who differs."""

import functools
import re
import sys

import attentions
import decoder
import jax
import jax.numpy as jnp
import losses
import numpy as np
import peer_stand_ins
import pytest
import training

pytestmark = pytest.mark.once
TINY = decoder.SIZES["tiny"]


@pytest.mark.parametrize("equal", [False, True])
def test_documents_fill_their_rows(equal):
    sizes = TINY._replace(documents=4) if equal else TINY
    first, second = decoder.batches(2, sizes, 0, equal=equal)
    ids, position, starts, lens = first.documents
    assert first.tokens.shape == ids.shape == (sizes.rows, sizes.length)
    np.testing.assert_array_equal(lens.sum(axis=1), sizes.length)
    assert (lens.std() == 0) == equal
    np.testing.assert_array_equal(starts[:, 1:], np.cumsum(lens, axis=1)[:, :-1])
    np.testing.assert_array_equal(np.take_along_axis(starts, ids, axis=1) + position, [np.arange(64)] * 2)
    assert (first.tokens != second.tokens).any()
    text = "".join(text for _, text in sorted(decoder.topics.items())).encode()
    assert first.tokens[0, : lens[0, 0]].tobytes() in text


def test_the_large_model_is_of_a_thousand_million_weights():
    assert 0.95e9 < decoder.count(decoder.SIZES["1b"]) < 1.1e9


@functools.cache
def on_cudnn():
    """Its batch, and a way to attend to it that keeps documents apart."""
    (batch,) = decoder.batches(1, TINY, 0)
    arrays = [
        jax.random.normal(key, (TINY.rows, TINY.length, heads, 16), jnp.bfloat16)
        for key, heads in zip(jax.random.split(jax.random.key(1), 3), (2, 1, 1), strict=True)
    ]
    return batch.documents, arrays, attentions.masked(None, *arrays, batch.documents)


def test_documents_of_fa3(monkeypatch):
    documents, arrays, expected = on_cudnn()
    monkeypatch.setitem(sys.modules, "dew_flash_attn", peer_stand_ins.dew_package())
    got = attentions.packed_fa3(int(documents.sizes.max()), *arrays, documents)
    np.testing.assert_allclose(np.float32(got), np.float32(expected), atol=2e-2)


def test_documents_padded_to_rows_come_back(monkeypatch):
    documents, arrays, expected = on_cudnn()
    plain = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *given, implementation, **o: plain(*given, **o)
    )
    longest = int(documents.sizes.max())
    got = jax.jit(functools.partial(attentions.padded_cudnn, longest))(*arrays, documents)
    np.testing.assert_allclose(np.float32(got), np.float32(expected), atol=2e-2)


def test_cudnn_is_told_where_documents_begin(monkeypatch):
    """By a function of jax's own, which refuses shapes and types that it does not expect, and may change."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    documents, arrays, expected = on_cudnn()
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91400)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda capability: False)
    call = jax.jit(attentions.packed_cudnn)
    assert jax.eval_shape(call, *arrays, documents).shape == expected.shape
    gradient = jax.grad(lambda *given: call(*given, documents).astype(jnp.float32).sum(), (0, 1, 2))
    assert [x.shape for x in jax.eval_shape(gradient, *arrays)] == [x.shape for x in arrays]


def test_every_attention_of_ours_is_told_of_the_same_documents():
    documents, arrays, expected = on_cudnn()
    known = attentions.known(int(documents.sizes.max()))
    for name in ("xla", "xla-ids"):
        got = jax.jit(known[name].attend)(*arrays, documents)
        np.testing.assert_allclose(np.float32(got), np.float32(expected), atol=2e-2)


@pytest.mark.slow
def test_a_tiny_model_learns_alike_by_two_attentions(tmp_path, capsys, monkeypatch):
    out = tmp_path / "t.csv"
    command = ["--tiny", "--losses", "--steps", "30", "--attentions", "jax-xla", "xla-ids", "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        assert training.main(command) == 0
    said = capsys.readouterr().out
    assert "they agree" in said
    assert f"training.py --draw {out}" in said
    curves = losses.load(out)
    assert list(curves) == [(name, seed) for seed in (0, 1) for name in ("jax-xla", "xla-ids")]
    for curve in curves.values():
        assert len(curve) == 30
        assert np.mean(curve[-5:]) < curve[0] - 0.3
    assert training.main(["--draw", str(out)]) == 0
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_step_is_timed_and_who_cannot_is_told(monkeypatch, capsys):
    names = ("jax-xla", "cuda", "cudnn-packed", "xla")
    known = attentions.known(64)
    right = known["jax-xla"].attend
    wrong = known["xla"]._replace(
        attend=lambda query, key, *rest: right(query, jax.lax.stop_gradient(key), *rest)
    )
    monkeypatch.setattr(attentions, "known", lambda *_, **options: known | {"xla": wrong})
    assert training.main(["--tiny", "--rounds", "2", "--steps", "1", "--remat", "--attentions", *names]) == 1
    first, cuda, packed, wrong = capsys.readouterr().out.splitlines()[-4:]
    assert "WRONG: loss and attention's gradients" in wrong
    assert first.startswith("jax.nn")
    assert "1.000" in first
    assert "needs an sm_90 GPU" in cuda
    assert "jax's private q_offsets" in packed


@pytest.mark.control
def test_a_wrong_attention_is_not_timed(monkeypatch, capsys):
    right = attentions.known(64)["jax-xla"]
    wrong = right._replace(attend=lambda *given: 3 * right.attend(*given))
    monkeypatch.setattr(attentions, "known", lambda *_, **options: {"jax-xla": right, "xla": wrong})
    assert training.main(["--tiny", "--rounds", "1", "--attention", "--attentions", "jax-xla", "xla"]) == 1
    assert "WRONG: a gradient or out is off by" in capsys.readouterr().out


def test_bits_of_every_run(monkeypatch, capsys):
    monkeypatch.setattr(training, "RUNS", 3)
    assert training.main(["--tiny", "--bits", "--attentions", "jax-xla"]) == 0
    assert capsys.readouterr().out.strip().endswith("3 of 3 runs")


def test_what_counts_as_agreement():
    flat = {(name, seed): np.full(30, 2.0 + 0.1 * seed) for name in ("xla", "pallas") for seed in (0, 1)}
    assert losses.compared(flat) == (0.0, pytest.approx(0.1))
    flat["pallas", 1] = flat["pallas", 1] + 0.5
    between, noise = losses.compared(flat)
    assert between == pytest.approx(0.5)
    assert noise == pytest.approx(0.1), "the noise is the first attention's"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["--attentions", "fastest"], "--attentions: expected some of auto, .*; got fastest"),
        (["--rounds", "0"], "--rounds: expected at least 1, got 0"),
        (["--steps", "0"], "--steps: expected at least 1, got 0"),
        (["--attentions", "dense"], "--attentions: expected some of .*; got dense"),
        (
            ["--bits", "--attentions", "cudnn-whole"],
            "expected those that are told of documents, got cudnn-whole",
        ),
        (["--tiny", "--equal"], "--documents: expected so many that fill 64 tokens, got 3"),
    ],
)
def test_refusals(command, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        training.main(command)
    assert re.search(message, capsys.readouterr().err)
