"""Tagged JSON: Python values as JSON that decodes to exactly the same values.

Plain JSON loses tuples, integer keys, sets, infinities and numpy's types (a MultiStepLR whose
integer milestones come back as strings never decays its learning rate). Pickle loses nothing, but
loading it runs code. So values become JSON in which *every object has exactly one key, its tag*::

    (1, "a")          {"tuple": [1, "a"]}
    {3: 2}            {"dict": [[3, 2]]}
    float("inf")      {"float": ["inf"]}
    tensor            {"tensor": ["extras.ema.weight", "float32", 4, 2]}     bytes: in the file

Pure functions, called on the thread of the caller. What always holds:

- A value is encoded exactly or refused with its path. Only exact types of the table are taken:
  subclasses (named tuples, enums) would come back as something else.
- Nothing is shared with the source: it may change as soon as :func:`encode` has returned.
- Order of dictionaries is kept without relying on the order of JSON objects.
- Decoding calls nothing but the constructors listed here, whatever the input says.

Identity is not kept: an object that occurs twice comes back as two. Tensors come back contiguous
and on the CPU; encoding one that lies on an accelerator waits for its copy.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from gockpt.errors import CorruptError, ExtrasError
from gockpt.tagged_kinds import (
    DTYPES,
    KINDS,
    Refused,
    bytes_text,
    dtype_name,
    numpy_dtype,
    read_numpy_dtype,
    text_bytes,
)

MAX_DEPTH = 100
"""Deepest nesting of containers, in both directions."""

MAX_NAME = 256
"""Longest name of a tensor made from a path, in characters."""

_INT_LIMIT = 1 << 63
_AS_TENSOR = frozenset(map(np.dtype, "?bBhHiIqQefdFD"))
"""numpy's dtypes that torch has too; arrays of others are kept as their bytes."""

_WRONG_INPUT = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What input that encode() never wrote makes the constructors raise."""


def encode(
    tree: object, tensors: dict[str, torch.Tensor], *, root: str = "extras", inline: int = 0
) -> object:
    """Return ``tree`` as tagged JSON; tensors and arrays are copied into ``tensors``.

    Args:
        tree: the value, normally a dictionary by name.
        tensors: receives a private contiguous CPU copy of each tensor and array, named
            ``<root>.<path>``. Names already present are not used again.
        root: how paths and tensor names begin.
        inline: tensors and arrays of at most this many bytes go into the JSON instead.

    Raises:
        ExtrasError: a value without an exact encoding; the message begins with its path.
    """
    return _Encoder(tensors, root, inline).run(tree)


def decode(encoded: object, tensors: Mapping[str, torch.Tensor], *, root: str = "extras") -> Any:
    """Return the tree that :func:`encode` was given; nothing of it shares memory with ``tensors``.

    Raises:
        CorruptError: not something that :func:`encode` writes, or a tensor that does not fit it.
    """
    try:
        return _Decoder(tensors).value(encoded, 0)
    except _WRONG_INPUT as error:
        message = f"{root}: the encoding is damaged ({error}); restore an older checkpoint"
        raise CorruptError(message) from error


_BY_TYPE = {kind.type: kind for kind in KINDS}
_BY_TAG = {kind.tag: kind for kind in KINDS}


# ── Encoding ──────────────────────────────────────────────────────────────────────────────────────


class _Encoder:
    """One call of :func:`encode`; ``path`` is where it is, kept by pushing and popping."""

    def __init__(self, tensors: dict[str, torch.Tensor], root: str, inline: int) -> None:
        self.tensors = tensors
        self.path: list[object] = [root]
        self.inline = inline
        self.depth = 0
        self.keys = 0  # > 0 while inside the key of a dictionary

    def run(self, tree: object) -> object:
        try:
            return self.value(tree)
        except Refused as refused:
            raise ExtrasError(f"{where(self.path)}: {refused}") from None

    def child(self, key: object, value: object) -> object:
        self.path.append(key)
        encoded = self.value(value)
        self.path.pop()  # not after a refusal: the path then tells where
        return encoded

    def value(self, value: Any) -> object:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if -_INT_LIMIT <= value < _INT_LIMIT else {"int": [hex(value)]}
        if kind is float:
            return value if math.isfinite(value) else {"float": [repr(value)]}
        if kind is str:
            return _encode_text(value)
        return self.compound(value, kind)

    def compound(self, value: Any, kind: type) -> object:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Refused(f"nested deeper than {MAX_DEPTH} levels, or it contains itself")
        if kind is list:
            encoded: object = self.elements(value)
        elif kind is dict:
            encoded = {"dict": [self.pair(key, item) for key, item in value.items()]}
        elif kind is torch.Tensor:
            encoded = self.tensor(value)
        elif kind is np.ndarray:
            encoded = self.array(value)
        else:
            encoded = self.parts(value, kind)
        self.depth -= 1
        return encoded

    def elements(self, values: Iterable[object]) -> list[object]:
        values = list(values)
        if set(map(type, values)) == {int}:  # orders of a data set may have millions
            numbers: list[Any] = values
            if min(numbers) >= -_INT_LIMIT and max(numbers) < _INT_LIMIT:
                return values
        return [self.child(index, value) for index, value in enumerate(values)]

    def pair(self, key: object, value: object) -> list[object]:
        if type(key) is str and key.isascii():
            return [key, self.child(key, value)]
        self.keys += 1
        encoded = self.value(key)
        self.keys -= 1
        return [encoded, self.child(key, value)]

    def parts(self, value: object, type_: type) -> object:
        kind = _BY_TYPE.get(np.generic if isinstance(value, np.generic) else type_)
        if kind is None:
            raise Refused(_why(value))
        children = kind.parts(value)
        if kind.indexed:
            return {kind.tag: self.elements(children)}
        return {kind.tag: [self.value(child) for child in children]}

    def tensor(self, value: torch.Tensor) -> object:
        if self.keys:
            raise Refused("a tensor as a key cannot be saved: tensors compare by identity")
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise Refused("only dense tensors can be saved; call to_dense() or dequantize()")
        if value.requires_grad:
            raise Refused("a tensor that requires grad cannot be saved; return tensor.detach()")
        copy = torch.empty(value.shape, dtype=value.dtype)
        copy.copy_(value)
        dtype = dtype_name(value.dtype)
        return {"tensor": [self.store(copy), dtype, *value.shape]}

    def array(self, value: np.ndarray[Any, Any]) -> object:
        dtype = numpy_dtype(value.dtype)
        copy = np.array(value, order="C")
        if dtype not in _AS_TENSOR:
            copy = np.frombuffer(bytearray(copy.tobytes()), np.uint8)
        return {"array": [self.store(torch.from_numpy(copy)), dtype.str, *value.shape]}

    def store(self, tensor: torch.Tensor) -> object:
        """Keep a private tensor; return where its bytes are: a name, or the bytes themselves."""
        if tensor.nbytes <= self.inline:
            return self.value(_flat(tensor).numpy().tobytes())
        wanted = ".".join(str(key) for key in self.path)[:MAX_NAME]
        wanted = name = wanted.encode(errors="replace").decode()
        number = 1
        while name in self.tensors:
            number += 1
            name = f"{wanted}~{number}"
        self.tensors[name] = tensor
        return name


def _encode_text(text: str) -> object:
    try:
        text.encode()
    except UnicodeEncodeError:  # lone surrogates, as in undecodable file names
        return {"str": [bytes_text(text.encode(errors="surrogatepass"))]}
    return text


def _why(value: object) -> str:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, tuple):
        return f"the named tuple {name} cannot be saved exactly; return a tuple or a dict of it"
    if isinstance(value, torch.Tensor):
        return f"the tensor subclass {name} cannot be saved exactly; return a plain tensor of it"
    if isinstance(value, torch.Generator):
        return "a generator cannot be saved inside a state; return generator.get_state()"
    if inspect.isroutine(value) or isinstance(value, type):
        return f"code ({name}) cannot be saved; leave it out of state_dict()"
    return f"{name} cannot be saved exactly; return plain values of it from state_dict()"


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor of any shape."""
    return tensor.reshape(-1).view(torch.uint8)


