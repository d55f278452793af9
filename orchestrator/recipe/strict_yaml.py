"""YAML read strictly: 1.2 core scalars, no duplicate keys, bounded aliases, a position for every value.

Only text may be a key, only the core tags are known, one document a file, UTF-8 with LF line ends.
All faults of a text are collected where the grammar allows to read on. It knows nothing of recipes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from orchestrator.recipe.yaml_text import (
    BOOL_WORDS,
    FLOAT_WORDS,
    INT_WORDS,
    LONGEST_NUMBER,
    NULL_WORDS,
    Document,
    Fault,
    Path,
    Position,
    YamlFaults,
    check_characters,
    decode,
    fault,
    scalar,
)

__all__ = ["Document", "Fault", "Path", "Position", "YamlFaults", "dump", "dump_flow", "parse", "scalar"]

MAX_DEPTH = 64  # the C parser recurses; a deeper text would end the process, not raise
MAX_TABS = 20  # told; the text is read anew behind each
MAX_VALUES = 100_000  # after every alias is written out

STR, INT, FLOAT = "tag:yaml.org,2002:str", "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
BOOL, NULL, MERGE = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:null", "tag:yaml.org,2002:merge"
MAP, SEQ = "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"


def parse(content: bytes | str, file: str = "<text>") -> Document:
    """Raises YamlFaults."""
    text = content if isinstance(content, str) else decode(content, file)
    check_characters(text, file)
    faults: list[Fault] = []
    node = _compose(text, file, faults)
    if node is None:
        if faults:
            raise YamlFaults(faults)
        return Document(file, None)
    reader = _Reader(file, faults)
    reader.check_size(node)
    value = reader.read(node, ())
    if faults:
        raise YamlFaults(sorted(faults, key=lambda fault: (fault.position.line, fault.position.column)))
    return Document(file, value, reader.values, reader.keys)


def dump(value: Any) -> str:
    """Text that `parse` reads back as `value`: maps with text keys, lists, numbers, texts, null."""
    text: str = yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text.removesuffix("...\n")


def dump_flow(value: Any) -> str:
    """The same on one line, every text in quotes."""
    quoted = '"' if isinstance(value, str) else None
    text: str = yaml.dump(
        value, Dumper=Dumper, sort_keys=False, width=10**9, default_flow_style=True, default_style=quoted
    )
    return text.removesuffix("...\n").strip()


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


class Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: Dumper, text: str) -> yaml.ScalarNode:
    """Line breaks of other alphabets survive only as escapes, and escapes need double quotes."""
    style = '"' if re.search("[\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar(STR, text, style=style)


Dumper.add_representer(str, _represent_text)


for _resolver in (Loader, Dumper):
    _resolver.add_implicit_resolver(BOOL, BOOL_WORDS, list("tTfF"))
    _resolver.add_implicit_resolver(NULL, NULL_WORDS, ["~", "n", "N", ""])
    _resolver.add_implicit_resolver(INT, INT_WORDS, list("-+0123456789"))
    _resolver.add_implicit_resolver(FLOAT, FLOAT_WORDS, list("-+.0123456789"))
    _resolver.add_implicit_resolver(MERGE, re.compile(r"<<\Z"), ["<"])


def _compose(text: str, file: str, faults: list[Fault]) -> yaml.Node | None:
    """The node tree, or None for an empty text. Reads on past MAX_TABS tabs; any other grammar fault ends it."""
    while True:
        try:
            _check_depth(text, file)
            loader = Loader(text)
            try:
                node = loader.get_single_node()
            finally:
                loader.dispose()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
            blanked = _blank_tab(text, line, column)
            message = ": ".join(part for part in (error.context, error.problem) if part)
            is_last = blanked is None or len(faults) + 1 >= MAX_TABS
            if blanked is not None:
                message = "a tab cannot indent; use spaces" + (", in the lines below as well" if is_last else "")
            faults.append(Fault(Position(file, line, column), "", message))
            if blanked is None or is_last:
                raise YamlFaults(faults) from error
            text = blanked
        else:
            assert node is None or isinstance(node, yaml.Node)
            return node


def _blank_tab(text: str, line: int, column: int) -> str | None:
    """The text with the tabs before that line's first word as blanks; None if no tab stands there."""
    lines = text.split("\n")
    row = lines[line - 1] if line <= len(lines) else ""
    if row[column - 1 : column] != "\t" or row[: column - 1].strip():
        return None
    body = row.lstrip()
    lines[line - 1] = row[: len(row) - len(body)].replace("\t", "  ") + body
    return "\n".join(lines)


