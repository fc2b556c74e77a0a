"""Takes the picture of `kvevict inspect`'s page that usage.md shows, and that of the server's page.

pip install playwright pillow
python docs/screenshots.py [BROWSER]        # /usr/bin/chromium, of Debian's package chromium
"""

import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

import kvevict
from kvevict.cli import main

DOCS = Path(__file__).parent.resolve()
DESK, SERVER = (1280, 860), (1000, 760)


def inspected(folder):
    """The page of usage.md's command."""
    os.chdir(folder)
    os.symlink(kvevict.small_llama(), "small_llama")  # the page shows the path as it is given
    notes()
    start = ["--model", "small_llama", "--budget", "128", "--policy", "take+chunkkv", "--policy", "snapkv"]
    start += ["--find", "364735", "--max-new-tokens", "10"]
    main(["inspect", *start, "--file", "notes.txt", "Question: What is the code of Naislet?\nAnswer:"])
    return Path("kvevict-inspect.html").resolve()


def notes():
    """Writes notes.txt, with a fact that the bundled model finds."""
    days = [f"On day {day} the baker counted the boats in the harbour and went home.\n" for day in range(1, 41)]
    Path("notes.txt").write_text("".join([*days[:10], "The code of Naislet is 364735.\n", *days[10:]]))


def shoot(browser, page):
    """The page once a layer and a token are chosen."""
    width, height = DESK
    with browser.new_context(viewport=dict(width=width, height=height), color_scheme="light") as context:
        tab = context.new_page()
        tab.on("pageerror", lambda error: sys.exit(f"{page}: {error}"))
        tab.goto(page.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") == width, "the page is wider than the window"
        tab.get_by_role("button", name="layer 2", exact=True).click()
        tab.locator(".found").first.click()
        tab.evaluate("scrollTo(0, 0)")
        write(tab.screenshot(), "page_desk_light")


def write(shot, name):
    Image.open(io.BytesIO(shot)).convert("RGB").quantize(160).save(DOCS / f"{name}.png", optimize=True)


def shoot_server(browser):
    """The page of a server that has read notes.txt and was asked for its fact."""
    width, height = SERVER
    command = [sys.executable, "-m", "kvevict", "serve", "--port", "0", "--budget", "256"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            port = next(json.loads(line)["port"] for line in server.stderr if '"ready"' in line)
            with browser.new_context(viewport=dict(width=width, height=height), color_scheme="light") as context:
                tab = context.new_page()
                tab.on("pageerror", lambda error: sys.exit(f"the server's page: {error}"))
                tab.goto(f"http://127.0.0.1:{port}/")
                tab.set_input_files("#file", "notes.txt")
                tab.wait_for_selector("#kept span")
                tab.fill("#question", "What is the code of Naislet?")
                tab.click("#send")
                tab.wait_for_selector("#answers small:has-text('first token')")
                said = tab.inner_text("#answers")
                assert "364735" in said, said
                fact = "[...document.querySelectorAll('#kept span')].find(s => s.textContent.includes('364'))"
                tab.evaluate(f"$('kept').scrollTop = {fact}.offsetTop - $('kept').offsetTop - 200; scrollTo(0, 0)")
                write(tab.screenshot(), "page_server")
        finally:
            server.terminate()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = sys.argv[1] if len(sys.argv) > 1 else "/usr/bin/chromium"
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        shoot(browser, inspected(folder))
        shoot_server(browser)