def where(path: Iterable[object]) -> str:
    """A path as text, ``extras['scheduler'].foo[3]``: the first keys are the user's names."""
    root, *keys = path
    text = str(root)
    for level, key in enumerate(keys):
        named = level > 0 and isinstance(key, str) and key.isidentifier()
        text += f".{key}" if named else f"[{key!r}]"
    return text


# ── Decoding ──────────────────────────────────────────────────────────────────────────────────────


class _Decoder:
    """One call of :func:`decode`. Raises whatever wrong input makes it run into."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def value(self, encoded: Any, depth: int) -> Any:
        kind = type(encoded)
        if encoded is None or kind in (bool, int, float, str):
            return encoded
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        if kind is list:
            return self.elements(encoded, depth + 1)
        if kind is not dict or len(encoded) != 1:
            raise ValueError("not an object with one tag")
        ((tag, body),) = encoded.items()
        if type(body) is not list:
            raise ValueError(f"a {tag!r} without a list")
        return self.tagged(tag, body, depth + 1)

    def elements(self, encoded: list[Any], depth: int) -> list[Any]:
        return [self.value(item, depth) for item in encoded]

    def tagged(self, tag: str, body: list[Any], depth: int) -> object:
        if tag == "dict":
            return {self.value(key, depth): self.value(value, depth) for key, value in body}
        if tag == "int":
            return int(body[0], 16)
        if tag == "float":
            return float(body[0])
        if tag == "str":
            return text_bytes(body[0]).decode(errors="surrogatepass")
        if tag == "tensor":
            return self.tensor(*body)
        if tag == "array":
            return self.array(*body)
        return _BY_TAG[tag].build(self.elements(body, depth))

    def tensor(self, source: object, dtype: str, *shape: int) -> torch.Tensor:
        type_ = DTYPES[dtype]
        raw = self.bytes(source, math.prod(shape) * type_.itemsize)
        result = torch.empty(shape, dtype=type_)
        _flat(result).copy_(raw)
        return result

    def array(self, source: object, dtype: str, *shape: int) -> np.ndarray[Any, Any]:
        type_ = read_numpy_dtype(dtype)
        raw = self.bytes(source, math.prod(shape) * type_.itemsize)
        return np.ndarray(shape, type_, buffer=bytearray(raw.numpy().tobytes()))

    def bytes(self, source: object, size: int) -> torch.Tensor:
        """The bytes of a tensor or array: from the file by name, or given inline."""
        if isinstance(source, str):
            raw = _flat(self.tensors[source].contiguous())
        else:
            inline: Any = source
            raw = torch.from_numpy(np.frombuffer(bytearray(text_bytes(*inline["bytes"])), np.uint8))
        if raw.numel() != size:
            raise ValueError(f"{raw.numel()} bytes of data for {size}")
        return raw
