"""The live page in a real browser, with answers of our own."""

import copy
import json

import pytest

NONE = "\u2013"  # an en dash
HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\">",
    "</td><script>document.title='owned'</script>",
    '"><svg/onload=alert(1)>',
    "__proto__",
    "\u202egnp.exe",
    "x" * 5000,
)
IS_UP_TO_DATE = "document.querySelector('#health').innerText === 'healthy'"
HAS_BANNER = "!document.querySelector('#banner').hidden"


def coloured_pixels(tab, figures):
    """Of each figure's canvas, how many pixels have about the colour of each entry of its legend."""
    return tab.page.eval_on_selector_all(
        figures,
        """figures => figures.map(figure => {
            const canvas = figure.querySelector("canvas");
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return [...figure.querySelectorAll(".legend i:not(.diagonal)")].map(mark => {
                const colour = getComputedStyle(mark).backgroundColor.match(/\\d+/g).map(Number);
                let number = 0;
                for (let i = 0; i < data.length; i += 4) {
                    const isNear = colour.every((value, j) => Math.abs(value - data[i + j]) < 24);
                    number += isNear && data[i + 3] > 128;
                }
                return number;
            });
        })""",
    )


@pytest.fixture
def tab(scripted, open_tab):
    tab = open_tab(scripted.url)
    tab.wait(IS_UP_TO_DATE)
    return tab


def tiles(tab):
    pairs = "items => items.map(({ children }) => [children[0].innerText, children[1].innerText])"
    return dict(tab.page.eval_on_selector_all("#tiles > div", pairs))


def test_head_line_and_counters(tab):
    assert [tab.text(f"#{name}") for name in ("version", "model", "policy")] == ["0.1.0", "demo", "adaptive"]
    assert tab.text("#uptime") == "1 h 2 min"
    assert tab.page.title() == "demo · jaxllm"
    shown = tiles(tab)
    assert [shown[name] for name in ("Running", "Waiting", "Swapped", "Refused")] == ["12", "3", "2", "5"]
    assert shown["Output"].endswith("tokens/s")
    assert shown["First token"].endswith("ms")
    assert shown["End to end"].endswith("s")
    under = tab.page.eval_on_selector_all("#tiles .under", "all => all.map(one => one.innerText)")
    assert under[-2:] == ["median, p99 119 ms", "median, p99 4.7 s"]


def parts(tab, tier):
    """Class and share of each part of a tier's bar."""
    return tab.page.eval_on_selector(
        f".tier:nth-child({tier}) .bar",
        """bar => [...bar.children].map(part =>
            [part.className, part.getBoundingClientRect().width / bar.clientWidth])""",
    )


def test_pool_by_request(tab, scripted):
    device = parts(tab, 1)
    coloured = [share for name, share in device if name.startswith("r")]
    assert coloured == pytest.approx([3 / 40] * 10, abs=1e-3)  # the two on the host have the other colours
    assert len({name for name, _ in device}) == len(device)
    assert dict(device)["others"] == pytest.approx(6 / 40, abs=1e-3)
    assert dict(device)["cached"] == pytest.approx(3 / 40, abs=1e-3)
    assert dict(device)["free"] == pytest.approx(1 / 40, abs=1e-3)
    host = parts(tab, 2)
    assert [share for _, share in host] == pytest.approx([0.2, 0.2, 0.6], abs=1e-3)
    assert tab.text(".tier:nth-child(1) p") == "Device\n36 held, 3 cached, 1 free, of 40 blocks (2.5 MiB)"
    assert tab.text(".tier:nth-child(3) p") == "Files\n3 MiB cached, of 1 GiB"
    labels = tab.page.eval_on_selector_all(".tier .bar", "bars => bars.map(bar => bar.ariaLabel)")
    assert labels[0] == "Device: 36 held, 3 cached, 1 free, of 40 blocks (2.5 MiB)"
    scripted.live["pool"]["disk"] = None
    tab.wait("document.querySelector('.tier:nth-child(3)').hidden")


