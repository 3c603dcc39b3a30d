"""What a reader sees in JupyterLab: notebooks run there, pictures are drawn, the live view moves, the explorer answers.

Needs Chromium or Chrome. Without it these tests are skipped, or fail where QKGEO_BROWSER is `required`. Screenshots go to `screenshots/`,
or to QKGEO_SCREENSHOTS.
"""
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from conftest import ROOT, cells

CHROMIUM = next(filter(None, map(shutil.which, (os.environ.get("QKGEO_CHROMIUM", ""), "chromium", "google-chrome", "chromium-browser"))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]
SHOTS = Path(os.environ.get("QKGEO_SCREENSHOTS", ROOT / "screenshots"))
SETTINGS = {"notebook-extension/tracker": {"windowingMode": "none"},  # every output is in the page, seen or not
            "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False}}
ERROR = '[data-mime-type="application/vnd.jupyter.error"], [data-mime-type="application/vnd.jupyter.stderr"]:has-text("Traceback")'
SLOW = 240_000  # ms: longest wait for anything that computes


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    "JupyterLab on a copy of the notebooks, with settings of its own; its address as a function of a notebook."
    if not CHROMIUM and os.environ.get("QKGEO_BROWSER") == "required": pytest.fail("no Chromium: install it, or set QKGEO_CHROMIUM to its path.")
    if not CHROMIUM: pytest.skip("no Chromium here")
    root, home = tmp_path_factory.mktemp("lab"), tmp_path_factory.mktemp("home")
    shutil.copytree(ROOT / "nbs", root / "nbs", ignore=shutil.ignore_patterns("runs", "series", ".*", "__pycache__"))
    (root / "paper" / "results").mkdir(parents=True)
    shutil.copy(ROOT / "paper" / "results" / "overview.nc", root / "paper" / "results")
    for name, values in SETTINGS.items():
        file = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    server, address, token = start(root, home)
    yield lambda notebook: f"{address}/lab/tree/nbs/{notebook}.ipynb?reset&token={token}"
    server.terminate()
    server.wait(timeout=60)


def start(root, home):
    "Start the server on a free port of the loopback; wait until it answers."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    token, address = secrets.token_hex(16), f"http://127.0.0.1:{port}"
    own = {f"JUPYTER_{n}_DIR": str(home / n.lower()) for n in ("CONFIG", "RUNTIME", "DATA")}
    own |= {"JUPYTERLAB_SETTINGS_DIR": str(home / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces")}
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0",
               f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}"]
    with open(home / "log", "w") as log: server = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log)
    end = time.monotonic() + 90
    while time.monotonic() < end and server.poll() is None:
        try: return server, address, urllib.request.urlopen(f"{address}/api/status?token={token}", timeout=5) and token
        except (urllib.error.URLError, OSError): time.sleep(0.2)
    server.kill()
    pytest.fail("JupyterLab did not start:\n" + (home / "log").read_text()[-3000:])


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(lab, browser, request):
    "A page that opens notebooks; a screenshot is left of how it ended."
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(60_000)
    yield page
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{request.node.name}-end.png")
    page.close()


def opened(page, address):
    "Open a notebook and wait for its kernel."
    page.goto(address)
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()


def run_all(page):
    page.locator(".lm-MenuBar-item", has_text=re.compile("^Run$")).click()
    page.locator(".lm-Menu-item", has_text=re.compile("^Run All Cells$")).click()


def finished(page):
    "Wait until every code cell has run and the kernel is idle, or something went wrong; then nothing may have."
    page.wait_for_function("""() => {
        const numbers = [...document.querySelectorAll('.jp-Notebook .jp-CodeCell .jp-InputPrompt')].map(e => e.textContent);
        const idle = document.querySelector('.jp-Notebook-ExecutionIndicator[data-status="idle"]');
        const failed = document.querySelector('[data-mime-type="application/vnd.jupyter.error"]');
        return failed || (idle && numbers.every(n => /\\[\\d+\\]/.test(n)));
    }""", timeout=SLOW)
    assert page.locator(ERROR).count() == 0, page.locator(ERROR).first.inner_text()


def pictures(page, inside=".jp-Notebook"):
    "Widths of the pictures in the outputs, once all are decoded."
    page.wait_for_function(f"() => [...document.querySelectorAll('{inside} .jp-OutputArea-output img')].every(i => i.complete)")
    return page.eval_on_selector_all(f"{inside} .jp-OutputArea-output img", "all => all.map(i => i.naturalWidth)")


def shot(page, name, what):
    "A screenshot with `what` in view."
    SHOTS.mkdir(parents=True, exist_ok=True)
    what.scroll_into_view_if_needed()
    page.screenshot(path=SHOTS / f"{name}.png")


def test_the_geometry_notebook_runs_and_its_pictures_are_seen(lab, page):
    opened(page, lab("02_geometry"))
    before = len(pictures(page))
    run_all(page)
    finished(page)
    widths = pictures(page)
    assert len(widths) >= max(before, 1) and min(widths) > 0
    shot(page, "geometry", page.locator(".jp-OutputArea-output img").first)


def set_parameter(page, line):
    "Type over the line of a parameter, as a user does."
    page.locator(".cm-line", has_text=re.compile("^" + line.split("=")[0] + "=")).first.click()
    page.keyboard.press("Home")
    page.keyboard.press("Shift+End")
    page.keyboard.insert_text(line)


def test_training_is_seen_while_it_goes_on(lab, page):
    opened(page, lab("train"))
    for line in ("steps = 400", "depth = 2", "threads = 1"): set_parameter(page, line)
    run_all(page)
    cell = page.locator(".jp-CodeCell", has_text="ds = train(cfg)").locator(".jp-OutputArea").first
    line, figure = cell.get_by_text(re.compile(r"step [\d,]+ of 400, loss")), cell.locator("img")
    figure.wait_for(timeout=SLOW)
    then = line.inner_text(), figure.get_attribute("src")
    shot(page, "training", figure)
    cell.get_by_text("step 400 of 400").wait_for(timeout=SLOW)
    finished(page)
    now = line.inner_text(), figure.get_attribute("src")
    assert cell.locator("img").count() == 1 and now[0] != then[0] and now[1] != then[1]
    assert min(pictures(page)) > 0
    assert page.locator(".jp-OutputArea-output", has_text="The gap is positive in").count() == 1
    shot(page, "trained", figure)


def test_the_explorer_answers(lab, page):
    opened(page, lab("explore"))
    assert min(pictures(page)) > 0, "the saved notebook has a picture"
    run_all(page)
    finished(page)
    picture, menus = page.locator("img.widget-image"), page.locator(".widget-dropdown select")
    handle = page.locator(".jupyter-widgets .noUi-handle")
    seen = lambda: picture.get_attribute("src")
    changed = "src => document.querySelector('img.widget-image').src !== src"
    for change in (lambda: (handle.focus(), page.keyboard.press("ArrowRight")), lambda: menus.nth(0).select_option(index=2),
                   lambda: menus.nth(1).select_option(index=1), lambda: page.locator(".widget-play button").first.click()):
        before = seen()
        change()
        page.wait_for_function(changed, arg=before)
    assert menus.count() == 2  # a single run: layer and head
    assert page.locator(ERROR).count() == 0
    page.wait_for_function("() => { const i = document.querySelector('img.widget-image'); return i.complete && i.naturalWidth > 0; }")
    box = picture.bounding_box()
    assert box["x"] + box["width"] <= 1280, "the picture is wider than the page"
    shot(page, "explorer", picture)


def test_the_saved_explorer_has_a_picture_and_no_dead_widget():
    kinds = {kind for c in cells(ROOT / "nbs" / "explore.ipynb") for o in c.get("outputs", []) for kind in o.get("data", {})}
    assert "image/png" in kinds and not any("widget" in kind for kind in kinds)
