"""YAML files that are checked against pydantic models, with the line of every error."""

import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from paceline.errors import one_line, unknown
from paceline.validation import reworded, shown

_MOST_NODES, _DEEPEST, _LONGEST_INTEGER = 200_000, 40, 40
_MERGE, _INTEGER = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:int"
Location = tuple[str | int, ...]
"""Keys and indices that lead to a value."""
Model = TypeVar("Model", bound=BaseModel)


class LineError(Exception):
    """An error at a line, beginning with 1."""

    def __init__(self, line: int, message: str):
        super().__init__(message)
        self.line = line


class Document:
    """A YAML document whose values have line numbers."""

    def __init__(self, text: str):
        """Raise LineError if the text is no YAML, has a key twice, or is too large, also because of its aliases."""
        try:
            self._root = yaml.compose(text, yaml.SafeLoader)
            if self._root is not None:
                _check(self._root)
        except yaml.MarkedYAMLError as error:
            mark, message = error.problem_mark or error.context_mark, filter(None, (error.context, error.problem))
            text = one_line(Exception(" ".join(message)))
            raise LineError(mark.line + 1 if mark else 1, f"it is not valid YAML: {text}") from None
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise LineError(1, f"it is not valid YAML: {one_line(error)}") from None

    def validate(
        self, kind: type[Model], location: Location, convert: Callable[[Any], Any] = lambda values: values
    ) -> Model:
        """Return the values at a location as an instance of `kind`; `convert` is applied to them first. Raise
        LineError."""
        loader = yaml.SafeLoader("")
        try:
            values = loader.construct_document(self._root) if self._root else {}
        except Exception as error:
            # PyYAML raises various exceptions for malformed numbers and dates.
            mark = getattr(error, "problem_mark", None)
            raise LineError(mark.line + 1 if mark else 1, f"it is not valid YAML: {one_line(error)}") from None
        finally:
            loader.dispose()
        for part in location:
            values = values[part]
        try:
            return kind.model_validate({} if values is None else convert(values))
        except ValidationError as error:
            # A misspelled key is also a missing one.
            errors = sorted(error.errors(include_url=False), key=lambda each: each["type"] == "missing")
            raise self.error((*location, *errors[0]["loc"]), _message(errors, kind)) from None

    def error(self, location: Location, message: str) -> LineError:
        """Return an error at the line of the value at a location, or of the section that lacks it."""
        node = self._root
        line = node.start_mark.line if node else 0
        for part in location:
            if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line
                continue
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            key, node = next(((key, item) for key, item in pairs if key.value == str(part)), (None, None))
            if key is None:
                break
            line = key.start_mark.line
        return LineError(line + 1, message)


def _check(root: yaml.Node) -> None:
    """Raise YAMLError for a key that occurs twice, for huge numbers, and for aliases that make a short text large."""
    count = 0

    def walk(node: yaml.Node, depth: int) -> None:
        nonlocal count
        count += 1
        if count > _MOST_NODES or depth > _DEEPEST:
            raise yaml.YAMLError(f"it has more than {_MOST_NODES} values or {_DEEPEST} levels")
        if node.tag == _INTEGER and len(str(node.value)) > _LONGEST_INTEGER:
            problem = f"a number has more than {_LONGEST_INTEGER} digits"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                walk(item, depth + 1)
        elif isinstance(node, yaml.MappingNode):
            seen = dict[str, yaml.Node]()
            for key, item in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                    before = seen.setdefault(key.value, item)
                    # Files of others repeat a key with the same value.
                    if before is not item and not (isinstance(item, yaml.ScalarNode) and item.value == before.value):
                        problem = f"the key {shown(key.value)} occurs twice; remove one"
                        raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                walk(key, depth + 1)
                walk(item, depth + 1)

    walk(root, 0)


def _message(errors: list[Any], kind: type[BaseModel]) -> str:
    """Return the message of the first error: the key, its value and what is allowed."""
    first, location = errors[0], errors[0]["loc"]
    section = _section(location, kind)
    match first["type"]:
        case "extra_forbidden":
            return str(unknown(f"key of {section.__name__.lower()}", str(location[-1]), section.model_fields))
        case "missing":
            return f"the {section.__name__.lower()} has no {location[-1]}; add it"
        case "string_pattern_mismatch":
            allowed = "must begin with a letter, end with a letter or digit and have only letters, digits, _ and -"
        case _:
            same = [each for each in errors if shown(each["input"]) == shown(first["input"])]
            allowed = " or ".join(dict.fromkeys(reworded(each["msg"]) for each in same))
            allowed = re.sub(r" or instance of \w+", "", allowed)
    name = ".".join(str(part) for part in location if part != "[key]") or kind.__name__.lower()
    return f"{name[:200]} {shown(first['input'])} {allowed[:300]}"


def _section(location: Location, kind: type[BaseModel]) -> type[BaseModel]:
    """Return the innermost section that holds the value at a location."""
    for part in location[:-1]:
        field = kind.model_fields.get(str(part))
        kind = next(_sections_in(field.annotation), kind) if field else kind
    return kind


def _sections_in(hint: Any) -> Iterator[type[BaseModel]]:
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        yield hint
    for inner in get_args(hint):
        yield from _sections_in(inner)