def test_blocks_that_requests_share_are_counted_once(scripted, open_tab):
    scripted.live["pool"]["device"] = {"total": 40, "held": 18, "cached": 0, "free": 22}
    tab = open_tab(scripted.url)
    tab.wait(IS_UP_TO_DATE)
    shares = dict(parts(tab, 1))
    assert shares["free"] == pytest.approx(22 / 40, abs=1e-3)
    assert sum(share for name, share in shares.items() if name != "free") == pytest.approx(18 / 40, abs=1e-3)
    assert {round(40 * share) for name, share in shares.items() if name.startswith("r")} == {1, 2}
    tab.page.hover(".tier:nth-child(1) .bar i:nth-child(1)")
    assert tab.text("#tip") == "cmpl-00\nrunning, 3 blocks, some shared"


def test_a_part_of_a_bar_says_whose_it_is(tab):
    tab.page.hover(".tier:nth-child(1) .bar i:nth-child(2)")
    assert tab.text("#tip") == "cmpl-01\nrunning, 3 blocks"
    swatch = tab.page.get_attribute("#requests tr:nth-child(2) td:first-child i", "class")
    assert swatch == tab.page.get_attribute(".tier:nth-child(1) .bar i:nth-child(2)", "class")
    tab.page.mouse.move(0, 0)
    assert tab.page.is_hidden("#tip")


def test_requests(tab, scripted):
    rows = tab.rows("#requests")
    assert len(rows) == 17
    assert rows[0] == ["cmpl-00", "running", "32", "40 / 132", "3", "0", "30 s", NONE]
    assert [row[1] for row in rows[11:15]] == ["running", "swapped", "swapped", "waiting"]
    assert rows[12][-1] == "1 \u00d7"
    assert tab.text("#requests-count") == "17"
    scripted.live["queues"]["waiting"] = 500
    tab.wait("document.querySelector('#requests-count').innerText === '17 of 514'")


def test_decisions_with_predicted_and_measured_costs(tab):
    rows = tab.rows("#decisions")
    assert len(rows) == 12
    assert rows[0][1:] == ["cmpl-00", "recompute", "3", "1.50 ms", "4.25 ms", NONE, NONE]
    assert rows[1][1:] == ["cmpl-01", "swap", "3", "1.60 ms", "4.05 ms", "1.90 ms", "0.50 ms"]
    done = tab.page.eval_on_selector_all("#decisions td.done", "cells => cells.map(cell => cell.innerText)")
    assert done[:2] == ["4.25 ms", "1.60 ms"]
    assert tab.rows("#predictions") == [
        ["prefill", "120", "8.1 %", "\u00d7 1.04"],
        ["swap out", "0", NONE, "\u00d7 1.00"],
    ]
    label = tab.page.eval_on_selector("#scatter", "canvas => canvas.ariaLabel")
    assert "costs of 10 preemptions" in label


def test_what_a_preemption_took_at_most_is_told_as_that(tab, scripted):
    assert tab.rows("#decisions")[3][-2:] == ["\u2264 2.20 ms", "\u2264 0.50 ms"]
    titles = "rows => rows.map(row => row.children[6].title)"
    found = tab.page.eval_on_selector_all("#decisions tr", titles)
    assert (found[0], found[1]) == ("it is not back yet", "")
    assert "at most" in found[3]
    scripted.live["decisions"][0] |= {"is_back": True, "measured_ms": 3.0, "regret_ms": 1.5, "bound_ms": 3.0}
    tab.wait("document.querySelector('#decisions tr td:nth-child(7)').innerText === '3.00 ms'")


@pytest.mark.parametrize("width", [1080, 1199, 1200, 1280, 1440])
def test_no_column_is_cut(scripted, open_tab, width):
    for one in scripted.live["decisions"]:
        one |= {"request_id": "chatcmpl-" + "0123456789abcdef" * 2 + "/123.0", "action": "recompute"}
        one |= {"swap_ms": 12345.0, "recompute_ms": 123.0, "measured_ms": None, "bound_ms": 12345.0}
        one |= {"regret_bound_ms": 12345.0, "num_blocks": 12345}
    tab = open_tab(scripted.url)
    tab.page.set_viewport_size({"width": width, "height": 800})
    tab.wait(IS_UP_TO_DATE)
    over = "tiles => tiles.filter(tile => tile.scrollWidth > tile.clientWidth).length"
    assert tab.page.eval_on_selector_all("#tiles > div", over) == 0
    hidden = "table => table.scrollWidth - table.parentElement.clientWidth"
    assert tab.page.eval_on_selector("table:has(#decisions)", hidden) <= 0


