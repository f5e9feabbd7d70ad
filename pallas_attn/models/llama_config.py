"""What a decoder of the Llama family is like: its sizes, and where it differs from Llama itself.

A family (families.py) is a choice of these; llama.py computes them.
"""

import dataclasses
from typing import Any, Literal, get_args

import numpy as np

from pallas_attn._call.checks import ArgumentChecker, check_int, fail
from pallas_attn.nn.rotary import Stretch

type Norm = Literal["rms", "rms_around_one", "layer"]
type Activation = Literal["silu", "gelu", "clipped_swiglu"]


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP.

    Attributes:
        count, per_token: experts, and how many a token goes to: those of its largest router scores.
        width: of an expert.
        normalize: whether a token's weights, a softmax over all experts' scores, are made to sum to 1.
        biases: whether the router and the experts' projections have biases.

    Raises:
        TypeError, ValueError: a size that is no int of at least 1, or more experts a token than there are.
    """

    count: int
    per_token: int
    width: int
    normalize: bool = True
    biases: bool = False

    def __post_init__(self):
        for name in ("count", "per_token", "width"):
            check_int("Experts", name, getattr(self, name), least=1)
        check_int("Experts", "per_token", self.per_token, least=1, most=self.count)


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama-family decoder, and what it has that Llama has not.

    Attributes:
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP.
        num_layers: decoder layers.
        num_heads: query heads; a multiple of `num_kv_heads`.
        num_kv_heads: key and value heads.
        head_dim: width of one head; even, since rotary embeddings turn pairs.
        context_length: most tokens, prompt and answer together, that the model was trained on.
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: of every norm, added to the mean square, or the variance, before its root is taken.
        tie_word_embeddings: whether the embedding is also the output projection.
        qkv_bias: whether the projections of query, key and value have biases (Qwen 2).
        qk_norm: whether each head of query and key is normalised before the rotary embedding (Qwen 3); "each" with
            weights of its own (Cohere), "all" for all heads as one vector (OLMo 2).
        sliding_window: tokens that a query sees, itself included, in the layers that have a window; None for all.
        full_layers: layers that see everything all the same.
        rope_stretch: how the rotary frequencies are stretched for a context longer than trained, if they are.
        output_bias, mlp_bias: whether the projection behind attention, and those of the MLP, have biases.
        norm: "rms"; "rms_around_one" scales by 1 + the weight (Gemma), "layer" takes the mean away first (Cohere).
        norm_before, norm_behind: where attention and MLP are normalised: what they take (most), what they give
            (OLMo 2), or both (Gemma 2, GLM-4).
        parallel: whether attention and MLP take the same input, and one norm serves both (Cohere).
        activation: of the MLP's gate: "silu", "gelu" (by tanh), or "clipped_swiglu" (GPT-OSS).
        experts: in place of the MLP, if any.
        scale: factor of the attention scores; None means ``head_dim ** -0.5``.
        softcap: attention scores become ``softcap * tanh(scores / softcap)``; None leaves them.
        sinks: whether each head has a score without a value that joins its softmax (GPT-OSS).
        rotary_dim: elements of a head, its first, that are rotated; None for all.
        rope_interleaved: whether neighbours are pairs, rather than halves of the head.
        window_rope_theta: base in layers that have a window, where nothing is stretched; None: as in the others.
        unrotated_layers: layers without a rotary embedding.
        rope_length: the sequence length that frequencies are for, where they depend on it; None for what a sequence has
            with the tokens of the call.
        embedding_scale, residual_scale, logit_scale: factors of embeddings, of what a layer adds, and of the logits.
        logit_softcap: as `softcap`, of the logits.
        swiglu_limit, swiglu_alpha: of "clipped_swiglu": where gate and up are clipped, and the gate's steepness.

    Raises:
        TypeError: a size that is no int.
        ValueError: a size below 1, `num_heads` is no multiple of `num_kv_heads`, or `head_dim` is odd.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool | Literal["each", "all"] = False
    sliding_window: int | None = None
    full_layers: tuple[int, ...] = ()
    rope_stretch: Stretch | None = None
    output_bias: bool = False
    mlp_bias: bool = False
    norm: Norm = "rms"
    norm_before: bool = True
    norm_behind: bool = False
    parallel: bool = False
    activation: Activation = "silu"
    experts: Experts | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    rotary_dim: int | None = None
    rope_interleaved: bool = False
    window_rope_theta: float | None = None
    unrotated_layers: tuple[int, ...] = ()
    rope_length: int | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702

    def __post_init__(self):
        check = ArgumentChecker("LlamaConfig")
        for field in dataclasses.fields(self):
            if field.type is int:
                check_int("LlamaConfig", field.name, getattr(self, field.name), least=1)
        if self.num_heads % self.num_kv_heads:
            expected = f"a multiple of num_kv_heads ({self.num_kv_heads})"
            fail("LlamaConfig", "num_heads", expected, str(self.num_heads))
        if self.head_dim % 2:
            fail("LlamaConfig", "head_dim", "an even number", str(self.head_dim))
        for name in ("sliding_window", "rotary_dim", "rope_length"):
            if getattr(self, name) is not None:
                check_int("LlamaConfig", name, getattr(self, name), least=1)
        if self.rotary_dim is not None and (self.rotary_dim % 2 or self.rotary_dim > self.head_dim):
            expected = f"an even number up to head_dim ({self.head_dim})"
            fail("LlamaConfig", "rotary_dim", expected, str(self.rotary_dim))
        for name in ("full_layers", "unrotated_layers"):
            for layer in getattr(self, name):
                check_int("LlamaConfig", name, layer, least=0, most=self.num_layers - 1)
        for name, alias in (("norm", Norm), ("activation", Activation)):
            if getattr(self, name) not in (known := get_args(alias.__value__)):
                fail("LlamaConfig", name, " or ".join(map(repr, known)), repr(getattr(self, name)))
        if not self.norm_before and (not self.norm_behind or self.parallel):
            fail("LlamaConfig", "norm_before", "True without norm_behind, or with parallel", "False")
        for name in ("rope_theta", "rms_norm_eps", "embedding_scale", "residual_scale", "logit_scale", "swiglu_limit",
                     "swiglu_alpha"):  # fmt: skip
            check.positive_float(name, getattr(self, name), optional=False)
        for name in ("scale", "softcap", "logit_softcap", "window_rope_theta"):
            check.positive_float(name, getattr(self, name))

    @property
    def layer_windows(self) -> tuple[int, ...] | None:
        """Of each layer, all tokens where it has none; None if one window, or none, serves all layers."""
        if self.sliding_window is None or not self.full_layers:
            return None
        every = int(np.iinfo(np.int32).max)
        return tuple(
            every if layer in self.full_layers else self.sliding_window for layer in range(self.num_layers)
        )

    @property
    def layer_rotations(self) -> tuple[int, ...] | None:
        """Of each layer: 0 for `rope_theta` and `rope_stretch`, 1 for `window_rope_theta`, 2 for none; None if all are
        0."""
        rotations: list[Any] = [0] * self.num_layers
        for layer in range(self.num_layers):
            if layer in self.unrotated_layers:
                rotations[layer] = 2
            elif self.window_rope_theta is not None and self.sliding_window and layer not in self.full_layers:
                rotations[layer] = 1
        return tuple(rotations) if any(rotations) else None
