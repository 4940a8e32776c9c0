import pytest
from cluster_helpers import SMALL
from serve_helpers import get, post, text, text_of

from jaxllm.cluster.serve import ClusterConfig, engine_apps, started
from jaxllm.server.config import ServerConfig

KEY = "a-key-of-tests"


@pytest.fixture(scope="module")
def url(cluster):
    """Two real engines, each on a processor of its own."""
    import ray

    server = ServerConfig(port=0, api_keys=[KEY], shutdown_timeout=1.0, served_model_names=["demo"])
    config = ClusterConfig(num_replicas=2)
    with started(engine_apps(ray, SMALL, server, config), server, config) as running:
        yield running.url


def ask(url, body, path="/v1/completions"):
    return post(url, {"model": "demo", **body}, path, authorization=f"Bearer {KEY}")


def test_replicas_say_what_one_server_says(url):
    body = {"prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
    first = ask(url, body)
    assert first["choices"][0]["text"]
    for _ in range(4):
        assert ask(url, body)["choices"] == first["choices"]
    assert get(url, "/v1/models", authorization=f"Bearer {KEY}")["data"][0]["id"] == "demo"
    assert text_of(url, body, KEY) == first["choices"][0]["text"]


def test_errors_are_the_replicas(url):
    from urllib.error import HTTPError

    for body, path, headers, status in (
        ({"model": "demo", "prompt": "x"}, "/v1/completions", {}, 401),
        ({"model": "other", "prompt": "x"}, "/v1/completions", {"authorization": f"Bearer {KEY}"}, 404),
        ({"model": "demo", "prompt": 5}, "/v1/completions", {"authorization": f"Bearer {KEY}"}, 400),
        (b"{", "/v1/chat/completions", {"authorization": f"Bearer {KEY}"}, 400),
        (b" " * (9 * 2**20), "/v1/completions", {"authorization": f"Bearer {KEY}"}, 413),
    ):
        with pytest.raises(HTTPError) as caught:
            post(url, body, path, **headers)
        assert caught.value.code == status
        assert caught.value.headers["x-request-id"]
        caught.value.close()


def test_later_turns_find_the_blocks_of_earlier_ones(url):
    found = 0
    for conversation in range(4):
        token_ids = [5 + conversation] * 40
        for _ in range(3):
            body = {"prompt": token_ids, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            usage = ask(url, body)["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached >= (len(token_ids) > 40) * 32
            found += cached
            token_ids = [*token_ids, *range(10, 26)]
    assert found
    page = text(url, "/metrics", authorization=f"Bearer {KEY}")
    hits = [line for line in page.splitlines() if line.startswith("jaxllm:prefix_cache_hits_total{")]
    assert len({line.partition('replica="')[2].partition('"')[0] for line in hits}) == 2
    assert sum(float(line.rpartition(" ")[2]) for line in hits) == found
    assert (
        page.count("# TYPE jaxllm:prefix_cache_hits counter")
        + page.count("# TYPE jaxllm:prefix_cache_hits_total counter")
        == 1
    )
