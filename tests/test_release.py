"""What `make release-check` and the release workflow rest on; the check itself builds, installs and runs the demo, for minutes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import argosy

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def release() -> Any:
    spec = importlib.util.spec_from_file_location("release_check", ROOT / ".ci" / "release_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_tag_sets_the_version_and_the_sources_have_it_otherwise(release: Any, tmp_path: Path) -> None:
    package = tmp_path / "src" / "argosy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text((ROOT / "src" / "argosy" / "__init__.py").read_text())
    assert release.set_version(tmp_path, None) == argosy.__version__
    assert release.set_version(tmp_path, "v3.1.4rc2") == "3.1.4rc2"
    assert release.set_version(tmp_path, None) == "3.1.4rc2"
    with pytest.raises(SystemExit, match="not a version's tag"):
        release.set_version(tmp_path, "release-3")


def test_the_notes_of_a_release_are_its_section_of_the_changelog(release: Any) -> None:
    changes = "# Changes\n\n## Unreleased\n\nsoon\n\n## 0.2.0 (2027-01-01)\n\n### Added\n\n- x\n\n## 0.1.0\n\nfirst\n"
    assert release.release_notes(changes, "0.2.0") == "### Added\n\n- x\n"
    assert release.release_notes(changes, None) == "soon\n"
    assert release.release_notes((ROOT / "CHANGELOG.md").read_text(), None)
    with pytest.raises(SystemExit, match=r"no section `## 0.3.0`"):
        release.release_notes(changes, "0.3.0")


def test_files_that_a_wheel_needs_are_in_the_sources(release: Any) -> None:
    for needed in release.NEEDED:
        assert (ROOT / "src" / needed).exists(), needed


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.stem)
def test_actions_are_pinned_by_their_commit_with_the_tag_beside_it(path: Path) -> None:
    """A tag can be moved to other code."""
    used = re.findall(r"uses: (.*)", path.read_text())
    assert used
    for action in used:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[0-9]+\.[0-9]+\.[0-9]+", action), f"{action} is not pinned"


def test_the_workflow_checks_the_tag_on_both_machines() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert build["strategy"]["matrix"]["machine"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    assert any('make release-check TAG="$GITHUB_REF_NAME"' in step.get("run", "") for step in build["steps"])
    assert publish["needs"] == "build"
    assert workflow["permissions"] == {}
