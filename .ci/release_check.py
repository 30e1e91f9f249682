"""Build what a release has from the last commit, and try it: `make release-check`, or with a tag `make release-check TAG=v0.2.0`.

It makes dist/ with the wheel, the sdist, an SBOM (CycloneDX), the notes of the release and the hashes of all files. The wheel is
installed into an empty environment, from whatever index or cache pip is configured with, and has to run the demo there. With a tag, the
version is the tag's, and CHANGELOG.md must have a section of it; without one it is that of the sources.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION_LINE = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)
TAG = re.compile(r"v(\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)")
# What a wheel without it would fail on only later: types, facts of the planner, the dashboard's page, known failures.
NEEDED = ("argosy/py.typed", "argosy/plan/facts/hardware.yaml", "argosy/watch/failures.yaml", "argosy/watch/page/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tag", help="the tag of the release, as v0.2.0")
    parser.add_argument("--seconds", type=int, default=120, help="how long the demo may take")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        source = export_last_commit(place / "source")
        version = set_version(source, options.tag)
        notes = release_notes((source / "CHANGELOG.md").read_text(), version if options.tag else None)
        dist = ROOT / "dist"
        shutil.rmtree(dist, ignore_errors=True)
        tools = environment(place / "tools", "build", "cyclonedx-bom")
        run(
            tools / "python",
            "-m",
            "build",
            "--outdir",
            dist,
            source,
            env=os.environ | {"SOURCE_DATE_EPOCH": commit_time()},
        )
        wheel = check_files(dist, version)
        empty = environment(place / "empty", "--constraint", source / "constraints.txt", wheel)
        try_wheel(empty, wheel, version, place / "work", options.seconds)
        bill = dist / f"argosy-{version}.cdx.json"
        run(tools / "cyclonedx-py", "environment", "--output-reproducible", "-o", bill, empty / "python")
        (dist / "NOTES.md").write_text(notes)
    hashes = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(dist.iterdir())]
    (dist / "SHA256SUMS").write_text("".join(hashes))
    print(f"argosy {version} builds, installs into an empty environment and runs the demo; dist/:")
    print("".join(f"  {path.name} ({path.stat().st_size:,} bytes)\n" for path in sorted(dist.iterdir())), end="")


def run(*command: object, **options: object) -> str:
    """Run a command, show what it prints, and return it."""
    words = [str(word) for word in command]
    print("+", " ".join(words), flush=True)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options) as process:  # type: ignore[call-overload]
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        sys.exit(f"release-check: {words[0]} ended with exit code {process.returncode}")
    return "".join(lines)


def export_last_commit(to: Path) -> Path:
    to.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", to], input=archive, check=True)
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, check=True, capture_output=True).stdout:
        print("release-check: what is not committed is left out")
    return to


def commit_time() -> str:
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def set_version(source: Path, tag: str | None) -> str:
    """Write a tag's version into the sources. Returns the version."""
    path = source / "src" / "argosy" / "__init__.py"
    text = path.read_text()
    if tag is not None:
        if not (found := TAG.fullmatch(tag)):
            sys.exit(f"release-check: {tag} is not a version's tag, as v0.2.0 or v0.2.0rc1")
        text = VERSION_LINE.sub(f'__version__ = "{found[1]}"', text)
        path.write_text(text)
    return VERSION_LINE.search(text)[1]  # type: ignore[index]


def release_notes(changes: str, version: str | None) -> str:
    """Return the section of a version, or what is not released yet."""
    sections = re.split(r"^## ", changes, flags=re.MULTILINE)[1:]
    wanted = version or "Unreleased"
    for section in sections:
        title, _, text = section.partition("\n")
        if title.split()[0] == wanted:
            return text.strip() + "\n"
    return sys.exit(f"release-check: CHANGELOG.md has no section `## {wanted}`")


def environment(folder: Path, *requirements: object) -> Path:
    """Make a new environment with some packages. Returns its folder of programs."""
    venv.create(folder, with_pip=True)
    programs = folder / "bin"
    run(programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements)
    return programs


def check_files(dist: Path, version: str) -> Path:
    wheel, sdist = dist / f"argosy-{version}-py3-none-any.whl", dist / f"argosy-{version}.tar.gz"
    for path in (wheel, sdist):
        if not path.exists():
            sys.exit(f"release-check: {path.name} was not built; dist/ has {sorted(p.name for p in dist.iterdir())}")
    names = subprocess.run([sys.executable, "-m", "zipfile", "-l", wheel], check=True, capture_output=True, text=True)
    for needed in NEEDED:
        if needed not in names.stdout:
            sys.exit(f"release-check: {wheel.name} lacks {needed}")
    return wheel


def try_wheel(programs: Path, wheel: Path, version: str, work: Path, seconds: int) -> None:
    """Use the installed wheel as a new user would, with nothing of this clone around."""
    work.mkdir()
    around = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if run(programs / "argosy", "--version", cwd=work, env=around).split() != ["argosy", version]:
        sys.exit(f"release-check: the wheel does not say that it is {version}")
    missing = subprocess.run(
        [programs / "argosy", "dash", "."], cwd=work, env=around, capture_output=True, text=True, check=False
    )
    if missing.returncode != 2 or f"pip install '{wheel}[dash]'" not in missing.stderr:
        sys.exit(f"release-check: the dashboard's missing extra is not explained:\n{missing.stderr}")
    run(programs / "argosy", "demo", "--seconds", seconds, cwd=work, env=around)


if __name__ == "__main__":
    main()
