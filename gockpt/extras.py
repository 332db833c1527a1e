"""The user's own objects in a checkpoint: scheduler, scaler, data position, and the generators.

:class:`Extras` takes their states on the training thread at the target step (they would change
under any other thread) and puts them back on the main thread at restore. States are encoded as
tagged JSON (:mod:`gockpt.tagged`), never pickled. What always holds:

- a captured state shares nothing with the objects;
- the random number generators are captured last and restored last, because ``state_dict`` and
  ``load_state_dict`` may draw from them;
- nothing is put back before everything has been decoded.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from gockpt.errors import ConfigError, ExtrasError, GockptError
from gockpt.rng import capture_rng, restore_rng, rng_tree
from gockpt.tagged import decode, encode, where

__all__ = ["Captured", "Extras", "check", "decode", "encode"]

_log = logging.getLogger("gockpt")

RNG = "rng"
"""The name under which the generators are kept; not free for the user's objects."""

WITHIN = 1 << 20
"""States of generators of at most this many bytes (all that there are) go into the JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Access:
    """How one object's state is taken and put back."""

    get: Callable[[], object]
    put: Callable[[Any], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The state of everything at one moment; it shares nothing with the objects any more."""

    objects: list[Any]
    """Pairs of a name and the tagged JSON of that object's state."""
    generators: dict[str, Any]

    def encoded(self) -> object:
        """All of it as tagged JSON; for whoever has time for the generators' states."""
        rng = encode(rng_tree(self.generators), {}, root=RNG, inline=WITHIN)
        return {"dict": [*self.objects, [RNG, rng]]}


class Extras:
    """The objects that a checkpoint keeps besides model and optimizer, by name.

    An object has ``state_dict()`` and ``load_state_dict()``, or is a generator of torch
    (``torch.Generator``), numpy (``Generator``, ``RandomState``) or Python (``random.Random``).
    """

    def __init__(
        self, objects: Mapping[str, object] | None = None, *, device_type: str = "cpu"
    ) -> None:
        """
        Raises:
            ConfigError: a name or an object that cannot be used; says how to make it usable.
        """
        self._device_type = device_type
        self._access = {name: _access(name, item) for name, item in (objects or {}).items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The user's names, in their order."""
        return tuple(self._access)

    def capture(self, tensors: dict[str, torch.Tensor], *, inline: int = 0) -> Captured:
        """Take the state of everything; see :func:`gockpt.tagged.encode`.

        Raises:
            ExtrasError: an object failed, or has a state without an exact encoding.
        """
        tagged: Any = encode(self._states(), tensors, inline=inline)
        # Taken last: a state_dict() may draw from the generators.
        return Captured(objects=tagged["dict"], generators=capture_rng(self._device_type))

    def check(self) -> None:
        """Make sure that everything comes back exactly as it is now; for the first save.

        Raises:
            ExtrasError: names the first value that does not.
        """
        check({**self._states(), RNG: rng_tree(capture_rng(self._device_type))})

    def load(self, encoded: object, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put back what :meth:`capture` returned; :meth:`prepare` and its result in one."""
        self.prepare(encoded, tensors)()

    def prepare(self, encoded: object, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Check what :meth:`capture` returned, and change nothing yet.

        Returns:
            What puts it back, the generators last (ExtrasError: an object failed).

        Args:
            encoded: the tagged JSON.
            tensors: the tensors that it refers to, by name.

        Raises:
            CorruptError: not something that :meth:`capture` writes.
            ExtrasError: an object is not in the checkpoint.
        """
        states = decode(encoded, tensors)
        if not isinstance(states, dict) or RNG not in states:
            raise ExtrasError("extras: nothing was saved under these names; restore another step")
        generators = states.pop(RNG)
        self._compare_names(states)
        _try_rng(generators, self._device_type)

        def put_back() -> None:
            for name, access in self._access.items():
                if name in states:
                    _call(name, "load_state_dict", access.put, states[name])
            restore_rng(generators)

        return put_back

    def _states(self) -> dict[str, object]:
        return {
            name: _call(name, "state_dict", access.get) for name, access in self._access.items()
        }

    def _compare_names(self, saved: Mapping[str, object]) -> None:
        missing = [name for name in self._access if name not in saved]
        unused = [name for name in saved if name not in self._access]
        if missing:
            raise ExtrasError(
                f"extras {missing} are not in the checkpoint, which has {sorted(saved)}; "
                "leave them out of extras to restore it without them"
            )
        if unused:
            _log.warning("the checkpoint has extras %s that were not given: not restored", unused)


def _try_rng(generators: Any, device_type: str) -> None:
    """Set the generators and set them back: what is no state of theirs is found out so."""
    now = rng_tree(capture_rng(device_type))
    try:
        restore_rng(generators)
    finally:
        restore_rng(now)


def _access(name: str, item: Any) -> _Access:
    if not isinstance(name, str) or not name or name == RNG:
        raise ConfigError(
            f"extras: {name!r} cannot be a name; use a text other than '' and {RNG!r}"
        )
    if isinstance(item, torch.Generator):
        return _Access(get=item.get_state, put=item.set_state)
    if isinstance(item, random.Random):
        return _Access(get=item.getstate, put=item.setstate)
    if isinstance(item, np.random.RandomState):
        return _Access(get=lambda: item.get_state(legacy=False), put=item.set_state)
    if isinstance(item, np.random.Generator):
        bits = item.bit_generator
        return _Access(get=lambda: bits.state, put=lambda state: setattr(bits, "state", state))
    get, put = getattr(item, "state_dict", None), getattr(item, "load_state_dict", None)
    if isinstance(item, type) or not callable(get) or not callable(put):
        raise ConfigError(
            f"extras[{name!r}]: {_describe(item)} has no state_dict() and load_state_dict(); "
            "give it both, or pass an object that has them"
        )
    return _Access(get=get, put=put)


def _describe(item: object) -> str:
    return f"class {item.__name__}" if isinstance(item, type) else f"a {type(item).__name__}"


def _call(name: str, method: str, function: Callable[..., object], *arguments: object) -> object:
    """Call into the user's object; whatever it raises becomes one line that names it.

    But for our own errors: who raises these has said what is wrong and what to do.
    """
    try:
        return function(*arguments)
    except GockptError:
        raise
    except Exception as error:
        raise ExtrasError(
            f"extras[{name!r}].{method}() failed with {type(error).__name__}: {error}; "
            "make it work outside gockpt first"
        ) from error


def check(tree: object, *, root: str = "extras") -> None:
    """Encode, pass through JSON text, decode, and compare deeply with the original.

    Types count, nan equals nan, and zero is not minus zero. This takes several times as long as
    encoding: it is for the first save.

    Raises:
        ExtrasError: a value that is refused, or does not come back as it was; says which.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = msgspec.json.encode(encode(tree, tensors, root=root))
    path = _difference(tree, decode(msgspec.json.decode(text), tensors, root=root), (root,))
    if path is not None:
        raise ExtrasError(
            f"{where(path)}: does not come back from a checkpoint as it was; "
            "return plain Python values, arrays and tensors from state_dict()"
        )


def _difference(a: Any, b: Any, path: tuple[object, ...]) -> tuple[object, ...] | None:
    """The path of the first difference, or None. Written without the table that it checks."""
    if type(a) is not type(b):
        return path
    if isinstance(a, dict):
        return _difference_of_dicts(a, b, path)
    if isinstance(a, (list, tuple, deque)):
        if len(a) != len(b) or getattr(a, "maxlen", None) != getattr(b, "maxlen", None):
            return path
        found = (_difference(x, y, (*path, i)) for i, (x, y) in enumerate(zip(a, b, strict=True)))
        return next(filter(None, found), None)
    return None if _same_leaf(a, b) else path


def _difference_of_dicts(a: Any, b: Any, path: tuple[object, ...]) -> tuple[object, ...] | None:
    if len(a) != len(b) or getattr(a, "default_factory", 0) != getattr(b, "default_factory", 0):
        return path
    for (key, value), (other_key, other) in zip(a.items(), b.items(), strict=True):
        found = _difference(key, other_key, path) or _difference(value, other, (*path, key))
        if found is not None:
            return found
    return _difference(getattr(a, "_metadata", None), getattr(b, "_metadata", None), path)


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and _tensor_bytes(a) == _tensor_bytes(b)
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, (set, frozenset)):
        return sorted(map(repr, a)) == sorted(map(repr, b))
    if isinstance(a, int):
        return bool(a == b)  # repr() refuses very large ones
    return repr(a) == repr(b)  # exact for numbers, and tells -0.0 and nan


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
    return plain.view(torch.uint8).numpy().tobytes()
