"""Render the Jinja template of a workflow file.

A template comes from a file that someone else may have written. It is rendered by Jinja's sandbox in a separate process
with limits of memory and time, so that it can neither run code nor stop the command line from answering.
"""

import json
import pickle
import re
import resource
import subprocess
import sys
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from paceline.errors import UserError, one_line, unknown

TOKEN = re.compile(r"\{\{ *(workflow_id|output|input:[\w.-]+|host:[\w.-]+) *\}\}")
"""Values that the engine replaces when it starts a task."""
LARGEST_TEXT = 2**20
"""Largest size of a rendered template, in characters."""
_CPU_SECONDS, _WALL_SECONDS, _MEMORY_BYTES = 1, 60.0, 2**30
# Characters of Unicode's private use area.
_TOKEN_MARKS, _LINE_MARKS = "\ue000\ue001", "\ue002\ue003"
RESERVED = re.compile(f"[{_TOKEN_MARKS}{_LINE_MARKS}]")
"""Characters that a template and its values must not contain."""
_TAG = re.compile(r"\{[{%#]")
# In a template, a token with a space in front is an expression of Jinja, as it is for OSMO.
_TEMPLATE_TOKEN = re.compile(r"\{\{(workflow_id|output|(?:input|host):[^}\n]+)\}\}")
# As OSMO does, the template is rendered with a variable in place of each token.
_VARIABLE = re.compile(r"\{\{(paceline_token_[0-9]+)\}\}")
_IN_STRING = """, where it is no token; write "{{" ~ "host:NAME}}" to make one"""
_PROTECTION = rf"{_TOKEN_MARKS[0]}\1{_TOKEN_MARKS[1]}"
_PROTECTED = re.compile(f"{_TOKEN_MARKS[0]}(.*?){_TOKEN_MARKS[1]}")
_LINE = re.compile(f"{_LINE_MARKS[0]}([0-9]+){_LINE_MARKS[1]}")


@dataclass(frozen=True)
class Rendered:
    text: str
    """The text in which the engine's tokens are still protected, see `restore`."""
    lines: list[int]
    """Line of the template from which each line of `text` was made, beginning with 1."""


def render(template: str, values: dict[str, Any], source: str, first_line: int = 1) -> Rendered:
    """Render a template whose first line is line `first_line` of the file `source`. Raise UserError if the template is
    invalid, uses an undefined variable, or needs too much time or memory."""
    if not _TAG.search(_TEMPLATE_TOKEN.sub("", template)):
        text = _TEMPLATE_TOKEN.sub(_PROTECTION, template)
        return Rendered(text, list(range(first_line, first_line + text.count("\n") + 1)))
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "paceline.launch.template"],
            # JSON has no mappings whose keys are numbers.
            input=pickle.dumps({"template": template, "values": values, "first_line": first_line}),
            capture_output=True,
            timeout=_WALL_SECONDS,
            check=False,
        )
        answer = json.loads(done.stdout) if done.returncode == 0 else {"error": "limit", "line": 0, "message": ""}
    except (subprocess.TimeoutExpired, ValueError):
        answer = {"error": "limit", "line": 0, "message": ""}
    if "error" not in answer:
        return Rendered(answer["text"], answer["lines"])
    place = f"{source}:{answer['line']}" if answer["line"] else source
    match answer["error"]:
        case "undefined":
            raise UserError(f"{place}: {_undefined(answer['message'], values, template)}")
        case "limit":
            raise UserError(
                f"{place}: the template needs more than {_CPU_SECONDS} s, {_MEMORY_BYTES // 2**20} MiB or "
                f"{LARGEST_TEXT} characters; use smaller ranges"
            )
        case _:
            raise UserError(
                f"{place}: the template is invalid: {answer['message']}{_remedy(answer['message'], template)}"
            )


def restore(text: str) -> str:
    """Return a text with the engine's tokens as the file has them, for example {{output}}."""
    return _PROTECTED.sub(r"{{\1}}", text)


def _undefined(message: str, values: dict[str, Any], template: str) -> str:
    found = re.search(r"'(\w+)' is undefined", message)
    if not found:
        return f"the template uses an undefined value: {message}"
    name = found[1]
    if name in ("workflow_id", "output"):
        return f"the variable {name} is undefined; write {{{{{name}}}}}, without spaces"
    near = str(unknown("variable", name, values)) if values else f"unknown variable {name!r}"
    if re.search(r"^[ \t]+default-values:", template, re.MULTILINE):
        return f"{near}; default-values must begin in the first column"
    return f"{near}; give it a value with --set {name}=VALUE or in default-values"