def test_programs_that_compile_are_told_of(tab, scripted):
    scripted.live["compiling"] = {"num_compiled": 3, "num_programs": 12}
    tab.wait("document.querySelector('#health').innerText === 'compiling 3 of 12'")
    assert tab.page.get_attribute("#health", "class") == "health busy"
    assert tab.page.is_hidden("#banner")
    scripted.live["is_healthy"] = False
    tab.wait("document.querySelector('#health').innerText === 'unhealthy'")
    scripted.live |= {"is_healthy": True, "compiling": None}
    tab.wait(IS_UP_TO_DATE)


def test_charts_are_drawn_and_have_words(tab, scripted):
    drawn = coloured_pixels(tab, "#charts figure")
    assert [len(series) for series in drawn] == [2, 3, 2, 4, 3, 2]
    assert min(min(series) for series in drawn) > 10, drawn
    assert min(coloured_pixels(tab, ".scatter")[0]) > 10
    labels = tab.page.eval_on_selector_all("#charts canvas", "all => all.map(canvas => canvas.ariaLabel)")
    last = scripted.live["history"]["output_tokens"][-1]
    assert labels[0].startswith(f"Throughput, the last five minutes: output {last} tokens/s, prompts ")
    assert labels[4].endswith("dropped 18, swapped out 28, swapped in 27")
    tab.page.click("summary")
    rows = tab.rows("#series")
    assert len(rows) == 16
    assert rows[0][:3] == ["Throughput", "output", f"{last} tokens/s"]
    assert rows[7][:2] == ["Latency, median and 99th percentile of each second", "first token"]
    assert rows[7][5] == "69.4 ms"


def test_a_chart_says_what_is_under_the_pointer(tab):
    canvas = tab.page.locator("#charts canvas").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    tab.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    first, output, prompts = tab.text("#tip").split("\n")
    assert first.count(":") == 2
    assert output.startswith("output: ")
    assert prompts.endswith("tokens/s")


def test_values_follow_the_server(tab, scripted):
    live = copy.deepcopy(scripted.live)
    live["queues"]["running"] = 7
    live["requests"] = live["requests"][:2]
    scripted.live = live
    tab.wait("document.querySelector('#tiles dd').innerText.startsWith('7')")
    assert len(tab.rows("#requests")) == 2


def test_one_of_several_replicas_is_shown_until_another_is_chosen(scripted, open_tab):
    scripted.replicas = ["first", "second", "third"]
    tab = open_tab(scripted.url)
    tab.wait("document.querySelector('#model').innerText === 'first'")
    assert tab.page.locator("#replica option").all_inner_texts() == scripted.replicas
    tab.page.get_by_label("Replica").select_option("third")
    tab.wait("document.querySelector('#model').innerText === 'third'")
    before = scripted.num_polls
    tab.page.wait_for_timeout(2500)
    assert scripted.num_polls > before
    assert tab.page.inner_text("#model") == "third"
    scripted.replicas = ["second"]  # the others have gone
    tab.wait("document.querySelector('#model').innerText === 'second'")
    assert not tab.page.is_visible("#replicas")


def test_a_single_engine_has_no_name(tab):
    assert not tab.page.is_visible("#replicas")


def test_what_is_the_same_keeps_its_nodes(tab, scripted):
    nodes = "#requests td, #tiles dd, .bar i"
    tab.page.eval_on_selector_all(nodes, "nodes => nodes.forEach(node => { node.isKept = true; })")
    before = scripted.num_polls
    tab.page.wait_for_timeout(2500)
    assert scripted.num_polls > before
    kept = tab.page.eval_on_selector_all(nodes, "nodes => nodes.map(node => node.isKept ?? false)")
    assert len(kept) > 100
    assert all(kept)


