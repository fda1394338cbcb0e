"""Sphinx: `make docs` builds the pages of docs/ as a site, with every link and anchor checked."""

import re
from collections.abc import Iterator
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx
from sphinx.util import logging

DOCS = Path(__file__).resolve().parents[2] / "docs"
INDEX = "README"

project = "megatron-autorecompute"
author = f"The authors of {project}"
extensions = ["myst_parser"]
root_doc = INDEX
myst_heading_anchors = 4
highlight_language = "text"
html_theme = "furo"
html_title = project
html_show_copyright = False
html_show_sphinx = False

SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
PAGE = re.compile(r"\]\(([\w/-]+)\.md\)")
UPWARD = re.compile(r"(?<!!)\[([^]]*)\]\((\.\./[^)#]+)(#[^)]*)?\)")
"""Links that may lead out of docs/."""
NAMED = re.compile(r"\[[\w/-]+\.md\](?=\([^)]+\.md(?:#|\)))")
"""Texts of links that are a page's file name; the site shows the page's title."""
MENU = """
```{{toctree}}
:hidden:
:caption: {title}
{pages}
```
"""


def prepared(_: Sphinx, name: str, source: list[str]) -> None:
    """A page as Sphinx takes it: the index with a menu, files outside of docs/ as downloads."""
    if name == INDEX:
        source[0] += "".join(menus(source[0]))
    source[0] = NAMED.sub("[]", source[0])
    source[0] = UPWARD.sub(lambda m: outside(name, m[1], m[2], m[3] or ""), source[0])


def menus(index: str) -> Iterator[str]:
    """A hidden table of contents for every section of the index, of pages not named before."""
    seen: set[str] = set()
    parts = SECTION.split(index)
    for title, text in zip(parts[1::2], parts[2::2], strict=True):
        pages = [page for page in dict.fromkeys(PAGE.findall(text)) if page not in seen]
        seen.update(pages)
        if pages:
            yield MENU.format(title=title, pages="\n".join(pages))


def outside(name: str, text: str, link: str, anchor: str) -> str:
    """A link to a file as a download; to a folder of the checkout as that folder's name."""
    path = ((DOCS / name).parent / link).resolve()
    if not path.exists():
        logging.getLogger(__name__).warning("%s: %s is not there", name, link)
    if path.is_relative_to(DOCS):
        return f"[{text}]({link}{anchor})"
    if path.is_dir():
        return f"{text} (`{path.relative_to(DOCS.parent)}`)"
    return f"[{text}](path:{link})"


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", prepared)
    app.add_lexer("mermaid", TextLexer)