def _remedy(message: str, template: str) -> str:
    """Return what to do about a message of Jinja, or an empty string."""
    if "end of print statement" in message and (found := re.search(r"\{\{\s+(host|input):", template)):
        return f"; write {{{{{found[1]}:NAME}}}}, without spaces"
    if "not all arguments converted" in message and _TEMPLATE_TOKEN.search(template):
        return f": a token is in a string{_IN_STRING}"
    if "unexpected" in message or "expected token" in message:
        return "; a value is written {{ NAME }}, a statement {% for ... %}"
    return ""


def render_without_limits(template: str, values: dict[str, Any], first_line: int) -> dict[str, Any]:
    """Render a template in this process, without limits of time and memory. Return `text` and `lines`, or `error`, its
    `line` and `message`."""
    from jinja2 import StrictUndefined, TemplateSyntaxError, UndefinedError
    from jinja2.sandbox import SandboxedEnvironment

    environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    tokens = dict[str, str]()

    def protect(token: re.Match[str]) -> str:
        name = f"paceline_token_{len(tokens)}"
        tokens[name] = token.expand(_PROTECTION)
        return f"{{{{{name}}}}}"

    protected = _TEMPLATE_TOKEN.sub(protect, template)

    def generate(source: str) -> str:
        parts, size = [], 0
        # A template may change lists and mappings.
        for part in environment.from_string(source).generate(deepcopy(values) | tokens):
            parts.append(part)
            size += len(part)
            if size > 2 * LARGEST_TEXT:
                raise MemoryError
        return "".join(parts)

    def error(kind: str, exception: BaseException, line: int | None = None) -> dict[str, Any]:
        line = line or _template_line(exception)
        return {"error": kind, "line": line + first_line - 1 if line else 0, "message": one_line(exception)}

    try:
        text = generate(protected)
        if len(text) > LARGEST_TEXT:
            raise MemoryError
        if found := _VARIABLE.search(text):
            problem = UserError(f"{restore(tokens[found[1]])} is in a string or in {{% raw %}}{_IN_STRING}")
            return error("failed", problem, protected.count("\n", 0, protected.index(found[0])) + 1)
        # Marks must not change the text, for example where the template compares or counts what it has rendered.
        marked = generate(_mark_lines(environment, protected))
        exact = _LINE.sub("", marked) == text
    except TemplateSyntaxError as exception:
        if found := re.search(r"block that needs to be closed is '(\w+)'", str(exception)):
            problem = UserError(f"{{% {found[1]} %}} is not closed; add {{% end{found[1]} %}}")
            return error("syntax", problem, _unclosed_line(protected, found[1]))
        return error("syntax", exception, exception.lineno)
    except UndefinedError as exception:
        return error("undefined", exception)
    except (MemoryError, OverflowError, RecursionError) as exception:
        return error("limit", exception)
    except Exception as exception:
        # Expressions of the template raise the exceptions of Python's operators and methods.
        return error("failed", exception)
    lines, line = list[int](), 1
    for part in reversed((marked if exact else text).split("\n")):
        found = _LINE.search(part)
        line = int(found[1]) if found else line if lines else template.count("\n") + 1
        lines.append(line + first_line - 1)
    return {"text": text, "lines": lines[::-1]}


def _mark_lines(environment: Any, template: str) -> str:
    """Return the template with the number of each line at its end, except inside of tags."""
    marked = ""
    for line, kind, value in environment.lex(template):
        if kind == "data":
            head, *rest = value.split("\n")
            value = head
            for offset, part in enumerate(rest):
                value += f"{_LINE_MARKS[0]}{line + offset}{_LINE_MARKS[1]}\n{part}"
        marked += value
    return marked


def _unclosed_line(template: str, tag: str) -> int:
    """Return the line of the last tag such as {% for %} that is not closed."""
    lines = [1]
    for found in re.finditer(rf"\{{%[-+]?\s*(end)?{tag}\b", template):
        lines = lines[:-1] if found[1] else [*lines, template.count("\n", 0, found.start()) + 1]
    return lines[-1] if lines else 1


def _template_line(exception: BaseException) -> int:
    """Return the line of the template in which an exception was raised, or 0."""
    line, step = 0, exception.__traceback__
    while step:
        if step.tb_frame.f_code.co_filename == "<template>":
            line = step.tb_lineno
        step = step.tb_next
    return line


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    json.dump(render_without_limits(**pickle.load(sys.stdin.buffer)), sys.stdout)


if __name__ == "__main__":
    _main()
