"""Conversion of plain values to dataclasses, and constraints on their fields."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import pytest

from paceline.errors import UserError
from paceline.validation import Count, LayerWidths, NonNegative, Positive, UnitInterval, check, check_options, from_dict


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
        ("sequence", [[1]], [(1,)]),
        ("anything", [[1], {"a": [2]}], [[1], {"a": [2]}]),
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
        ({"nested": [[1.0]]}, r"test: no value for nested\.0\.1"),
        ({"nested": [["a", "b"]]}, r"test: nested 'a' must be a number"),
        ({"named": [1.0]}, r"test: no value for named\.1"),
        ({"named": [1.0, 2.0, 3.0]}, r"test: named \[1.0, 2.0, 3.0\] must have at most 2 items, not 3"),
        ({"optional": 3}, r"test: optional 3 must be a list"),
        ({"flat": {"a": [1]}}, r"test: flat \{'a': \[1\]\} must be a list"),
        ({"flat": [True]}, r"test: flat True must be a number"),
        ({"flat": ["1"]}, r"test: flat '1' must be a number"),
        ({"deep": [[[1.0], "a"]]}, r"test: deep 1.0 must be a whole number"),
        ({"either": "a"}, r"test: either 'a' must be a number or must be a list or must be a mapping"),
        ({"inner": 3}, r"test: inner 3 must be a mapping"),
        ({"needy": {"neded": 1}}, r"test: needy: unknown key 'neded': did you mean 'needed'\?"),
        ({"inner": {"pear": [1.0]}}, r"test: inner: unknown key 'pear': did you mean 'pair'\?"),
        ({"anything": ITSELF}, r"test: .*Circular reference"),
        ({7: 1}, r"test: unknown key '7'"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_name_and_type(values: dict[Any, Any], message: str):
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
        ({"rate": 0.0}, "--ppo.rate 0 must be above 0"),
        ({"rate": float("nan")}, "--ppo.rate nan must be a finite number"),
        ({"rate": float("inf")}, "--ppo.rate inf must be a finite number"),
        ({"discount": 1.5}, "--ppo.discount 1.5 must be at most 1"),
        ({"discount": float("nan")}, "--ppo.discount nan must be a finite number"),
        ({"hidden": ()}, "--ppo.hidden () must have at least 1 item, not 0"),
        ({"hidden": (64, 0)}, "--ppo.hidden 0 must be at least 1"),
        ({"rewards": Weights(smooth=-1.0)}, "--ppo.rewards.smooth -1 must be at least 0"),
        ({"rewards": Weights(friction=(0.0, 1.0))}, "--ppo.rewards.friction 0 must be above 0"),
    ],
)
def test_a_value_outside_its_constraint_is_refused_with_its_flag_and_range(changes: dict[str, Any], message: str):
    with pytest.raises(UserError) as error:
        check(Constrained(**changes), "--ppo.")
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"free": 1e10}, "--env.free 1e+10"),
        ({"free": float("inf")}, "--env.free inf"),
        ({"free": float("nan")}, "--env.free nan"),
        ({"rate": 1e10}, "--env.rate 1e+10"),
        ({"rewards": Weights(friction=(1.0, 1e10))}, "--env.rewards.friction 1e+10"),
    ],
)
def test_every_float_of_a_task_is_bounded(changes: dict[str, Any], flag: str):
    with pytest.raises(UserError) as error:
        check_options(Constrained(**changes))
    assert str(error.value) == f"{flag} must be between -1e+09 and 1e+09"


def test_values_inside_their_constraints_are_accepted_and_converted_from_plain_values():
    check(Constrained(), "--ppo.")
    check(Constrained(num_steps=1, limit=2, rate=1e30, discount=1.0), "--ppo.")
    check_options(Constrained(free=-1e9))
    assert from_dict(Constrained, {"rate": 1, "rewards": {"friction": [1, 2]}}, "test").rewards.friction == (1.0, 2.0)
    with pytest.raises(UserError, match="num_steps True must be a whole number"):
        from_dict(Constrained, {"num_steps": True}, "test")
