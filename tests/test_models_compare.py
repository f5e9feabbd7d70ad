"""The comparison with transformers on the same weights, on a tiny model; test_smollm2.py has a real one."""

import pytest
from models_support import import_torch, write_tiny

from pallas_attn.models import generate, load_gguf

pytestmark = pytest.mark.once  # two of our own decoders are compared on both


@pytest.fixture(autouse=True, scope="module")
def torch_on_one_thread():
    """Not as the file is collected, which each worker does on either end of jax: it brings transformers along."""
    import_torch()


@pytest.mark.control
def test_the_comparison_notices_a_wrong_model(tmp_path):
    from pallas_attn.models.compare import TransformersModel, compare

    path = write_tiny(tmp_path / "tiny.gguf")
    prompts = [[5, 6, 7, 8], [9, 10]]
    reference = TransformersModel(path, "float32")
    loaded = load_gguf(path)

    def rows():
        ours = generate(loaded.model, prompts, max_new_tokens=8, return_logits=True)
        return compare(reference, prompts, ours, stop_token_ids=())

    for row in rows():
        assert row.tokens_equal
        assert row.max_logit_difference < 1e-4

    # One norm of one layer, off by a tenth.
    weight = loaded.model.layers.attention_norm.weight
    weight[...] = weight[...].at[1].multiply(1.1)
    assert max(row.max_logit_difference for row in rows()) > 2e-3


def test_comparison_needs_logits(tmp_path):
    from pallas_attn.models.compare import TransformersModel, compare

    path = write_tiny(tmp_path / "tiny.gguf")
    ours = generate(load_gguf(path).model, [[1]], max_new_tokens=8)
    with pytest.raises(ValueError, match="compare: argument 'ours': expected a result of generate"):
        compare(TransformersModel(path, "float32"), [[1]], ours, stop_token_ids=())
