"""Small, readable decoder models that use the ops, and what it takes to run them on real prompts."""

from .checkpoint import load_checkpoint as load_checkpoint
from .deepseek import DeepSeek as DeepSeek
from .deepseek import DeepSeekConfig as DeepSeekConfig
from .deepseek_weights import load_transformers_weights as load_transformers_weights
from .engine import Engine as Engine
from .generate import Generation as Generation
from .generate import generate as generate
from .gguf_loader import LoadedModel as LoadedModel
from .gguf_loader import default_model_path as default_model_path
from .gguf_loader import load_gguf as load_gguf
from .llama import Llama as Llama
from .llama import LlamaConfig as LlamaConfig
from .requests import FinishReason as FinishReason
from .requests import Request as Request
from .sampling import Sampling as Sampling
from .sampling import TokenLogprobs as TokenLogprobs
from .stats import EngineStats as EngineStats
from .tokenizer import Tokenizer as Tokenizer

__all__ = [
    "DeepSeek",
    "DeepSeekConfig",
    "Engine",
    "EngineStats",
    "FinishReason",
    "Generation",
    "Llama",
    "LlamaConfig",
    "LoadedModel",
    "Request",
    "Sampling",
    "TokenLogprobs",
    "Tokenizer",
    "default_model_path",
    "generate",
    "load_checkpoint",
    "load_gguf",
    "load_transformers_weights",
]
