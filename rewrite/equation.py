"""Reads equations such as `add(linear!(x, w), b) -> linear(x, w, b)`. The grammar, with its meaning in docs/patterns.md:

    equation  = choice "->" choice
    choice    = term { "|" term }
    term      = op [ "!" ] [ "{" attr { "," attr } "}" ] "(" [ arg { "," arg } ] ")"
              | name "@" term | name | "_" | number | "true" | "false" | "$" name | "(" choice ")"
    arg       = choice [ "?" ] | name "..."
    attr      = name | name "=" literal
    literal   = number | "true" | "false" | word | "[" [ integer { "," integer } ] "]"
    number    = [ "-" ] ( digits [ "." digits ] [ "e" exponent ] | "inf" )
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields

from ..diagnostics.errors import InvalidGraph
from ..graph.ops import OPS
from .pattern import (
    COMMUTATIVE,
    GROUPS,
    Argument,
    Bound,
    Either,
    Equation,
    Literal,
    Number,
    NumberLiteral,
    NumberVariable,
    Operation,
    Optional,
    Pattern,
    Rest,
    Variable,
    attribute_names,
    number_names,
    root_ops,
    value_names,
)

_TOKEN = re.compile(r"\s*(->|\.\.\.|-?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|inf\b)|[A-Za-z_]\w*|[@!?|$(){},=\[\]])")
_NUMBER = re.compile(r"-?(?:\d|inf$)")
_WORD = re.compile(r"[A-Za-z_]\w*$")


@dataclass
class _Reader:
    """Recursive descent over the tokens of one text."""

    text: str
    tokens: list[tuple[str, int]] = field(default_factory=list)
    at: int = 0

    def __post_init__(self) -> None:
        position, end = 0, len(self.text.rstrip())
        while position < end:
            found = _TOKEN.match(self.text, position)
            if found is None:
                raise self.error(f"cannot read {self.text[position:].strip()[:12]!r}", position)
            self.tokens.append((found.group(1), found.start(1)))
            position = found.end()

    def error(self, problem: str, position: int | None = None) -> InvalidGraph:
        if position is None:
            position = self.tokens[self.at][1] if self.at < len(self.tokens) else len(self.text)
        return InvalidGraph(f"pattern: {problem}, at column {position + 1} of {self.text!r}", hint="docs/patterns.md has the grammar")

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead][0] if self.at + ahead < len(self.tokens) else ""

    def take(self, expected: str = "") -> str:
        token = self.peek()
        if not token or (expected and token != expected):
            raise self.error(f"expected {expected or 'more'!r}, found {token or 'the end'!r}")
        self.at += 1
        return token

    def word(self) -> str:
        if not _WORD.match(self.peek()):
            raise self.error(f"expected a name, found {self.peek() or 'the end'!r}")
        return self.take()

    def choice(self) -> Pattern:
        options = [self.term()]
        while self.peek() == "|":
            self.take()
            options.append(self.term())
        return options[0] if len(options) == 1 else Either(tuple(options))

    def term(self) -> Pattern:
        token = self.peek()
        if token == "(":
            self.take()
            inner = self.choice()
            self.take(")")
            return inner
        if token == "$":
            self.take()
            return NumberVariable(self.word())
        if _NUMBER.match(token):
            return NumberLiteral(_number(self.take()))
        name = self.word()
        if name in ("true", "false"):
            return NumberLiteral(name == "true")
        if self.peek() == "@":
            self.take()
            return Bound(name, self.term())
        return self.operation(name) if self.peek() in ("(", "{", "!") else Variable(name)

    def operation(self, op: str) -> Operation:
        if op not in OPS and op not in GROUPS:
            raise self.error(f"there is no operation {op!r}")
        single_use = self.peek() == "!"
        if single_use:
            self.take()
        attrs, given = self.attributes() if self.peek() == "{" else (None, ())
        for member in GROUPS.get(op, (op,)):
            known = {f.name for f in fields(OPS[member].attrs)}
            for key, _ in given:
                if key not in known:
                    raise self.error(f"{member} has no attribute {key!r}")
        self.take("(")
        args: list[Argument] = []
        while self.peek() != ")":
            args.append(self.argument())
            if self.peek() != ")":
                self.take(",")
        self.take(")")
        self.check_operands(op, args)
        return Operation(op, tuple(args), attrs, given, single_use)

    def argument(self) -> Argument:
        if self.peek(1) == "...":
            name = self.word()
            self.take()
            return Rest(name)
        pattern = self.choice()
        if self.peek() == "?":
            self.take()
            return Optional(pattern)
        return pattern

    def check_operands(self, op: str, args: list[Argument]) -> None:
        kinds = [2 if isinstance(a, Rest) else 1 if isinstance(a, Optional) else 0 for a in args]
        if kinds != sorted(kinds) or kinds.count(2) > 1:
            raise self.error("operands that may be absent come last")
        low, high = kinds.count(0), 1 << 30 if 2 in kinds else len(kinds)
        for member in GROUPS.get(op, (op,)):
            least, most = OPS[member].arity
            if high < least or low > most:
                raise self.error(f"{member} takes {least} to {most} operands, not {len(args)}")
            if member in COMMUTATIVE and kinds != [0, 0]:
                raise self.error(f"both operands of {member} are needed")

    def attributes(self) -> tuple[str | None, tuple[tuple[str, Literal], ...]]:
        self.take("{")
        bound: str | None = None
        given: list[tuple[str, Literal]] = []
        while self.peek() != "}":
            name = self.word()
            if self.peek() == "=":
                self.take()
                given.append((name, self.literal()))
            elif bound is None:
                bound = name
            else:
                raise self.error(f"the attributes are bound to {bound!r} already")
            if self.peek() != "}":
                self.take(",")
        self.take("}")
        return bound, tuple(given)

    def literal(self) -> Literal:
        if self.peek() == "[":
            self.take()
            items: list[int] = []
            while self.peek() != "]":
                items.append(int(self.take()))
                if self.peek() != "]":
                    self.take(",")
            self.take("]")
            return tuple(items)
        if _NUMBER.match(self.peek()):
            return _number(self.take())
        word = self.word()
        return word == "true" if word in ("true", "false") else word


def _number(token: str) -> Number:
    return int(token) if re.fullmatch(r"-?\d+", token) else float(token)


def parse_pattern(text: str) -> Pattern:
    """The pattern written as `text`. Raises InvalidGraph naming the column of a mistake."""
    reader = _Reader(text)
    pattern = reader.choice()
    if reader.peek():
        raise reader.error(f"unexpected {reader.peek()!r}")
    return pattern


def parse_equation(text: str) -> Equation:
    """The equation written as `text`. Raises InvalidGraph for a mistake or for a name on the right that the left does not bind."""
    reader = _Reader(text)
    left = reader.choice()
    reader.take("->")
    right = reader.choice()
    if reader.peek():
        raise reader.error(f"unexpected {reader.peek()!r}")
    if not root_ops(left):
        raise reader.error("the left side must be an operation, not any value", 0)
    for found, known in ((value_names(right), value_names(left)), (number_names(right), number_names(left))):
        if found - known:
            raise reader.error(f"the left side does not bind {', '.join(sorted(found - known))}", 0)
    return Equation(left, right)


def unbound_attributes(equation: Equation) -> set[str]:
    """Attribute names that only the right side has: a rule with any needs a function that says what they are."""
    return attribute_names(equation.right) - attribute_names(equation.left)
