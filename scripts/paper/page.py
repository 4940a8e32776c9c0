"""The report as one HTML page that holds its figures."""

from __future__ import annotations

import base64
import pathlib
import re

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; }
body { max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; margin: 1rem 0; }
th, td { border: 1px solid #ccc; padding: 2px 8px; vertical-align: top; }
th { background: #f3f3f3; }
img { max-width: 100%; }
code { background: #f3f3f3; padding: 0 3px; }
"""


def html_of(markdown: str, folder: pathlib.Path) -> str:
    """An HTML page of a Markdown text, whose images in `folder` are put into it."""
    from markdown_it import MarkdownIt

    def embedded(found: re.Match[str]) -> str:
        path = folder / found[1]
        if not path.is_file():
            return found[0]
        return f'src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"'

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    body = re.sub(r'src="([^":]+\.png)"', embedded, body)
    title = markdown.splitlines()[0].lstrip("# ")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )
