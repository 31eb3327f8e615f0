"""Fields of a config: read from a parsed file, and checked, one sentence each with its name. Raises WeightsError."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from fishjax.errors import WeightsError

_Config = TypeVar("_Config", bound=Any)
MAX_LAYERS = 1024
"""Far more than any model of these families has."""


def reader(raw: Mapping[str, Any], prefix: str = "") -> Callable[[str], Any]:
    """Gets a field that must be there; `prefix` is said before its name."""

    def get(name: str) -> Any:
        if name not in raw:
            raise WeightsError(f"there is no field '{prefix}{name}'")
        return raw[name]

    return get


def read(config: type[_Config], get: Callable[[str], Any], given: Mapping[str, Any], **names: str) -> _Config:
    """A config of the fields `given`; `get` has the others, under their own names or those in `names`."""
    others = [field.name for field in fields(config) if field.name not in given]
    return config(**given, **{name: get(names.get(name, name)) for name in others})


def positive(config: Any, *names: str) -> None:
    """Whole numbers of at least 1."""
    for name in names:
        check_whole(name, getattr(config, name), 1)


def few_layers(config: Any) -> None:
    """`num_layers` of a transformer."""
    check_layers("num_layers", config.num_layers)


def check_layers(name: str, value: Any) -> None:
    """At most MAX_LAYERS, since modules are made one by one before anybody looks for their tensors."""
    check_whole(name, value, 1)
    if value > MAX_LAYERS:
        raise WeightsError(f"{name} must be at most {MAX_LAYERS:,}, not {value:,}")


def whole(config: Any, *names: str) -> None:
    """Whole numbers of at least 0."""
    for name in names:
        check_whole(name, getattr(config, name), 0)


def words(config: Any, name: str) -> None:
    """A tuple of lower case words."""
    value = getattr(config, name)
    if not isinstance(value, tuple) or not all(isinstance(word, str) and word == word.lower() for word in value):
        raise WeightsError(f"{name} must be a list of lower case words, not {value!r}")


def whole_numbers(config: Any, name: str, least: int) -> None:
    """A tuple of whole numbers of at least `least`."""
    for value in getattr(config, name):
        check_whole(f"each of {name}", value, least)


def check_whole(name: str, value: Any, least: int) -> None:
    """One value, which stands in no config yet."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise WeightsError(f"{name} must be a whole number of at least {least}, not {value!r}")


def real(config: Any, *names: str, below: float = math.inf, at_most: float = math.inf) -> None:
    """Numbers above 0."""
    for name in names:
        value = getattr(config, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and 0 < value < below and value <= at_most):
            limit = (
                f" and below {below:g}"
                if below < math.inf
                else f" and at most {at_most:g}"
                if at_most < math.inf
                else ""
            )
            raise WeightsError(f"{name} must be a number above 0{limit}, not {value!r}")


def flag(config: Any, *names: str) -> None:
    """true or false."""
    for name in names:
        if not isinstance(getattr(config, name), bool):
            raise WeightsError(f"{name} must be true or false, not {getattr(config, name)!r}")
