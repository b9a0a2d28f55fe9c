"""YAML files that are checked against pydantic models, with the line of every error."""

import re
from collections.abc import Callable, Iterator
from datetime import date
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from paceline.errors import one_line, unknown
from paceline.validation import reworded, shown

_MOST_NODES, _DEEPEST, _LONGEST_INTEGER = 200_000, 40, 40
_MERGE, _INTEGER = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:int"
_SURROGATE = re.compile("[\ud800-\udfff]")
# Parts of PyYAML's messages, and what the user can do.
_REMEDIES = {
    r"character '\t'": "indent with spaces, not with tabs",
    "mapping values are not allowed": 'put a text that contains ": " in quotes, or correct the indentation',
    "could not find expected ':'": "correct the indentation, or write NAME: VALUE",
    "expected <block end>": "correct the indentation: keys of one section begin in the same column",
    "expected ',' or ']'": "close the list with ]",
    "expected ',' or '}'": "close the mapping with }",
    "unexpected end of stream": "close the quotes",
    "cannot start any token": "put the text in quotes",
    "undefined alias": "put a text that begins with * in quotes",
    "expected alphabetic or numeric character": "put a text that begins with * or & in quotes",
    "unhashable key": "put a text that begins with { or [ in quotes",
    "constructor for the tag": "remove the tag that begins with !",
}
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
        self._text = text
        try:
            self._root = yaml.compose(text, yaml.SafeLoader)
            if self._root is not None:
                _check(self._root)
        except yaml.reader.ReaderError as error:
            character = chr(error.character) if isinstance(error.character, int) else error.character
            message = f"the character {shown(character)} is not allowed in YAML; remove it"
            raise LineError(self._line(error.position), message) from None
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise self._yaml_error(error) from None

    def values(self) -> Any:
        """Return the plain values of the document: dicts, lists, strings, numbers and dates. Raise LineError."""
        loader = yaml.SafeLoader("")
        try:
            return loader.construct_document(self._root) if self._root else None
        except Exception as error:
            # PyYAML raises various exceptions for malformed numbers and dates.
            raise self._yaml_error(error) from None
        finally:
            loader.dispose()

    def validate(
        self, kind: type[Model], location: Location, convert: Callable[[Any], Any] = lambda values: values
    ) -> Model:
        """Return the values at a location as an instance of `kind`; `convert` is applied to them first. Raise
        LineError."""
        values = self.values()
        for part in location:
            if not isinstance(values, dict) or part not in values:
                raise self.error((), f"it has no section {part}")
            values = values[part]
        try:
            return kind.model_validate({} if values is None else convert(values))
        except ValidationError as error:
            # A misspelled key is also a missing one.
            errors = sorted(error.errors(include_url=False), key=lambda each: each["type"] == "missing")
            raise self.error((*location, *errors[0]["loc"]), _message(errors, kind, values)) from None

    def error(self, location: Location, message: str) -> LineError:
        """Return an error at the line of the value at a location, or of the section that lacks it."""
        node = self._root
        index = node.start_mark.index if node else 0
        for part in location:
            if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                index = node.start_mark.index
                continue
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            key, node = next(((key, item) for key, item in pairs if key.value == str(part)), (None, None))
            if key is None:
                break
            index = key.start_mark.index
        return LineError(self._line(index), message)

    def _line(self, index: int) -> int:
        """Return the line of a character. For PyYAML, characters such as U+2028 end a line as well."""
        return self._text.count("\n", 0, index) + 1

    def _yaml_error(self, error: Exception) -> LineError:
        marked = error if isinstance(error, yaml.MarkedYAMLError) else yaml.MarkedYAMLError(problem=one_line(error))
        if isinstance(error, RecursionError):
            marked.problem = f"it has more than {_DEEPEST} levels"
        mark = marked.problem_mark or marked.context_mark
        problem = one_line(Exception(marked.problem or marked.context))
        remedy = next((f"; {text}" for part, text in _REMEDIES.items() if part in problem), "")
        return LineError(self._line(mark.index) if mark else 1, f"it is not valid YAML: {problem}{remedy}")


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
        if isinstance(node, yaml.ScalarNode) and _SURROGATE.search(node.value):
            try:
                # JSON writes a character as two escapes.
                node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16")
            except UnicodeError:
                problem = r"an escape such as \ud83d is half of a character"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None
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


def _message(errors: list[Any], kind: type[BaseModel], values: Any) -> str:
    """Return the message of the first error: the key, its value and what is allowed."""
    first, location = errors[0], errors[0]["loc"]
    section = _section(location, kind)
    item, inner = _named_item(location, values)
    match first["type"]:
        case "extra_forbidden":
            return str(unknown(f"key of {section.__name__.lower()}", str(location[-1]), section.model_fields))
        case "missing":
            return f"{item}the {section.__name__.lower()} has no {location[-1]}; add it"
        case "string_pattern_mismatch":
            allowed = "must begin with a letter, end with a letter or digit and have only letters, digits, _ and -"
        case _:
            same = [each for each in errors if shown(each["input"]) == shown(first["input"])]
            allowed = " or ".join(dict.fromkeys(reworded(each["msg"]) for each in same))
            allowed = re.sub(r" or instance of \w+|, unable to parse string as an? \w+", "", allowed)
            allowed = re.sub(r"^must be a list$", "must be a list such as [a, b]", allowed)
    name = ".".join(str(part) for part in inner if part != "[key]") or kind.__name__.lower()
    name = name if name.isprintable() else shown(name)
    value = first["input"]
    if allowed == "must be a string" and isinstance(value, (bool, date)):
        allowed = "must be a string; put it in quotes"
    given = "has no value: it" if value is None else str(value) if isinstance(value, date) else shown(value)
    return f"{item}{name[:200]} {given} {allowed[:300]}"


def _named_item(location: Location, values: Any) -> tuple[str, Location]:
    """Return the innermost item of a list that has a name, such as "task train: ", and the location inside of it."""
    item, inner = "", location
    for index, part in enumerate(location[:-1]):
        try:
            values = values[part]
            name = values["name"]
        except (KeyError, IndexError, TypeError):
            continue
        if isinstance(part, int) and isinstance(name, str) and name.isprintable():
            item, inner = f"{str(location[index - 1]).removesuffix('s')} {name[:100]}: ", location[index + 1 :]
    return item, inner


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
