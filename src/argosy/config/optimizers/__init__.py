"""The registry of optimisers: every module in this package declares one, as its `RULE`.

A new optimiser is a module here and an update in `train/`; docs/how-to/add-an-optimizer.md walks through one.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from pydantic import Field, create_model

from argosy.config.model import Section
from argosy.config.optimizer_rule import Rule
from argosy.config.optimizers.adamw import RULE as DEFAULT

__all__ = ["DEFAULT", "RULES", "OptimizerKeys", "rule_elsewhere"]


def _declared() -> dict[str, Rule]:
    modules = sorted(module.name for module in iter_modules(__path__))
    rules: list[Rule] = [import_module(f"{__name__}.{module}").RULE for module in modules]
    return {rule.name: rule for rule in rules}


RULES = _declared()


def _optimizer_fields() -> dict[str, Any]:
    """Return the fields of `optim`: `name`, the keys of inline rules, and a section for each other rule."""
    names = Literal[tuple(RULES)]  # type: ignore[valid-type]
    fields: dict[str, Any] = {"name": (names, Field(DEFAULT.name, description="optimiser"))}
    for rule in RULES.values():
        if rule.inline:
            hints = get_type_hints(rule.keys, include_extras=True)
            for key, field in rule.keys.model_fields.items():
                fields[key] = (hints[key], Field(field.default, description=field.description))
        else:
            fields[rule.name] = (rule.keys | None, Field(None, description=f"with `name: {rule.name}`"))
    return fields


if TYPE_CHECKING:

    class OptimizerKeys(Section):
        """The part of `optim` that the rules declare. Their own keys are read through `Rule.settings`."""

        name: str = DEFAULT.name

else:
    OptimizerKeys = create_model("OptimizerKeys", __base__=Section, **_optimizer_fields())


def rule_elsewhere(trainer: str, name: str) -> Rule | None:
    """Return the rule for what another trainer calls `name`, or None."""
    return next((rule for rule in RULES.values() if name in rule.names_elsewhere.get(trainer, ())), None)
