"""Screenshots of the dashboard for docs/images: `python benchmarks/dash_pictures.py` trains two small runs on the text of docs/ and
takes them, in some minutes on two cores."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlencode

import yaml
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from watch.conftest import TOKEN, Dashboard

REPOSITORY = Path(__file__).parents[1]
IMAGES = REPOSITORY / "docs" / "images"
PLAN = "#/plan?" + urlencode({"model": "llama2-7b", "cluster": "2xp4d.24xlarge"})
CLUSTERS = "#/plan?" + urlencode(
    [("model", "llama2-7b"), *(("cluster", name) for name in ("p5.48xlarge", "p4d.24xlarge")), ("within", 14)]
)
SPEC = {
    "model": {"preset": "llama3-1b", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 192, "vocab_size": 257, "max_seq_len": 128},
    "data": {"train": "corpus", "seq_len": 128, "split": [95, 5, 0]},
    "train": {"global_batch": 16, "steps": 400},
    "optim": {"warmup": 20},
    "eval": {"every": 40, "batches": 4},
    "checkpoint": {"every": 100, "keep": 3},
    "log": {"every": 2, "price": 0.4},
}  # fmt: skip
RUNS = {"calm": ("optim.lr=1e-3",), "bold": ("optim.lr=4e-3", "train.steps=300")}


def main() -> None:
    one, both = urlencode([("run", "calm"), ("smooth", 0.6)]), urlencode([("run", name) for name in RUNS])
    pictures = [
        ("dash-run", "light", 1280, 1500, f"#/runs?{one}", '[data-card="Events"]'),
        ("dash-compare", "dark", 1280, 860, f"#/runs?{both}", '[data-card="Now"]'),
        ("dash-table", "light", 1280, 300, "#/table", "tbody tr"),
        ("dash-plan", "light", 1280, 1000, PLAN, "tbody tr"),
        ("dash-clusters", "light", 1280, 780, CLUSTERS, "tbody tr"),
        ("dash-narrow", "dark", 420, 900, f"#/runs?{one}", '[data-card="Events"]'),
    ]
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder))
        dashboard = Dashboard(Path(folder) / "runs")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            for name, scheme, width, height, where, ready in pictures:
                context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
                page = context.new_page()
                page.goto(f"{dashboard.address}/?{urlencode({'token': TOKEN})}{where}")
                page.locator(ready).first.wait_for(timeout=120_000)
                page.wait_for_timeout(2500)
                page.screenshot(path=IMAGES / f"{name}.png")
                context.close()
            browser.close()
        dashboard.close()


def train(folder: Path) -> None:
    """Prepare a corpus of the documentation, and train the runs on two ranks."""
    pages = [path.read_text(encoding="utf-8") for path in sorted((REPOSITORY / "docs").rglob("*.md"))]
    (folder / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in pages))
    (folder / "run.yaml").write_text(yaml.safe_dump(SPEC))
    argosy(folder, "data", "prepare", "docs.jsonl", "--tokenizer", "bytes", "--output", "corpus")
    for name, overrides in RUNS.items():
        argosy(folder, "train", "run.yaml", "--nproc", "2", "--quiet", f"name={name}", *overrides)
    argosy(folder, "note", "runs/calm", "the usual learning rate", "--tag", "baseline")


def argosy(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "argosy", *arguments], cwd=folder, check=True)


if __name__ == "__main__":
    main()
