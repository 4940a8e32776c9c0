"""The Grafana dashboard: well formed, and of metrics that the server has."""

import itertools
import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_helpers import serving

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
EXPRESSIONS = [target["expr"] for _, target in QUERIES]
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
MODEL = 'model_name=~"$model_name"'
SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}")
OVER_TIME = re.compile(r"(?:rate|increase) ?\([^()]*\)")


@pytest.fixture(scope="module")
def families():
    """Of each of the server's own metrics the type, and the labels of its samples."""
    with serving() as server:
        server.post("/v1/completions", {"model": "demo_model", "prompt": "import", "max_tokens": 4})
        _, _, content = server.request("GET", "/metrics")
    found = {}
    for family in text_string_to_metric_families(content.decode()):
        if family.name.startswith("jaxllm:") and not family.name.endswith("_created"):
            labels = {label for sample in family.samples for label in sample.labels}
            found[family.name] = family.type, labels
    assert len(found) > 20
    return found


def family_name(series):
    return re.sub(r"_(total|bucket|sum|count)$", "", series)


def series_of(name, kind):
    """The series that a metric has."""
    if kind == "histogram":
        return {f"{name}_{end}" for end in ("bucket", "sum", "count")}
    return {f"{name}_total"} if kind == "counter" else {name}


def test_it_can_be_imported():
    assert DASHBOARD["title"] == "jaxllm"
    assert DASHBOARD["id"] is None  # Grafana gives it one
    assert DASHBOARD["uid"]
    assert DASHBOARD["schemaVersion"] >= 36
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    assert len(set(titles)) == len(titles)
    assert all(panel["description"] and panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS)


def test_panels_lie_beside_each_other():
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_above, (one, other)


def test_data_source_and_model_are_variables():
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert variables.keys() == {"datasource", "model_name"}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    assert variables["model_name"]["datasource"] == DATASOURCE
    assert all(panel["datasource"] == DATASOURCE for panel in PANELS)
    assert all(target["datasource"] == DATASOURCE for _, target in QUERIES)
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used == {"datasource", "model_name", "__all", "__rate_interval"}


def test_the_model_is_chosen_from_a_metric_there_is(families):
    variable = next(one for one in DASHBOARD["templating"]["list"] if one["name"] == "model_name")
    name, label = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", variable["query"]["query"]).groups()
    assert label in families[family_name(name)][1]


def test_every_metric_named_is_one_of_the_server(families):
    known = set().union(*(series_of(name, kind) for name, (kind, _) in families.items()))
    for expression in EXPRESSIONS:
        selected = SELECTOR.findall(expression)
        assert selected, expression
        assert {name for name, _ in selected} <= known, expression
        assert len(re.findall(r"jaxllm:\w+", expression)) == len(selected), expression
        assert all(MODEL in matchers.split(", ") for _, matchers in selected), expression


def test_every_metric_of_the_server_is_shown(families):
    shown = {family_name(name) for expression in EXPRESSIONS for name, _ in SELECTOR.findall(expression)}
    assert shown == families.keys()


def grouped_by(expression):
    lists = re.findall(r"\bby \(([^)]*)\)", expression)
    return {label for names in lists for label in names.split(", ")}


def test_labels_are_those_of_the_metrics(families):
    for expression in EXPRESSIONS:
        known = set()
        for name, matchers in SELECTOR.findall(expression):
            labels = families[family_name(name)][1]
            if not labels:  # no sample has been there yet
                assert name == "jaxllm:prediction_error_ratio"
                labels = {"model_name", "kind"}
            assert set(re.findall(r"(\w+)[=!]", matchers)) <= labels, expression
            known |= labels
        assert grouped_by(expression) <= known, expression


def test_quantiles_are_of_buckets():
    with_quantiles = [one for one in EXPRESSIONS if "histogram_quantile" in one]
    assert with_quantiles
    assert all("sum by (le) (rate(" in one for one in with_quantiles)
    assert with_quantiles == [one for one in EXPRESSIONS if "_bucket{" in one]


def test_legends_name_what_is_grouped_by():
    for title, target in QUERIES:
        named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert named == grouped_by(target["expr"]) - {"le"}, title


def test_counters_are_rates_and_gauges_are_not(families):
    for expression in EXPRESSIONS:
        for name, _ in SELECTOR.findall(expression):
            kind, _ = families[family_name(name)]
            is_rate = any(f"{name}{{" in part for part in OVER_TIME.findall(expression))
            assert is_rate == (kind != "gauge"), expression


def test_parentheses_are_closed():
    for expression in EXPRESSIONS:
        depth = list(itertools.accumulate((one == "(") - (one == ")") for one in expression))
        assert min(depth) >= 0
        assert depth[-1] == 0
