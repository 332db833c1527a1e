"""The kinds of values that tagged JSON knows: how each is taken apart and built again.

Pure data and small functions for :mod:`gockpt.tagged`, which handles the plain values, lists,
dictionaries, tensors and arrays itself. What always holds: ``build`` of the parts of a value gives
that value again, and ``build`` calls nothing but a constructor of the kind.
"""

from __future__ import annotations

import base64
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from typing import Any

import numpy as np
import torch

_FACTORIES = {f.__name__: f for f in (list, int, dict, set, float, str)}
_NUMPY_KINDS = "biufcmMSU"
_NUMPY_TEXT = re.compile(r"[<>|=][a-zA-Z?]\d{0,9}(\[\d{0,9}[a-zA-Z]{1,7}\])?")

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
"""torch's dtypes by name."""


class Refused(ValueError):
    """A value that has no exact encoding; the message says why, the encoder adds where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How values of one exact type are taken apart and built again."""

    type: type
    tag: str
    parts: Callable[[Any], Iterable[object]]
    """Children from which the value can be rebuilt; each is encoded in turn."""
    build: Callable[[list[Any]], object]
    indexed: bool = False
    """Whether the children are elements, so that their index belongs into a path."""


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype, without the prefix."""
    return str(dtype).removeprefix("torch.")


def bytes_text(data: bytes) -> str:
    """Bytes as text for JSON (base64)."""
    return base64.b64encode(data).decode()


def text_bytes(text: str) -> bytes:
    """The inverse of :func:`bytes_text`; raises ValueError."""
    return base64.b64decode(text.encode("ascii"), validate=True)


def _datetime_parts(value: datetime) -> tuple[object, ...]:
    zone = value.tzinfo
    if zone is not None and (
        type(zone) is not timezone or repr(zone) != repr(timezone(zone.utcoffset(None)))
    ):
        raise Refused("a time zone with a name of its own cannot be saved; use UTC")
    return value.isoformat(), value.fold


def _scalar_parts(value: np.generic) -> tuple[object, ...]:
    size = value.dtype.itemsize  # numpy gives an empty text four bytes
    return numpy_dtype(value.dtype).str, value.tobytes()[:size]


def _scalar_build(parts: list[Any]) -> object:
    dtype = read_numpy_dtype(parts[0])
    if len(parts[1]) != dtype.itemsize:
        raise ValueError("a numpy scalar of the wrong size")
    return np.ndarray((), dtype, buffer=parts[1])[()]


def read_numpy_dtype(text: str) -> np.dtype[Any]:
    """The dtype of which this is the ``str``.

    Raises:
        ValueError: it is none. (numpy itself would take much more, and parse it as Python.)
        Refused: it is not one of plain bytes.
    """
    if _NUMPY_TEXT.fullmatch(text) is None:
        raise ValueError("no dtype of numpy's")
    return numpy_dtype(np.dtype(text))


def numpy_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype itself, if its values are plain bytes.

    Raises:
        Refused: objects, structures and the like.
    """
    if dtype.kind not in _NUMPY_KINDS or dtype.hasobject:
        raise Refused(f"numpy values of dtype {dtype} cannot be saved; convert them to numbers")
    return dtype


def _default_parts(value: defaultdict[Any, Any]) -> tuple[object, ...]:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "?")
    if factory is not None and _FACTORIES.get(str(name)) is not factory:
        raise Refused(
            f"a defaultdict of {factory!r} cannot be saved; use one of {', '.join(_FACTORIES)}"
        )
    return name, dict(value)


def _ordered_parts(value: OrderedDict[Any, Any]) -> tuple[object, ...]:
    """A module's state_dict() carries its version numbers as the attribute ``_metadata``."""
    attributes = vars(value)
    if not attributes.keys() <= {"_metadata"}:
        raise Refused(f"an OrderedDict with attributes {sorted(attributes)} cannot be saved")
    return dict(value), attributes.get("_metadata")


def _ordered_build(parts: list[Any]) -> object:
    result = OrderedDict(parts[0].items())
    if parts[1] is not None:
        result._metadata = parts[1]  # type: ignore[attr-defined]
    return result


def _elements(values: Iterable[object]) -> list[object]:
    """Elements of a set in an order that does not depend on the process's hash seed."""
    return sorted(values, key=repr)


# fmt: off
KINDS = (
    Kind(type=tuple, tag="tuple", parts=iter, build=tuple, indexed=True),
    Kind(type=set, tag="set", parts=_elements, build=set, indexed=True),
    Kind(type=frozenset, tag="frozenset", parts=_elements, build=frozenset, indexed=True),
    Kind(type=torch.Size, tag="size", parts=iter, build=torch.Size, indexed=True),
    Kind(type=deque, tag="deque",
          parts=lambda v: (v.maxlen, list(v)), build=lambda p: deque(p[1], p[0])),
    Kind(type=range, tag="range",
          parts=lambda v: (v.start, v.stop, v.step), build=lambda p: range(*p)),
    Kind(type=slice, tag="slice",
          parts=lambda v: (v.start, v.stop, v.step), build=lambda p: slice(*p)),
    Kind(type=complex, tag="complex",
          parts=lambda v: (v.real, v.imag), build=lambda p: complex(*p)),
    Kind(type=bytes, tag="bytes",
          parts=lambda v: (bytes_text(v),), build=lambda p: text_bytes(*p)),
    Kind(type=datetime, tag="datetime",
          parts=_datetime_parts, build=lambda p: datetime.fromisoformat(p[0]).replace(fold=p[1])),
    Kind(type=date, tag="date",
          parts=lambda v: (v.isoformat(),), build=lambda p: date.fromisoformat(*p)),
    Kind(type=timedelta, tag="timedelta",
          parts=lambda v: (v.days, v.seconds, v.microseconds), build=lambda p: timedelta(*p)),
    Kind(type=torch.dtype, tag="dtype",
          parts=lambda v: (dtype_name(v),), build=lambda p: DTYPES[p[0]]),
    Kind(type=torch.device, tag="device",
          parts=lambda v: (str(v),), build=lambda p: torch.device(*p)),
    Kind(type=np.generic, tag="numpy",
          parts=_scalar_parts, build=_scalar_build),
    Kind(type=defaultdict, tag="defaultdict",
          parts=_default_parts, build=lambda p: defaultdict(p[0] and _FACTORIES[p[0]], p[1])),
    Kind(type=OrderedDict, tag="ordered",
          parts=_ordered_parts, build=_ordered_build),
    Kind(type=Counter, tag="counter",
          parts=lambda v: (dict(v),), build=lambda p: Counter(*p)),
)
# fmt: on
