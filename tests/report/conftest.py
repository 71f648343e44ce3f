"""Small real runs that the tests of reports share, and a real browser where there is one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flashfl.cli import main
from flashfl.report.command import write
from flashfl.report.load import load

SMALL = [
    "--rounds=5", "--eval_every=1", "--clients=4", "--per_round=2", "--limit=160", "--density=0.1",
    "--warmup_clients=2", "--warmup_epochs=2", "--workers=1", "--device=cpu", "--quiet",
]  # fmt: skip


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of eight runs: four methods, two seeds each, as `flashfl compare` leaves it."""
    folder = tmp_path_factory.mktemp("compared")
    assert main(["compare", "--methods", "dense,nst,spdst,jmwst", "--seeds", "2", "--out", str(folder), *SMALL]) == 0
    return folder


@pytest.fixture(scope="session")
def page(compared: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of the page about these runs."""
    return write(load([compared]), tmp_path_factory.mktemp("page") / "report.html").as_uri()


@pytest.fixture
def damaged(compared: Path, tmp_path: Path) -> Path:
    """A folder with one good run, one cut short, and four that are damaged in different ways."""
    whole = (compared / "nst-seed0" / "results.jsonl").read_bytes()
    bad = {
        "cut": whole[: int(len(whole) * 0.6)],
        "headless": whole.split(b"\n", 1)[1],
        "binary": bytes(range(128, 256)) * 9,
        "fields": whole.replace(b'"cohort"', b'"cohor"'),
        "unbegun": whole.split(b"\n", 1)[0] + b"\n",
    }
    for name, text in bad.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.jsonl").write_bytes(text)
    shutil.copytree(compared / "jmwst-seed0", tmp_path / "good")
    return tmp_path


@pytest.fixture(scope="session")
def open_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """open_page(address, width=1400, dark=False) -> a browser that shows the page."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    flags = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
    for flag in f"{flags} disable-component-update disable-sync hide-scrollbars".split():
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    from selenium.webdriver.chrome.service import Service

    browser = webdriver.Chrome(options=options, service=Service(driver))

    def show(address: str, width: int = 1400, dark: bool = False) -> Any:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        browser.get_log("browser")
        browser.get(address)
        return browser

    yield show
    browser.quit()