def test_drafts_and_what_they_gain(tab, scripted):
    assert "Drafts kept" not in tab.text("#totals")
    counts = {"verifications": 900, "drafted": 4000, "kept": 3000}
    scripted.live["drafts"] = {**counts, "predicted_gain": 1.31, "measured_gain": 1.28}
    tab.wait("document.querySelector('#totals').innerText.includes('Drafts kept')")
    told = tab.text("#totals").replace("\n", " ")
    assert "3,000" in told
    assert "75 % of 4,000" in told
    assert "\u00d7 1.28" in told
    assert "predicted \u00d7 1.31" in told
    scripted.live["drafts"] = {
        **counts,
        "drafted": 0,
        "kept": 0,
        "predicted_gain": None,
        "measured_gain": None,
    }
    tab.wait("!document.querySelector('#totals').innerText.includes('predicted')")
    assert "NaN" not in tab.text("#totals")
    assert tab.problems == []


def test_request_ids_stay_text(scripted, open_tab):
    for request, decision, name in zip(
        scripted.live["requests"], scripted.live["decisions"], HOSTILE, strict=False
    ):
        request["id"] = decision["request_id"] = name
    scripted.live |= {"model": HOSTILE[0], "policy": HOSTILE[1]}
    scripted.live["predictions"] = {HOSTILE[0]: {"count": 1, "error": 0.5, "factor": 1.0}}
    scripted.live["requests"][6]["status"] = HOSTILE[2]
    tab = open_tab(scripted.url)
    tab.wait(IS_UP_TO_DATE)
    ids = [row[0] for row in tab.rows("#requests")]
    assert set(HOSTILE) <= set(ids)
    assert [row[1] for row in tab.rows("#decisions")][:6] == list(HOSTILE)
    assert tab.page.title() == f"{HOSTILE[0]} · jaxllm"
    assert tab.text("#model") == HOSTILE[0]
    tab.page.hover(".tier:nth-child(1) .bar i:nth-child(1)")
    assert HOSTILE[0] in tab.text("#tip")
    assert tab.page.locator("main img, main svg, main script, #tip *, header img").count() == 0
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.problems == []


def test_nothing_is_there_yet(scripted, open_tab):
    live = scripted.live
    live["requests"], live["decisions"], live["predictions"] = [], [], {}
    live["history"] = {name: [] for name in live["history"]}
    live["queues"] = {"waiting": 0, "running": 0, "swapped": 0}
    live["pool"] = {
        "device": {"total": 40, "held": 0, "cached": 0, "free": 40},
        "host": {"total": 0, "held": 0, "cached": 0, "free": 0},
        "disk": None,
    }
    live["totals"] = dict.fromkeys(live["totals"], 0)
    live["latencies"] = dict.fromkeys(live["latencies"])
    tab = open_tab(scripted.url)
    tab.wait(IS_UP_TO_DATE)
    assert "Nobody is here" in tab.text("#requests")
    assert "Nobody has been preempted" in tab.text("#decisions")
    assert "Nothing has been predicted" in tab.text("#predictions")
    assert [name for name, _ in parts(tab, 1)] == ["free"]
    assert tab.text(".tier:nth-child(2) p") == "Host\nno blocks here"
    assert coloured_pixels(tab, "#charts figure") == [[0] * number for number in (2, 3, 2, 4, 3, 2)]
    assert tiles(tab)["First token"] == NONE
    assert "NaN" not in tab.text("body")
    assert "undefined" not in tab.text("body")
    assert tab.problems == []


