"""Pages of the documentation: their code runs, their commands are accepted, their links lead somewhere."""

import html
import html.parser
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from docs_helpers import DOCS, PAGES, ROOT, Page, command_problem, link_problem, span_problems

import jaxllm
from jaxllm.jobs.prompts_io import read_jsonl_file
from jaxllm.llm import LLM
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.sampling.params import SamplingParams
from jaxllm.server.config import ServerConfig
from jaxllm.system.options import options_of

CHECKPOINT = "path/to/checkpoint"
NAMES = {path: path.relative_to(ROOT).as_posix() for path in PAGES}
WITH_PYTHON = [path for path in PAGES if Page(path).python()]
SMALL = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256}


def pages(paths):
    return pytest.mark.parametrize("page", [pytest.param(Page(path), id=NAMES[path]) for path in paths])


@pytest.fixture
def engines(monkeypatch):
    """Engines that pages make: of the embedded model, and of few programs where a page does not say."""
    made = []

    class Small(LLM):
        def __init__(self, model=None, *args, **settings):
            super().__init__(model, *args, **{**SMALL, **settings})
            made.append(self)

    monkeypatch.setattr("jaxllm.llm.LLM", Small)
    yield made
    for llm in made:
        llm.close()


@pages(WITH_PYTHON)
def test_its_python_runs(page, engines, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__page__"}
    for block in page.python():
        text = block.text.replace(f'"{CHECKPOINT}"', repr(str(demo_model_path())))
        code = compile("\n" * block.line + text, str(page.path), "exec", dont_inherit=True)
        exec(code, namespace)
    imports_llm = any("import LLM" in block.text for block in page.python())
    assert bool(engines) == imports_llm


def test_pages_with_python_are_those_we_know_of():
    how_tos = {path.stem for path in WITH_PYTHON if path.parent.name == "howto"}
    assert how_tos == {path.stem for path in (DOCS / "howto").glob("*.md")} - {
        "plan-a-gpu",
        "several-devices",
        "evaluate",
        "live-page",
        "serve",
        "cluster",
    }
    assert {ROOT / "README.md", DOCS / "index.md", DOCS / "policies.md"} < set(WITH_PYTHON)


@pages(PAGES)
def test_its_commands_are_accepted(page):
    commands = page.commands()
    assert [(words, problem) for words in commands if (problem := command_problem(words))] == []


def test_commands_are_found():
    commands = [tuple(words[:2]) for path in PAGES for words in Page(path).commands()]
    for command in ("generate", "convert", "bench", "profile", "plan", "explain"):
        assert ("jaxllm", command) in commands
    scripts = {script for program, script in commands if program == "python"}
    assert len(scripts) > 15
    assert ("make", "docs") in commands


@pages(PAGES)
def test_what_it_names_is_there(page):
    assert [problem for span in page.spans for problem in span_problems(span)] == []


@pages(PAGES)
def test_its_links_lead_somewhere(page):
    assert [problem for link in page.links if (problem := link_problem(page, link))] == []


def test_mistakes_are_found():
    text = """# Title

`jaxllm genrate`, `jaxllm generate x --max-token-count 3`, `make nothing`, `python scripts/none.py`,
`python scripts/bench_stalls.py --inn x`, `python scripts/demo_conversation.py x`
and [one](#titel), [two](none.md), [three](api.md#jaxllm.Nothing), ![four](none.png), [five](#title)

```bash
FOO=1 jaxllm plan model \\
    --device
```

    make neither
"""
    page = Page(DOCS / "page.md", text)
    assert all(map(command_problem, page.commands()))
    assert len(page.commands()) == 8
    assert [bool(link_problem(page, link)) for link in page.links] == [True] * 4 + [False]
    for span in (
        "--max-token-count 3",
        "jaxllm.nothing",
        "jaxllm.LLM.nothing",
        "scripts/nothing.py",
        "LLM(block_sizes=16)",
        "block_sizes=16",
    ):
        assert len(list(span_problems(span))) == 1


def test_the_documented_input_is_accepted(tmp_path):
    (block,) = [one for one in Page(DOCS / "howto" / "offline-batch.md").blocks if one.language == "json"]
    (tmp_path / "prompts.jsonl").write_text(block.text, encoding="utf-8")
    rows = read_jsonl_file(str(tmp_path / "prompts.jsonl"), SamplingParams(max_tokens=1))
    assert [row.sampling_params.max_tokens for row in rows] == [1, 64]
    assert [row.id for row in rows] == ["add", "ask"]


# Figures


def stored(name):
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))


