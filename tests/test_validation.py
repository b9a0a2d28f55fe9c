"""Conversion of plain values to dataclasses, and constraints on their fields."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import pytest

from paceline.errors import UserError
from paceline.validation import Count, LayerWidths, NonNegative, Positive, UnitInterval, check, from_dict


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
def test_lists_are_converted_to_the_containers_of_the_type(name: str, plain: Any, value: Any):
    found = getattr(from_dict(Options, {name: plain}, "test"), name)
    assert found == value
    assert type(found) is type(value)


def test_a_missing_value_is_named():
    with pytest.raises(UserError, match=r"test: no value for needed"):
        from_dict(Needy, {"also": "a"}, "test")
    assert from_dict(Options, {"needy": {"needed": 1}}, "test").needy == Needy(1)


@pytest.mark.parametrize(
    ("values", "message"),
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
def test_a_value_of_the_wrong_type_is_refused_by_name(values: dict[Any, Any], message: str):
    with pytest.raises(UserError, match=message):
        from_dict(Options, values, "test")


@dataclass(frozen=True)
class Weights:
    smooth: NonNegative = 0.0
    friction: tuple[Positive, Positive] = (0.4, 1.2)


@dataclass(frozen=True)
class Constrained:
    num_steps: Count = 24
    limit: Count | None = None
    rate: Positive = 1e-3
    discount: UnitInterval = 0.99
    hidden: LayerWidths = (64, 64)
    free: float = 0.0
    switch: bool = True
    documented: Annotated[Count | None, "shown in help pages"] = None
    rewards: Weights = Weights()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_steps": 0}, "--ppo.num-steps 0 must be at least 1"),
        ({"num_steps": 2**40}, "--ppo.num-steps 1099511627776 must be at most 2147483648"),
        ({"limit": 0}, "--ppo.limit 0 must be at least 1"),
        ({"documented": 0}, "--ppo.documented 0 must be at least 1"),
        ({"rate": 0.0}, "--ppo.rate 0 must be above 0, and finite"),
        ({"rate": float("nan")}, "--ppo.rate nan must be above 0, and finite"),
        ({"rate": float("inf")}, "--ppo.rate inf must be above 0, and finite"),
        ({"discount": 1.5}, "--ppo.discount 1.5 must be between 0 and 1"),
        ({"discount": float("nan")}, "--ppo.discount nan must be between 0 and 1"),
        ({"hidden": ()}, "--ppo.hidden  is not a list of widths: give for example 64 64"),
        ({"hidden": (64, 0)}, "--ppo.hidden 64 0 is not a list of widths: give for example 64 64"),
        ({"free": 1e10}, "--ppo.free 1e+10 must be between -1e+09 and 1e+09"),
        ({"free": float("inf")}, "--ppo.free inf must be between -1e+09 and 1e+09"),
        ({"rewards": Weights(smooth=-1.0)}, "--ppo.rewards.smooth -1 must not be negative, and finite"),
        ({"rewards": Weights(friction=(0.0, 1.0))}, "--ppo.rewards.friction 0 must be above 0, and finite"),
    ],
)
def test_a_value_outside_its_constraint_is_refused_with_its_flag_and_range(changes: dict[str, Any], message: str):
    with pytest.raises(UserError) as error:
        check(Constrained(**changes), "--ppo.")
    assert str(error.value) == message


def test_values_inside_their_constraints_are_accepted_and_converted_from_plain_values():
    check(Constrained(), "--ppo.")
    check(Constrained(num_steps=1, limit=2, rate=1e30, discount=1.0, free=-1e9), "--ppo.")
    assert from_dict(Constrained, {"rate": 1, "rewards": {"friction": [1, 2]}}, "test").rewards.friction == (1.0, 2.0)
    with pytest.raises(UserError, match="num_steps is True, but must be a number"):
        from_dict(Constrained, {"num_steps": True}, "test")