@pytest.mark.parametrize(
    ("failure", "word", "text"),
    [
        ({"is_away": True}, "away", "does not answer"),
        ({"status": 401}, "not allowed", "API key"),
        ({"status": 503}, "failing", "status 503"),
        ({"body": b"<html>"}, "not understood", "does not understand"),
        ({"body": b'{"version": "9"}'}, "not understood", "does not understand"),
    ],
)
def test_failures_are_told_and_end(tab, scripted, failure, word, text):
    assert tab.page.is_hidden("#banner")
    for name, value in failure.items():
        setattr(scripted, name, value)
    tab.wait(HAS_BANNER)
    assert tab.text("#health") == word
    banner = tab.text("#banner")
    assert text in banner
    assert "What is below is as of " in banner
    assert tab.page.eval_on_selector("main", "main => main.classList.contains('stale')")
    assert len(tab.rows("#requests")) == 17
    scripted.is_away, scripted.status, scripted.body = False, 200, None
    tab.wait(IS_UP_TO_DATE)
    assert tab.page.is_hidden("#banner")
    assert not tab.page.eval_on_selector("main", "main => main.classList.contains('stale')")


def test_an_engine_that_failed(tab, scripted):
    scripted.live["is_healthy"] = False
    tab.wait(HAS_BANNER)
    assert tab.text("#health") == "unhealthy"
    assert "engine has failed" in tab.text("#banner")
    scripted.live["is_healthy"] = True
    tab.wait(IS_UP_TO_DATE)


def test_a_server_that_is_away_from_the_beginning(scripted, open_tab):
    scripted.is_away = True
    tab = open_tab(scripted.url)
    tab.wait(HAS_BANNER)
    assert tab.text("#banner") == "The server does not answer."
    assert tab.page.get_attribute("main", "aria-busy") == "true"
    scripted.is_away = False
    tab.wait(IS_UP_TO_DATE)
    assert tab.page.get_attribute("main", "aria-busy") == "false"


def test_a_hidden_tab_asks_nothing(tab, scripted):
    hide = """hidden => {
        Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    tab.page.evaluate(hide, True)
    tab.page.wait_for_timeout(500)  # for one that is under way
    before = scripted.num_polls
    tab.page.wait_for_timeout(2500)
    assert scripted.num_polls == before
    tab.page.evaluate(hide, False)
    with tab.page.expect_response("**/live"):
        pass


def test_it_asks_its_own_server_alone(tab, scripted):
    tab.page.wait_for_timeout(2500)
    assert scripted.num_polls >= 2
    assert tab.hosts == {scripted.url.split("/")[2]}
    scripts = {f"/{name}.js" for name in ("page", "pool", "charts", "pieces")}
    assert set(tab.paths) == {"/", "/live", "/page.css"} | scripts
    assert tab.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(scripted, open_tab, scheme):
    tab = open_tab(scripted.url, color_scheme=scheme)
    tab.wait(IS_UP_TO_DATE)
    names = ("ink", "muted", "blue", "red", "bad-ink", "surface", "ground", "bad-ground")
    colours = tab.page.evaluate(
        """names => {
            const style = getComputedStyle(document.documentElement);
            return names.map(name => style.getPropertyValue(`--${name}`).trim());
        }""",
        names,
    )
    light = dict(zip(names, map(luminance, colours), strict=True))
    pairs = [(text, behind) for text in ("ink", "muted", "blue") for behind in ("surface", "ground")]
    for text, behind in (*pairs, ("red", "surface"), ("bad-ink", "bad-ground")):
        low, high = sorted((light[text], light[behind]))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, behind)


def luminance(colour):
    """Relative luminance of `#rrggbb`, as WCAG has it."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]
    return sum(weight * one for weight, one in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("width", [360, 768, 1280, 1920])
def test_it_fits_its_window(scripted, open_tab, width):
    tab = open_tab(scripted.url, viewport={"width": width, "height": 800})
    tab.wait(IS_UP_TO_DATE)
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_roles_and_names(tab):
    snapshot = tab.page.locator("body").aria_snapshot()
    for line in (
        'heading "jaxllm 0.1.0" [level=1]',
        'heading "KV pool" [level=2]',
        'img "Device: 36 held, 3 cached, 1 free, of 40 blocks (2.5 MiB)"',
        'columnheader "Recompute, predicted"',
        'cell "cmpl-00"',
    ):
        assert line in snapshot, json.dumps(snapshot)[:4000]
    unnamed = "canvas:not([aria-label]), [role=region]:not([aria-label]):not([aria-labelledby])"
    assert tab.page.locator(unnamed).count() == 0