def compared_rows():
    """Of each framework the medians and ranges of all workloads, as the tables have them."""
    values = stored("compare-cpu")
    for backend in dict.fromkeys(row["backend"] for row in values["rows"]):
        cells = []
        for workload in ("short", "mixed", "long"):
            rates = [
                row["output_tokens_per_second"]
                for row in values["rows"]
                if (row["backend"], row["workload"]) == (backend, workload) and not row["partial"]
            ]
            best = max(rates, key=lambda rate: rate["median"])
            cells.append(f"{best['median']:.0f} ({best['min']:.0f}..{best['max']:.0f})")
        yield " | ".join(cells)


def measured_rows():
    """The same of starts, structured output and shared blocks."""
    rows = stored("start-cpu")["rows"]
    for start in dict.fromkeys(row["start"] for row in rows):
        seconds = [f"{row['seconds']:.1f}" for row in rows if row["start"] == start]
        if len(seconds) > 1:  # of each cache: else it is in the text
            yield " | ".join(seconds)
    values = stored("structured-cpu")
    for kind, seconds in values["median_seconds_per_step"].items():
        yield f"{1e3 * seconds:.1f} | {values['over_free'][kind]:.2f}"
    rows = stored("sharing")["rows"]
    for length in dict.fromkeys(row["prompt_len"] for row in rows):
        yield " | ".join(
            f"{row['saved']:.0%}".replace("%", " %") for row in rows if row["prompt_len"] == length
        )


def server_rows():
    """Rows of the table of what the server costs."""
    values = stored("server-cpu")["overhead"]
    for mode in ("whole", "stream"):
        rate, share = values["output_tokens_per_second"][mode], values["share_of_offline"][mode]
        parts = [f"{rate[one]:.0f}" for one in ("median", "min", "max")]
        parts += [f"{share[one]:.1%}".replace("%", " %") for one in ("median", "min", "max")]
        yield "{} ({}..{}) | {} ({}..{})".format(*parts)


def test_figures_are_those_of_their_files():
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    compared, measured = list(compared_rows()), list(measured_rows())
    assert (len(compared), len(measured)) == (4, 9)
    measured += server_rows()
    assert [row for row in (*compared, *measured) if f"| {row} |" not in page] == []
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [row for row in compared if f"| {row} |" not in readme] == []


# The site


def leaves(tree):
    if isinstance(tree, str):
        return [tree]
    return [leaf for part in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(part)]


def test_every_page_is_in_the_navigation():
    nav = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(nav) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_public_names_are_documented():
    documented = Page(DOCS / "api.md").documented
    assert {f"jaxllm.{name}" for name in jaxllm.__all__} <= set(documented)
    for package in ("functional", "sched", "predictors", "research.simulator", "research.workloads"):
        assert any(f"{name}.".startswith(f"jaxllm.{package}.") for name in documented)


class Links(html.parser.HTMLParser):
    """What a page links to, and what a browser loads to show it."""

    def __init__(self):
        super().__init__()
        self.linked, self.loaded = [], []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag == "a" and given.get("href"):
            self.linked.append(given["href"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preconnect"):
            self.loaded.append(given["href"])
        if tag in ("img", "script") and given.get("src"):
            self.loaded.append(given["src"])


def test_the_site_is_built_without_warnings_and_is_whole(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = [path for path in tmp_path.rglob("*.html") if path.name not in ("404.html",)]
    assert len(pages) > len(list(DOCS.rglob("*.md")))  # reports that pages link to are pages, too
    missing = []
    for path in pages:
        links = Links()
        links.feed(path.read_text(encoding="utf-8"))
        assert links.linked
        assert [link for link in links.loaded if "://" in link] == []
        for link in (*links.linked, *links.loaded):
            name = link.partition("#")[0]
            if "://" not in link and not link.startswith("data:") and not (path.parent / name).exists():
                missing.append((path.name, link))
    assert missing == []
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    assert [name for name in jaxllm.__all__ if f'id="jaxllm.{name}"' not in api] == []
    text = " ".join(html.unescape(re.sub("<[^>]+>", "", api)).split())
    for settings in (jaxllm.EngineConfig, jaxllm.SamplingParams, ServerConfig):
        for name, _, declared in options_of(settings):
            said = re.escape(declared.help.replace("`", ""))
            assert re.search(rf" {name} .{{1,160}} \W {said}", text), name
    with Path(tmp_path / "benchmarks" / "sharing.json").open(encoding="utf-8") as file:
        assert json.load(file)["rows"]
