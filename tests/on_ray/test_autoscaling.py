from serve_helpers import get, serving, started, wait_until


def test_the_number_of_replicas_follows_what_is_queued(cluster, tmp_path):
    with serving(
        tmp_path,
        num_replicas=1,
        max_replicas=2,
        target_queued_tokens=100,
        upscale_seconds=0.5,
        downscale_seconds=0.5,
    ) as scaled:
        (tmp_path / "queued").write_text("150")
        wait_until(lambda: len(started(tmp_path)) == 2)
        wait_until(lambda: len({get(scaled, "/who")["pid"] for _ in range(10)}) == 2)
        (tmp_path / "queued").write_text("0")
        wait_until(lambda: len({get(scaled, "/who")["pid"] for _ in range(10)}) == 1)
