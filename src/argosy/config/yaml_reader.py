"""A safe and predictable YAML reader that keeps the line of every value.

PyYAML follows YAML 1.1, where `no` is false, `1e-4` is a string, `010` is eight and `12:30` is 750. Here only `true` and `false`
are booleans, numbers are written as in Python and JSON, and everything else is text. The schema then decides what a key accepts.
Repeated keys are refused. Only plain data can be constructed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from argosy.errors import ArgosyError

MAX_BYTES = 1 << 20
# YAML aliases can make a small file describe a huge tree.
MAX_VALUES = 20_000

Lines = dict[str, int]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


def _resolve(tag: str, pattern: str, first: str) -> None:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first))


_resolve("null", r"^(?:~|null|)$", "~n\0")
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^$"), [""])
_resolve("bool", r"^(?:true|false)$", "tf")
_resolve("int", r"^[-+]?(?:0|[1-9][0-9_]*)$", "-+0123456789")
_resolve(
    "float", r"^[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)$", "-+0123456789."
)


def read_yaml(path: Path) -> tuple[Any, Lines]:
    """Return the document and the line number of every dotted key in it."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ArgosyError(
                "config.bad-yaml", f"{path} is larger than {MAX_BYTES:,} bytes", fix="give the run spec, not the data"
            )
        text = content.decode("utf-8")
        if "\0" in text:
            raise ArgosyError("config.bad-yaml", f"{path} holds a NUL character", fix="is it a text file?")
    except IsADirectoryError:
        is_corpus = (path / "manifest.json").exists()
        raise ArgosyError(
            "config.not-found",
            f"{path} is a {'prepared corpus' if is_corpus else 'directory'}, and a run spec is a file",
            fix=f"`argosy init {path}` writes a run spec for it" if is_corpus else "give its RUN.yaml",
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        raise ArgosyError(
            "config.not-found",
            f"there is no file {path}",
            fix="check the path; `argosy train RUN.yaml` wants a run spec",
        ) from None
    except PermissionError:
        raise ArgosyError("config.not-found", f"{path} cannot be read: permission denied", fix="chmod it") from None
    except UnicodeDecodeError as error:
        raise ArgosyError("config.bad-yaml", f"{path} is not UTF-8 text: {error}", fix="save it as UTF-8") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> tuple[Any, Lines]:
    try:
        loader = _Loader(text)
        # PyYAML's messages call the document by this name.
        loader.name = name
        node = loader.get_single_node()
    except (yaml.YAMLError, RecursionError) as error:
        raise ArgosyError("config.bad-yaml", str(error), fix="check indentation, quotes and colons") from None
    lines: Lines = {}
    if node is None:
        return {}, lines
    return _Builder(loader, name, lines).build(node, ""), lines


def parse_value(text: str, name: str) -> Any:
    """Parse one value as written on a command line: `4`, `1e-4`, `[98, 2, 0]`, `{tp: 2}`, `some text`."""
    return parse_yaml(text, name)[0] if text.strip() else ""


class _Builder:
    """Converts YAML nodes to plain values. It records the line of each and counts them."""

    def __init__(self, loader: _Loader, name: str, lines: Lines) -> None:
        self.loader, self.name, self.lines, self.count = loader, name, lines, 0
        # Nodes under construction. An alias to one of them would be infinite.
        self.inside: set[int] = set()

    def build(self, node: yaml.Node, key: str) -> Any:
        self.count += 1
        if self.count > MAX_VALUES:
            raise self._bad(node, f"more than {MAX_VALUES:,} values", "a run spec is small: give the right file")
        self.lines[key] = node.start_mark.line + 1
        if isinstance(node, yaml.CollectionNode):
            return self._collection(node, key)
        value = node.value
        match node.tag.rpartition(":")[2]:
            case "null":
                return None
            case "bool":
                return value == "true"
            case "int" if len(value) > 40:
                raise self._bad(node, "a number of more than 40 digits", "write a smaller one")
            case "int":
                return int(value.replace("_", ""))
            case "float":
                return float(value.replace("_", ""))
            case "str":
                return value
        raise self._bad(node, f"the tag {node.tag} is not allowed", "use plain values")

    def _collection(self, node: yaml.CollectionNode, key: str) -> Any:
        if node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            raise self._bad(node, f"the tag {node.tag} is not allowed", "use plain values")
        if id(node) in self.inside:
            raise self._bad(node, f"{key} contains itself", "write the values out")
        self.inside.add(id(node))
        if isinstance(node, yaml.MappingNode):
            value: Any = self._mapping(node, key)
        else:
            value = [self.build(child, _join(key, str(i))) for i, child in enumerate(node.value)]
        self.inside.remove(id(node))
        return value

    def _mapping(self, node: yaml.MappingNode, key: str) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._bad(key_node, "a key must be plain text", "quote it")
            name = str(key_node.value)
            if name in out:
                raise self._bad(key_node, f"the key {_join(key, name)} is given twice", "keep one of the two")
            out[name] = self.build(value_node, _join(key, name))
            self.lines[_join(key, name)] = key_node.start_mark.line + 1
        return out

    def _bad(self, node: yaml.Node, what: str, fix: str) -> ArgosyError:
        return ArgosyError("config.bad-yaml", f"{self.name}, line {node.start_mark.line + 1}: {what}", fix=fix)


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
