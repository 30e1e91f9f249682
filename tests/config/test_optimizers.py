"""An optimiser is declared once: its module is the only place that knows it by name."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

import argosy
from argosy.config.optimizers import DEFAULT, RULES
from argosy.config.schema import OptimSpec

SOURCE = Path(argosy.__file__).parent


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_found_by_the_name_of_its_modules(name: str) -> None:
    declared = import_module(f"argosy.config.optimizers.{name}").RULE
    assert declared is RULES[name] is OptimSpec(name=name, lr=1.0, min_lr=0.1).rule
    assert declared.name == name
    assert callable(import_module(f"argosy.train.{name}_update").make_update)
    assert all(rule in RULES.values() for rule in declared.parts)
    assert declared.parts[-1].rest is None, "no rule takes the last parameters"


def test_no_other_module_knows_an_optimiser_by_name() -> None:
    for file in SOURCE.rglob("*.py"):
        if file.parent.name == "optimizers":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            named = isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in RULES
            assert not named, f"{file}:{node.lineno} names {node.value}"


@pytest.mark.parametrize("name", RULES)
def test_settings_are_the_keys_of_the_run_spec_or_their_defaults(name: str) -> None:
    rule = RULES[name]
    optim = OptimSpec(name=name, lr=1.0, min_lr=0.1)
    assert rule.settings(optim) == rule.keys()
    assert all(rule.key_path(key).split(".")[1] in OptimSpec.model_fields for key in rule.keys.model_fields)


def test_keys_in_optim_itself_are_the_default_rules() -> None:
    optim = OptimSpec(lr=1.0, min_lr=0.1, betas=(0.8, 0.9), eps=1e-6)
    assert DEFAULT.settings(optim) == DEFAULT.keys(betas=(0.8, 0.9), eps=1e-6)
