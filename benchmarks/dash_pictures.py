"""Screenshots of the dashboard for docs/images: `python benchmarks/dash_pictures.py ROOT RUN OTHER` takes them of real runs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from watch.conftest import TOKEN, Dashboard

IMAGES = Path(__file__).parents[1] / "docs" / "images"
PLAN = "#/plan?" + urlencode({"model": "llama2-7b", "cluster": "2xp4d.24xlarge", "tokens": "20B"})


def main() -> None:
    root, run, other = sys.argv[1:4]
    one, both = urlencode([("run", run)]), urlencode([("run", run), ("run", other)])
    pictures = [
        ("dash-run", "light", 1280, 1500, f"#/runs?{one}", '[data-card="Events"]'),
        ("dash-compare", "dark", 1280, 860, f"#/runs?{both}", '[data-card="Now"]'),
        ("dash-plan", "light", 1280, 860, PLAN, "tbody tr"),
        ("dash-narrow", "dark", 390, 900, f"#/runs?{one}", '[data-card="Events"]'),
    ]
    dashboard = Dashboard(Path(root))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, scheme, width, height, where, ready in pictures:
            context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
            page = context.new_page()
            page.goto(f"{dashboard.address}/?{urlencode({'token': TOKEN})}")
            page.goto(f"{dashboard.address}/{where}")
            page.locator(ready).first.wait_for(timeout=120_000)
            page.wait_for_timeout(2500)
            page.screenshot(path=IMAGES / f"{name}.png")
            context.close()
        browser.close()
    dashboard.close()


if __name__ == "__main__":
    main()
