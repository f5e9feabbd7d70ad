"""docs/hooks.py: pages that stay where they are, links as they are right in the repository, and nothing loaded."""

import importlib.util
import types
from pathlib import Path

import pytest
from mkdocs.config import load_config
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import get_files

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
assert spec
assert spec.loader
hooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hooks)


@pytest.fixture(scope="module")
def site():
    config = load_config(str(ROOT / "docs/mkdocs.yml"))
    return config, config.plugins.on_files(get_files(config), config=config)


def shown(site, page: str, markdown: str) -> str:
    config, files = site
    return hooks.on_page_markdown(
        markdown, types.SimpleNamespace(file=files.get_file_from_path(page)), config, files
    )


def test_every_page_is_on_the_site(site):
    """But the first page of the repository, which has the site's in its place."""
    beside = [
        page for place in ("pallas_attn", "csrc", "benchmarks") for page in (ROOT / place).rglob("*.md")
    ]
    wanted = {str(page.relative_to(ROOT)) for page in beside + sorted(ROOT.glob("*.md"))} - {"README.md"}
    assert wanted <= set(hooks._paths(site[0].nav))


@pytest.mark.parametrize(
    ("page", "link", "leads"),
    [
        ("index.md", "[a](../../csrc/mla/README.md#figures)", "[a](csrc/mla/README.md#figures)"),
        ("index.md", "[a](serving.md)", "[a](serving.md)"),
        ("csrc/mla/README.md", "[a](../../docs/pages/way.md)", "[a](../../way.md)"),
        ("csrc/mla/README.md", "![a](../../docs/pages/pictures/mla.svg)", "![a](../../pictures/mla.svg)"),
        ("csrc/mla/README.md", "[what](params.h)", "what (`csrc/mla/params.h`)"),
        ("csrc/mla/README.md", "[a](no.md)", "[a](no.md)"),
        ("csrc/mla/README.md", "`x[a](params.h)`", "`x[a](params.h)`"),
        ("index.md", "`a` [`b`](../../SECURITY.md) `c`", "`a` [`b`](SECURITY.md) `c`"),
        ("index.md", "[a](#install)", "[a](#install)"),
    ],
)  # fmt: skip
def test_a_link_leads_to_the_page_on_the_site(site, page, link, leads):
    """One that leads nowhere stays, for MkDocs to refuse."""
    assert shown(site, page, link) == leads


def test_a_public_name_leads_to_the_reference(site):
    """Every mention in the reference, elsewhere the first; no heading, link, listing or word that is also a name."""
    config, files = site

    def of(page: str, html: str) -> str:
        return hooks.on_page_content(
            html, types.SimpleNamespace(file=files.get_file_from_path(page)), config, files
        )

    name = "<code>write_kv</code>"
    for page, place in (("csrc/mla/README.md", "../../api/caches.html"), ("api/serving.md", "caches.html")):
        link = f'<a href="{place}#pallas_attn.write_kv">{name}</a>'
        assert of(page, name) == link
        assert of(page, name + name) == link + (link if page.startswith("api/") else name)
    for html in (f"<h2>{name}</h2>", f"<a href=x>{name}</a>", f"<pre>{name}</pre>", "<code>compat</code>"):
        assert of("index.md", html) == html


@pytest.mark.parametrize(
    "text", ['<script src="https://x/y.js">', "<img src=//x/y>", '<link rel="stylesheet" href="https://x">']
)
def test_nothing_is_loaded_from_elsewhere(site, text):
    page = types.SimpleNamespace(file=site[1].get_file_from_path("index.md"))
    with pytest.raises(PluginError, match=r"index\.md: expected nothing loaded from elsewhere"):
        hooks.on_post_page(f"<html>{text}", page, site[0])
    assert hooks.on_post_page('<a href="https://x">', page, site[0])
