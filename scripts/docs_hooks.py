"""Hooks of `mkdocs`: what pages link to outside of docs/ becomes part of the site.

On GitHub a page's link to `../benchmarks/link-cpu.json` leads to the file. In the site, which has the pages
alone, it leads to a copy; reports in Markdown become pages, with their images.

The API's page is made of a copy of the package's sources, in which `jaxllm/sched`, a folder without
`__init__.py` that the collector would pass over, has one. Classes of options say there what they say of
themselves in Python.
"""

from __future__ import annotations

import inspect
import os
import pkgutil
import posixpath
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import griffe

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

LINK = re.compile(r"(?<=\]\()[^()\s#]+")
"""The target of a link or an image, without the anchor."""

ROOT = Path(__file__).resolve().parents[1]


def on_startup(**_: object) -> None:
    """Copy the package's sources to where `mkdocs.yml` looks for them."""
    package = ROOT / "out" / "api-sources" / "jaxllm"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "jaxllm", package, ignore=shutil.ignore_patterns("__pycache__", "demo_model"))
    (package / "sched" / "__init__.py").touch()


class Options(griffe.Extension):
    """Of classes of options, the documentation that they are given, and what they are made of."""

    def on_class_members(self, *, cls: griffe.Class, **_: object) -> None:
        """Replace what the source says."""
        if not any(str(one.value) == "with_options" for one in cls.decorators) or cls.docstring is None:
            return
        from jaxllm.system.options import options_of

        settings = pkgutil.resolve_name(cls.path)
        cls.docstring.value = inspect.getdoc(settings)
        kind = griffe.ParameterKind.keyword_only
        parameters = [
            griffe.Parameter(name, annotation=_given(cls[name].annotation), kind=kind, default=repr(default))
            for name, default, _declared in options_of(settings)
        ]
        made = griffe.Function("__init__", parameters=griffe.Parameters(*parameters))
        cls.set_member("__init__", made)
        for parameter in parameters:
            cls.del_member(parameter.name)


def _given(annotation: griffe.Expr) -> griffe.Expr:
    """What may be given for a field, be it kept as that or as something else (`Kept`)."""
    is_kept = isinstance(annotation, griffe.ExprSubscript) and str(annotation.left) == "Kept"
    return annotation.slice.elements[1] if is_kept else annotation


def site_uri(page: Path, target: str, config: MkDocsConfig) -> str | None:
    """Where the site has what a page in the repository links to; None if that is no file of it."""
    if "://" in target:
        return None
    docs = Path(config.docs_dir).resolve()
    path = Path(os.path.normpath(page.parent / target))
    if not path.is_file() or not path.is_relative_to(ROOT):
        return None
    return path.relative_to(docs if path.is_relative_to(docs) else ROOT).as_posix()


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add what pages link to, and what that links to."""
    from mkdocs.structure.files import File

    pages = [Path(page.abs_src_path) for page in files.documentation_pages() if page.abs_src_path]
    while pages:
        page = pages.pop()
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            uri = site_uri(page, target, config)
            if uri is not None and files.get_file_from_path(uri) is None:
                path = os.path.normpath(page.parent / target)
                files.append(File.generated(config, uri, abs_src_path=path))
                if uri.endswith(".md"):
                    pages.append(Path(path))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where the site has it."""
    source = Path(str(page.file.abs_src_path))

    def moved(link: re.Match[str]) -> str:
        uri = site_uri(source, link.group(), config)
        if uri is None:
            return link.group()
        return posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(moved, markdown)
