"""Chat templates that others publish, rendered by our rules and by transformers."""

import dataclasses
import datetime
import functools
import importlib.util
import pathlib
import sys
from typing import Any

import numpy as np
import pytest
import tokenizers
from models_support import write_tokenizer

from pallas_attn.models import Tokenizer, chat_template
from pallas_attn.models.checkpoint import load_tokenizer

pytestmark = pytest.mark.once  # nothing of it is JAX's


def published() -> dict[str, str]:
    """Those for text in the wheels, whose code is not run."""
    found = {}
    for package in ("trl", "axolotl"):
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in sorted(pathlib.Path(folder).rglob("*.jinja")):
                found[f"{package}/{path.stem}"] = path.read_text(encoding="utf-8")
    return found


TEMPLATES = published()
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What it's like <outside> & when",
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {"city": {"type": "string", "description": "Größe"}, "days": {"type": "integer"}},
        },
    },
}
QUESTION = [{"role": "user", "content": 'Is 3 < 4 & "true"?  '}]
TALK = [
    {"role": "system", "content": "You're brief."},
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hi.\n", "reasoning_content": "A greeting."},
    *QUESTION,
]
CALLED = [
    {"role": "user", "content": "Weather in Köln?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "id": "abcdefghi",
                "function": {"name": "weather", "arguments": {"city": "Köln"}},
            }
        ],
    },
    {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": "sunny"},
]
DOCUMENTS = [{"title": "Rhine", "text": "A river."}]
WAYS: dict[str, dict[str, Any]] = {
    "question": dict(messages=QUESTION, add_generation_prompt=True),
    "talk": dict(messages=TALK, add_generation_prompt=False),
    "thinking": dict(
        messages=TALK, add_generation_prompt=True, enable_thinking=False, reasoning_effort="low"
    ),
    "thinks": dict(messages=QUESTION, add_generation_prompt=True, enable_thinking=True),
    "tools": dict(messages=QUESTION, tools=[WEATHER], add_generation_prompt=True),
    "called": dict(messages=CALLED, tools=[WEATHER], add_generation_prompt=True),
    "documents": dict(messages=QUESTION, documents=DOCUMENTS, add_generation_prompt=True),
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def theirs():
    """Their renderer, which would compile a template for each conversation."""
    module: Any = pytest.importorskip("transformers.utils.chat_template_utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_compile_jinja_template", functools.cache(module._compile_jinja_template))
        yield module.render_jinja_template


def outcome(render, *args, **kwargs) -> str:
    """The text, or that the template refuses and what it says."""
    try:
        return render(*args, **kwargs)
    except Exception as error:  # whatever a template provokes, it must provoke in both
        return f"{type(error).__name__}: {error}"


def test_there_are_many():
    if importlib.util.find_spec("trl") is None:
        pytest.skip("no trl")
    assert len(TEMPLATES) > 100


@pytest.mark.parametrize("name", TEMPLATES)
def test_ours_is_theirs(theirs, name):
    rendered = 0
    for way in WAYS.values():
        options = {**TOKENS, **way}
        messages = options.pop("messages")
        tools, documents = options.pop("tools", None), options.pop("documents", None)

        def by_them(messages=messages, tools=tools, documents=documents, options=options) -> str:
            return theirs([messages], tools, documents, chat_template=TEMPLATES[name], **options)[0][0]

        expected = outcome(by_them)
        got = outcome(
            chat_template.by_its_rules, TEMPLATES[name], messages, tools=tools, documents=documents, **options
        )
        assert got == expected
        rendered += not expected.startswith(("TemplateError", "UndefinedError"))
    assert rendered >= 2


@dataclasses.dataclass
class Part:
    text: str


# What templates may do that few of the published ones do.
TRICKS = {
    "json": ("{{ messages | tojson }}|{{ messages | tojson(indent=2, sort_keys=true) }}", {}),
    "absent": ("{{ tools is none }}{{ documents is none }}{{ x is defined }}{{ pad_token is defined }}", {}),
    "generation": (
        "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}", {}
    ),
    "loops": ("{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", {}),
    "namespace": ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}{{ dict(a=ns.x) }}", {}),
    "hidden": ("{% set ns = namespace(x=1) %}{% set ns.__x = 2 %}", {}),
    "sandbox": ("{{ messages.append(1) }}", {}),
    "attributes": ("{{ ''.__class__ }}", {}),
    "refuses": ("{{ raise_exception('not so') }}", {}),
    "numbers": (
        "{{ x }} {{ y }} {{ part }} {{ other }}", dict(x=np.int64(3), y=np.bool_(False), part=Part("a"), other=b"")
    ),
    "reasoning": ("{% for m in messages %}{{ m.thinking }}{{ m.reasoning_content }}{% endfor %}", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", TRICKS)
def test_ours_is_theirs_in_corners(theirs, name):
    template, options = TRICKS[name]
    expected = outcome(lambda: theirs([TALK], chat_template=template, **options)[0][0])
    got = outcome(chat_template.by_its_rules, template, TALK, add_generation_prompt=False, **options)
    if "Security" in expected:
        expected, got = expected.split(":")[0], got.split(":")[0]
    assert got == expected


def tokenizer(templates: Any, **options: Any) -> Tokenizer:
    words = {word: index for index, word in enumerate(["<s>", "</s>", "a", "b"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="b"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.enable_truncation(2)
    inner.enable_padding(length=8, pad_token="b", pad_id=3)
    return Tokenizer(
        inner, bos_token_id=0, eos_token_id=1, stop_token_ids=[1], add_bos=True, chat_template=templates, **options
    )  # fmt: skip


def test_truncation_and_padding_of_a_file_do_not_touch_prompts():
    assert tokenizer(None).encode("a a a a a") == [0, 2, 2, 2, 2, 2]
    assert tokenizer(None).encode("a") == [0, 2]


def test_nor_do_they_hide_what_begins_a_text(tmp_path):
    write_tokenizer(tmp_path, 97)
    path = str(tmp_path / "tokenizer.json")
    inner = tokenizers.Tokenizer.from_file(path)
    inner.enable_truncation(1)
    inner.enable_padding(direction="left", length=4, pad_id=5, pad_token="!")
    inner.save(path)
    assert load_tokenizer(tmp_path).encode("abcab") == [0, 3, 2]


def test_templates_of_files_of_their_own_come_first(tmp_path):
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    write_tokenizer(tmp_path, 97, chat_template=named)
    assert load_tokenizer(tmp_path).apply_chat_template(QUESTION) == "d"
    assert load_tokenizer(tmp_path).apply_chat_template(QUESTION, tools=[WEATHER]) == "t"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ pad_token is defined }}")
    assert load_tokenizer(tmp_path).apply_chat_template(QUESTION, tools=[WEATHER]) == "<s>False"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/rag.jinja").write_text("r")
    assert load_tokenizer(tmp_path).apply_chat_template(QUESTION, chat_template="rag") == "r"


def test_a_chat_has_what_its_template_writes_and_no_more():
    assert tokenizer("a a").encode_chat(QUESTION) == [2, 2]
    assert tokenizer("{{ bos_token }}a").encode_chat(QUESTION) == [0, 2]


@pytest.mark.parametrize("installed", [True, False])
def test_templates_by_name(monkeypatch, installed):
    if installed:
        pytest.importorskip("transformers")
    else:
        monkeypatch.setitem(sys.modules, "transformers.utils.chat_template_utils", None)
    several = tokenizer({"default": "usual {{ x }}", "tool_use": "tools", "rag": "{{ documents[0].text }}"})
    assert several.apply_chat_template(QUESTION, x=3) == "usual 3"
    assert several.apply_chat_template(QUESTION, tools=[WEATHER]) == "tools"
    assert several.apply_chat_template(QUESTION, chat_template="rag", documents=DOCUMENTS) == "A river."
    assert several.apply_chat_template(QUESTION, chat_template="{{ eos_token }}") == "</s>"
    with pytest.raises(ValueError, match=r"'chat_template': expected one of 'rag', got none"):
        tokenizer({"rag": "x"}).apply_chat_template(QUESTION)
    with pytest.raises(ValueError, match="the template refused: not so"):
        tokenizer(TRICKS["refuses"][0]).apply_chat_template(QUESTION)
    # A content that is None is none.
    call = [{"role": "assistant", "content": None}]
    assert tokenizer("{{ messages[0].content is defined }}").apply_chat_template(call) == "False"
    year = str(datetime.datetime.now().year)
    assert tokenizer("{{ strftime_now('%Y') }}").apply_chat_template(QUESTION) == year


def test_functions_need_transformers():
    with pytest.raises(TypeError, match=r"argument 'tools': expected dictionaries .*, got function"):
        chat_template.by_its_rules("", QUESTION, tools=[outcome])
