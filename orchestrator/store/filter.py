"""The filter language of `ls`: text in, one SQL condition with parameters out.

    status:failed branch:ddtree loss<2.1 since:7d host:pve* tag:x
    (status:failed OR status:lost) AND NOT recipe:smoke* train.num_steps>=1000

Terms side by side must all hold. `OR` is weaker than side by side, `NOT` stronger. A pattern takes
`*` and `?`, alternatives are separated by commas, words with blanks are quoted. `name<number` looks
at the mean of a metric's newest 100 reports (`"any name"<2` where it holds a dot or a blank), `dotted.path=value`
at the resolved spec (`settings.lr<0.2` also where a script's setting is text), a bare word searches.
It runs nothing and knows no connection; `reads` puts the condition behind `FROM runs AS r`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from orchestrator.errors import UsageError
from orchestrator.nearest import nearest
from orchestrator.store.queries import HAS_REPORT, run_mean
from orchestrator.store.rows import Kind, State

Value = str | float | int

MAX_TERMS = 200  # words and alternatives; SQLite refuses expressions deeper than 1,000
MAX_DEPTH = 8  # of NOT and brackets; its parser overflows after 10 of `(y OR z a (...`
LONGEST_WORD = 1000  # characters; its patterns end at 50,000 bytes

LONGEST_SHOWN = 120

_TOKEN = re.compile(r"""\s*(?:(?P<open>\()|(?P<close>\))|(?P<word>(?:"[^"]*"|[^\s()"])+))""")
_TERM = re.compile(r"^(?P<name>[^:<>=!\s]+?)(?P<operator><=|>=|!=|<|>|=|:)(?P<value>.*)$", re.DOTALL)
_QUOTED_METRIC = re.compile(r'^"(?P<name>[^"]*)"(?P<operator><=|>=|!=|<|>|=)(?P<value>.+)$', re.DOTALL)
_AGE = re.compile(r"^(\d+(?:\.\d+)?)(s|m|h|d|w)$")
_AGE_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class FilterError(UsageError):
    """A filter that cannot be read; the message shows the place, what is due, and the nearest name."""

    reason = "filter"


@dataclass(frozen=True)
class Condition:
    """SQL over the alias `r` of table runs, with its positional parameters."""

    sql: str
    parameters: tuple[Value, ...] = ()


EVERYTHING = Condition("1")


def compile_filter(text: str, *, now_s: float) -> Condition:
    """The condition for `text`; an empty text means every run. Raises FilterError."""
    tokens = _tokens(text)
    if not tokens:
        return EVERYTHING
    _check_size(text, tokens)
    condition, rest = _Parser(text, now_s).any_of(tokens)
    if rest:
        raise _error(text, rest[0], "a closing bracket without its opening one")
    return condition


def check_tags(tags: Iterable[str]) -> None:
    """Raises UsageError for one that no filter could find."""
    unfit = [word for word in tags if not word or any(mark.isspace() or mark in ",()" for mark in word)]
    if unfit:
        raise UsageError(f"tag {unfit[0]!r}: a tag is one word without commas and brackets")


def named(text: str) -> list[tuple[str, str, str]]:
    """(name, operator, value) of every term that names something, in order; for a word on what nothing has."""
    found = [_TERM.match(token.text) for token in _tokens(text) if token.kind == "word"]
    return [(_unquote(term["name"]), term["operator"], _unquote(term["value"])) for term in found if term is not None]


@dataclass(frozen=True)
class _Token:
    kind: str  # open, close, word
    text: str
    start: int


def _tokens(text: str) -> list[_Token]:
    tokens, position = [], 0
    end = len(text.rstrip())
    while position < end:
        found = _TOKEN.match(text, position)
        if found is None:
            raise FilterError(
                f'filter {text!r}: the quotation mark at column {position + 1} is never closed; write name:"two words"'
            )
        kind = found.lastgroup or "word"
        tokens.append(_Token(kind, found.group(kind), found.start(kind)))
        position = found.end()
    return tokens


def _check_size(text: str, tokens: list[_Token]) -> None:
    """Raises FilterError where SQLite would refuse what is made of it, in words that name no place."""
    num_terms, num_nots, brackets = 0, 0, [0]  # NOTs before each bracket that is open here
    for token in tokens:
        if len(token.text) > LONGEST_WORD:
            raise _error(text, token, f"has {len(token.text):,} characters; at most {LONGEST_WORD:,} are read")
        num_terms += 1 + token.text.count(",")
        if num_terms > MAX_TERMS:
            raise _error(text, token, f"is beyond the {MAX_TERMS} words and alternatives that are read")
        is_not = _is_word(token, "NOT")
        if token.kind == "open":
            brackets.append(num_nots + 1)
        elif token.kind == "close":
            brackets = brackets[:-1] or [0]
        num_nots = num_nots + 1 if is_not else 0
        if sum(brackets) + num_nots > MAX_DEPTH:
            raise _error(text, token, f"is nested in more than {MAX_DEPTH} NOTs and brackets")


def _error(text: str, token: _Token, message: str) -> FilterError:
    return FilterError(f"filter {_cut(text)}, column {token.start + 1}, {_cut(token.text)}: {message}")


def _cut(text: str) -> str:
    return repr(text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}...")


@dataclass(frozen=True)
class _Parser:
    """Recursive descent; every method takes the tokens left and returns a condition and what is left then."""

    text: str
    now_s: float

    def any_of(self, tokens: list[_Token]) -> tuple[Condition, list[_Token]]:
        condition, rest = self.all_of(tokens)
        parts = [condition]
        while rest and _is_word(rest[0], "OR"):
            condition, rest = self.all_of(rest[1:], after=rest[0])
            parts.append(condition)
        return _join(parts, " OR "), rest

    def all_of(self, tokens: list[_Token], after: _Token | None = None) -> tuple[Condition, list[_Token]]:
        condition, rest = self.negated(tokens, after)
        parts = [condition]
        while rest and rest[0].kind != "close" and not _is_word(rest[0], "OR"):
            word = rest[0]
            if _is_word(word, "AND"):
                condition, rest = self.negated(rest[1:], word)
            else:
                condition, rest = self.negated(rest, None)
            parts.append(condition)
        return _join(parts, " AND "), rest

    def negated(self, tokens: list[_Token], after: _Token | None) -> tuple[Condition, list[_Token]]:
        if not tokens:
            where = after or _Token("word", "", len(self.text))
            raise _error(self.text, where, "a term is due after it, such as status:failed")
        first = tokens[0]
        if _is_word(first, "NOT"):
            condition, rest = self.negated(tokens[1:], first)
            return Condition(f"NOT coalesce({condition.sql}, 0)", condition.parameters), rest
        if first.kind == "open":
            condition, rest = self.any_of(tokens[1:]) if tokens[1:] else self.negated([], first)
            if not rest:
                raise _error(self.text, first, "this bracket is never closed")
            return condition, rest[1:]
        if first.kind == "close" or _is_word(first, "AND") or _is_word(first, "OR"):
            raise _error(self.text, first, "a term is due here, such as status:failed")
        return self.term(first), tokens[1:]

    def term(self, token: _Token) -> Condition:
        try:
            return _term(token.text, self.now_s)
        except ValueError as error:
            raise _error(self.text, token, str(error)) from error


def _is_word(token: _Token, word: str) -> bool:
    return token.kind == "word" and token.text == word


def _join(parts: list[Condition], word: str) -> Condition:
    if len(parts) == 1:
        return parts[0]
    sql = "(" + word.join(part.sql for part in parts) + ")"
    return Condition(sql, tuple(value for part in parts for value in part.parameters))


def _term(text: str, now_s: float) -> Condition:
    quoted = _QUOTED_METRIC.match(text)
    if quoted is not None:
        return _metric(quoted["name"], quoted["operator"], _unquote(quoted["value"]))
    found = None if text.startswith('"') else _TERM.match(text)
    if found is None:
        return _search(_unquote(text))
    name, operator, value = _unquote(found["name"]), found["operator"], _unquote(found["value"])
    if not value:
        raise ValueError(f"a value is due after {operator!r}")
    if operator == ":":
        return _field(name, value, now_s)
    if name in FIELDS and operator in ("=", "!="):
        condition = _field(name, value, now_s)
        return condition if operator == "=" else Condition(f"NOT coalesce({condition.sql}, 0)", condition.parameters)
    if name in _NUMBERS:
        return Condition(f"{_NUMBERS[name]} {operator} ?", (_number(value),))
    if "." in name:
        return _spec_value(name, operator, value)
    return _metric(name, operator, value)


def _unquote(text: str) -> str:
    return text.replace('"', "")


def _search(word: str) -> Condition:
    """A bare word: start of the id, or part of recipe/branch, host, note or a tag, in any case."""
    places = "r.recipe || '/' || r.branch || ' ' || r.host || ' ' || r.note"
    sql = (
        f"(r.id GLOB ? OR instr(lower({places}), lower(?))"
        " OR EXISTS (SELECT 1 FROM tags WHERE run_key = r.key AND instr(lower(tag), lower(?))))"
    )
    return Condition(sql, (_glob(word) + "*", word, word))


def _glob(pattern: str) -> str:
    """Only * and ? are wild; a bracket is itself."""
    return pattern.replace("[", "[[]")


def _alternatives(expression: str, value: str) -> Condition:
    patterns = [_glob(item) for item in value.split(",") if item]
    if not patterns:
        raise ValueError("a value is due between the commas")
    return Condition("(" + " OR ".join(f"{expression} GLOB ?" for _ in patterns) + ")", tuple(patterns))


def _one_of(expression: str, value: str, known: list[str]) -> Condition:
    for item in value.split(","):
        if not any(mark in item for mark in "*?") and item not in known:
            raise ValueError(f"{item!r} is not one of {', '.join(known)}{_nearest(item, known)}")
    return _alternatives(expression, value)


def _nearest(word: str, known: list[str]) -> str:
    close = nearest(word, known)
    return f"; did you mean {close!r}?" if close else ""


def _reason(value: str) -> Condition:
    """`reason:exit` also means exit:3."""
    plain = _alternatives("r.reason", value)
    numbered = _alternatives("r.reason", ",".join(f"{item}:*" for item in value.split(",") if item))
    return Condition(f"({plain.sql} OR {numbered.sql})", plain.parameters + numbered.parameters)


def _tag(value: str) -> Condition:
    inner = _alternatives("tag", value)
    return Condition(f"EXISTS (SELECT 1 FROM tags WHERE run_key = r.key AND {inner.sql})", inner.parameters)


def _host(value: str) -> Condition:
    """Any of its hosts, where a run has several."""
    first, further = _alternatives("r.host", value), _alternatives("host", value)
    sql = f"({first.sql} OR EXISTS (SELECT 1 FROM nodes WHERE run_key = r.key AND {further.sql}))"
    return Condition(sql, first.parameters + further.parameters)


def point_in_time_s(value: str, *, now_s: float) -> float:
    """`7d` or `90m` before now, a date (UTC) or an RFC 3339 time, as seconds since the epoch. Raises ValueError."""
    age = _AGE.match(value)
    if age is not None:
        return now_s - float(age[1]) * _AGE_UNIT_S[age[2]]
    try:
        moment = datetime.fromisoformat(value)
    except ValueError as error:
        raise ValueError(f"{value!r} is not a time; write an age (10m, 24h, 7d, 2w) or a date (2026-01-31)") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


_STATES = [state.value for state in State]
_KINDS = [kind.value for kind in Kind]

FIELDS: dict[str, Callable[[str, float], Condition]] = {
    "status": lambda value, _: _one_of("r.state", value, _STATES),
    "state": lambda value, _: _one_of("r.state", value, _STATES),
    "reason": lambda value, _: _reason(value),
    "kind": lambda value, _: _one_of("r.kind", value, _KINDS),
    "id": lambda value, _: _alternatives("r.id", value),
    "recipe": lambda value, _: _alternatives("r.recipe", value),
    "branch": lambda value, _: _alternatives("r.branch", value),
    "host": lambda value, _: _host(value),
    "note": lambda value, _: Condition("instr(lower(r.note), lower(?))", (value,)),
    "tag": lambda value, _: _tag(value),
    "tree": lambda value, _: _alternatives("r.tree_hash", value + "*"),
    "commit": lambda value, _: _alternatives("r.git_commit", value + "*"),
    "since": lambda value, now_s: Condition("r.created_s >= ?", (point_in_time_s(value, now_s=now_s),)),
    "until": lambda value, now_s: Condition("r.created_s < ?", (point_in_time_s(value, now_s=now_s),)),
}

_NUMBERS = {"step": "r.step", "attempt": "r.attempt", "num_steps": "r.num_steps"}


def _field(name: str, value: str, now_s: float) -> Condition:
    make = FIELDS.get(name)
    if make is None:
        known = sorted(FIELDS)
        raise ValueError(
            f"{name!r} is not a field; known are {', '.join(known)}{_nearest(name, known)} "
            f"(a metric is compared: {name}<2.1)"
        )
    return make(value, now_s)


def _number(value: str) -> float:
    try:
        return float(value.replace("_", ""))
    except ValueError as error:
        raise ValueError(f"{value!r} is not a number") from error


def _metric(name: str, operator: str, value: str) -> Condition:
    number = _number(value)
    if not math.isnan(number):
        return Condition(f"{run_mean(name)} {operator} ?", (name, name, number))
    if operator not in ("=", "!="):
        raise ValueError("nan is neither larger nor smaller than a number; write = or !=")
    is_null = "IS NULL" if operator == "=" else "IS NOT NULL"
    return Condition(f"({HAS_REPORT} AND {run_mean(name)} {is_null})", (name, name, name))


# The value `v` of the spec as a number; NULL for what is none. What a script is told is text, "0.5" too.
_AS_NUMBER = """
    CASE WHEN typeof(v) IN ('integer', 'real') THEN v
        WHEN json_valid(v) THEN CASE WHEN json_type(v) IN ('integer', 'real') THEN CAST(v AS REAL) END END"""


def _spec_value(path: str, operator: str, value: str) -> Condition:
    """A value of the resolved spec: as numbers where both are numbers, true and false as such, all else as a pattern."""
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", path):
        raise ValueError(f"{path!r} is not a path into the spec, such as optim.lr")
    negation = "NOT " if operator == "!=" else ""
    if operator not in ("=", "!="):
        test = Condition(f"{_AS_NUMBER} {operator} ?", (_number(value),))
    elif value in ("true", "false"):
        test = Condition(f"{negation}v IN (?, ?)", (int(value == "true"), value))
    else:
        test = Condition(f"{negation}coalesce({_AS_NUMBER} = ?, v GLOB ?)", (_number_if_any(value), _glob(value)))
    found = "SELECT json_extract(text, ?) AS v FROM documents WHERE run_key = r.key AND name = 'spec'"
    return Condition(f"EXISTS (SELECT 1 FROM ({found}) WHERE {test.sql})", (f"$.{path}", *test.parameters))


def _number_if_any(value: str) -> float:
    """nan, which SQLite takes for NULL and which equals nothing, for a word that is no number."""
    try:
        return _number(value)
    except ValueError:
        return math.nan
