"""Brings the pages that lie beside what they tell of, without a copy: the nav names them by their paths.

A link is written as it is right in the repository. Here it leads to the same page on the site; what has no page,
such as a source file, is shown by its path. A public name leads to its place in the reference.
"""

import os
import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs/pages"
LINK = re.compile(r"(!?)\[([^]\n]*)\]\(([^)#:\s]*)(#[^)\s]*)?\)")
# Whichever begins first: a link may have code for its text, and code may look like a link.
LINK_OR_CODE = re.compile(rf"```.*?```|`[^`\n]*`|{LINK.pattern}", re.DOTALL)
REFERENCE = re.compile(r"^::: (pallas_attn\.(\w+))$", re.MULTILINE)
# Where a name is no mention: headings, links, listings.
ELSEWHERE = re.compile(r"(<h\d.*?</h\d>|<a\b.*?</a>|<pre.*?</pre>)", re.DOTALL)
NAME = re.compile(r"<code>(?:pallas_attn\.)?(\w+)</code>")
# What a browser would fetch by itself from somewhere else.
FETCHED = re.compile(
    r'<(?:script|img|iframe)[^>]+src="?(?:https?:)?//|<link[^>]+rel="?(?:style|icon|pre)[^>]+href="?(?:https?:)?//'
)


def _paths(nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [path for entry in (nav.values() if isinstance(nav, dict) else nav) for path in _paths(entry)]


def on_files(files, config):
    for path in _paths(config.nav):
        if not files.get_file_from_path(path) and (ROOT / path).is_file():
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
            for shown, _, target, _ in LINK.findall((ROOT / path).read_text()):
                if shown and target:
                    picture = (ROOT / path).parent.joinpath(target).resolve()
                    place = str(picture.relative_to(ROOT))
                    if not files.get_file_from_path(_on_site(place)):
                        files.append(File.generated(config, place, abs_src_path=str(picture)))
    return files


def _on_site(path: str) -> str:
    """The path on the site of a file of the repository."""
    return path.removeprefix("docs/pages/")


def on_page_markdown(markdown, page, config, files):
    here = Path(page.file.abs_src_path).resolve()

    def moved(link: re.Match) -> str:
        shown, text, target, place = link[1], link[2], link[3], link[4] or ""
        if not target:  # code, or a place on the same page
            return link[0]
        path = _on_site(os.path.relpath((here.parent / target).resolve(), ROOT))
        if files.get_file_from_path(path):
            way = os.path.relpath(path, os.path.dirname(page.file.src_uri) or ".")
            return f"{shown}[{text}]({way}{place})"
        return f"{text} (`{path}`)" if (ROOT / path).exists() else link[0]

    return LINK_OR_CODE.sub(moved, markdown)


def on_page_content(html, page, config, files):
    """Every mention in the reference is a link, elsewhere the first of each name."""
    here = page.file.src_uri
    places = {
        name: f"{os.path.relpath(file.url, os.path.dirname(page.file.url) or '.')}#{whole}"
        for file in files.documentation_pages()
        if file.src_uri.startswith("api/")
        for whole, name in REFERENCE.findall(file.content_string)
        if name[0].isupper() or "_" in name
    }

    def linked(mention: re.Match) -> str:
        name = mention[1]
        place = places.get(name) if here.startswith("api/") else places.pop(name, None)
        return f'<a href="{place}">{mention[0]}</a>' if place else mention[0]

    parts = ELSEWHERE.split(html)
    return "".join(part if ELSEWHERE.fullmatch(part) else NAME.sub(linked, part) for part in parts)


def on_post_page(output, page, config):
    if found := FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri}: expected nothing loaded from elsewhere, got {found[0]}")
    return output