def _check_depth(text: str, file: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        mark = event.start_mark
        if depth > MAX_DEPTH and mark is not None:
            raise fault(file, mark.line + 1, mark.column + 1, f"nested deeper than {MAX_DEPTH} levels")


_Pairs = dict[str, tuple[yaml.Node, yaml.Node]]


class _Reader:
    """Turns nodes into values, remembering positions and collecting faults."""

    def __init__(self, file: str, faults: list[Fault]) -> None:
        self.file, self.faults = file, faults
        self.values: dict[Path, Position] = {}
        self.keys: dict[Path, Position] = {}
        self.pairs_of: dict[int, _Pairs] = {}

    def at(self, node: yaml.Node) -> Position:
        return Position(self.file, node.start_mark.line + 1, node.start_mark.column + 1)

    def report(self, node: yaml.Node, path: Path, message: str) -> None:
        self.faults.append(Fault(self.at(node), ".".join(map(str, path)), message))

    def check_size(self, root: yaml.Node) -> None:
        """Refuses an alias inside what it names, and texts that grow too large or deep when aliases are written out."""
        sizes: dict[int, tuple[int, int]] = {}  # values, levels
        open_nodes: set[int] = set()

        def size(node: yaml.Node) -> tuple[int, int]:
            if id(node) in open_nodes:
                raise self.refusal(node, "an alias refers to what contains it")
            if id(node) not in sizes:
                open_nodes.add(id(node))
                below = [size(child) for child in _children(node)]
                num_levels = max((levels for _, levels in below), default=0) + isinstance(node, yaml.CollectionNode)
                if num_levels > MAX_DEPTH:
                    raise self.refusal(node, f"aliases nest deeper than {MAX_DEPTH} levels")
                sizes[id(node)] = 1 + sum(num for num, _ in below), num_levels
                open_nodes.discard(id(node))
            return sizes[id(node)]

        if size(root)[0] > MAX_VALUES:
            raise self.refusal(root, f"aliases expand to more than {MAX_VALUES} values")

    def refusal(self, node: yaml.Node, message: str) -> YamlFaults:
        return YamlFaults([*self.faults, Fault(self.at(node), "", message)])

    def read(self, node: yaml.Node, path: Path) -> Any:
        self.values[path] = self.at(node)
        match node:
            case yaml.MappingNode(tag=tag) if tag == MAP:
                return self.read_map(node, path)
            case yaml.SequenceNode(tag=tag) if tag == SEQ:
                return [self.read(child, (*path, index)) for index, child in enumerate(node.value)]
            case yaml.ScalarNode(tag=tag) if tag in (STR, MERGE):
                return node.value
            case yaml.ScalarNode(tag=tag) if tag in (INT, FLOAT, BOOL, NULL):
                return self.read_scalar(node, path)
        self.report(node, path, f"the tag {node.tag} is not known; leave it out")
        return None

    def read_scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        if len(node.value) > LONGEST_NUMBER:
            self.report(node, path, f"a number of {len(node.value):,} characters; no field takes one")
            return None
        value = scalar(node.value)
        if isinstance(value, str) or (node.tag == INT and isinstance(value, float)):
            self.report(node, path, f"{node.value!r} is not of the type its tag {node.tag} names")
            return None
        return float(value) if node.tag == FLOAT and isinstance(value, int) else value

    def read_map(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        result = {}
        for key, (key_node, value_node) in self.pairs(node, path).items():
            self.keys[(*path, key)] = self.at(key_node)
            result[key] = self.read(value_node, (*path, key))
        return result

    def pairs(self, node: yaml.MappingNode, path: Path) -> _Pairs:
        """The nodes of each key. Merged keys (`<<`) give way to the map's own; of several merged maps the first wins.

        Looked up once a node: maps that merge each other in turn would else be gone through again at every turn.
        """
        if id(node) not in self.pairs_of:
            own: _Pairs = {}
            for key_node, value_node in node.value:
                key = key_node.value
                if key_node.tag not in (STR, MERGE) or not isinstance(key, str):
                    shown = f"; write '\"{key}\"'" if isinstance(key, str) else ""
                    self.report(key_node, path, f"a key must be text{shown}")
                elif key in own:
                    line = own[key][0].start_mark.line + 1
                    self.report(key_node, (*path, key), f"duplicate key (first given at line {line})")
                else:
                    own[key] = key_node, value_node
            self.pairs_of[id(node)] = self.with_merged(own, path)
        return self.pairs_of[id(node)]

    def with_merged(self, own: _Pairs, path: Path) -> _Pairs:
        if "<<" not in own or own["<<"][0].tag != MERGE:
            return own
        _, value_node = own.pop("<<")
        merged: _Pairs = {}
        for source in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
            if not isinstance(source, yaml.MappingNode):
                self.report(source, (*path, "<<"), "only maps can be merged")
                continue
            for key, pair in self.pairs(source, path).items():
                if key in own or key in merged:  # nobody will see it, but a fault in it is a fault
                    _Reader(self.file, self.faults).read(pair[1], (*path, key))
                else:
                    merged[key] = pair
        return merged | own


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from (key, value)
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value
