"""The documentation as a site, opened from the disk."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
    return folder


def test_it_is_searched_without_a_server(browser, site):
    page = browser.new_page()
    page.goto((site / "howto" / "chat.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type("weighted turnaround")
    found = page.locator(".md-search-result__item a").first
    found.wait_for(timeout=20_000)
    assert "turnaround" in page.locator(".md-search-result__list").inner_text().lower()
    assert found.get_attribute("href").startswith("file://")
    page.close()
