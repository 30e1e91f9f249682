"""The Jinja extension for `{% generation %} … {% endgeneration %}`, with which a chat template marks the assistant's turns.

The environment's `marks` are put around what such a block renders. This module imports Jinja, which is optional.
"""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class Generation(Extension):
    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        begin, end = self.environment.marks  # type: ignore[attr-defined]
        return f"{begin}{caller()}{end}"
