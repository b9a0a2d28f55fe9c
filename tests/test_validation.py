"""Values from YAML become those of a dataclass, in the containers of its types."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from paceline.errors import UserError
from paceline.validation import from_dict


class Range(NamedTuple):
    low: float
    high: float


NAMED = Range(0.0, 1.0)
ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@dataclass(frozen=True)
class Inner:
    pair: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True)
class Options:
    flat: tuple[float, ...] = ()
    nested: tuple[tuple[float, float], ...] = ()
    deep: tuple[tuple[tuple[int, ...], str], ...] = ()
    mapping: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    optional: tuple[tuple[float, ...], ...] | None = None
    either: float | tuple[float, ...] | Inner = 0.0
    listed: list[tuple[int, int]] = field(default_factory=list)
    sequence: Sequence[tuple[int, ...]] = ()
    anything: Any = None
    named: Range = NAMED
    ranges: tuple[Range, ...] = ()
    inner: Inner = Inner()
    needy: "Needy | None" = None


@dataclass(frozen=True)
class Needy:
    needed: int
    also: str = ""


@pytest.mark.parametrize(
    ("name", "plain", "value"),
    [
        ("flat", [1, 2.0], (1, 2.0)),
        ("nested", [[1.0, 2.0], [3.0, 4.0]], ((1.0, 2.0), (3.0, 4.0))),
        ("nested", ((1.0, 2.0),), ((1.0, 2.0),)),
        ("deep", [[[1, 2], "a"]], (((1, 2), "a"),)),
        ("mapping", {"a": [[1], [2, 3]]}, {"a": ((1,), (2, 3))}),
        ("optional", [[1.0], []], ((1.0,), ())),
        ("optional", None, None),
        ("either", [1.0], (1.0,)),
        ("either", {"pair": [1.0, 2.0]}, Inner((1.0, 2.0))),
        ("listed", [[1, 2]], [(1, 2)]),
        ("listed", ((1, 2),), [(1, 2)]),
        ("sequence", [[1]], ((1,),)),
        ("anything", [[1], {"a": [2]}], ((1,), {"a": (2,)})),
        ("named", [1.0, 2.0], Range(1.0, 2.0)),
        ("named", Range(1.0, 2.0), Range(1.0, 2.0)),
        ("ranges", [[1.0, 2.0]], (Range(1.0, 2.0),)),
        ("inner", {"pair": [3.0, 4.0]}, Inner((3.0, 4.0))),
    ],
)
def test_lists_become_what_the_type_says(name: str, plain: Any, value: Any):
    found = getattr(from_dict(Options, {name: plain}, "test"), name)
    assert found == value
    assert type(found) is type(value)


def test_a_missing_value_is_named():
    with pytest.raises(UserError, match=r"test: no value for needed"):
        from_dict(Needy, {"also": "a"}, "test")
    assert from_dict(Options, {"needy": {"needed": 1}}, "test").needy == Needy(1)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nested": [[1.0]]}, r"test: nested is \[\[1.0\]\], but "),
        ({"nested": [["a", "b"]]}, r"test: nested is \[\['a', 'b'\]\], but "),
        ({"named": [1.0]}, r"test: named is \[1.0\], but "),
        ({"optional": 3}, r"test: optional is 3, but "),
        ({"flat": {"a": [1]}}, r"test: flat is \{'a': \[1\]\}, but "),
        ({"inner": {"pear": [1.0]}}, r"test: inner: unknown key 'pear': did you mean 'pair'\?"),
        ({"anything": ITSELF}, r"test: anything contains itself"),
        ({7: 1}, r"test: unknown key '7'"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(values: dict[Any, Any], said: str):
    with pytest.raises(UserError, match=said):
        from_dict(Options, values, "test")
