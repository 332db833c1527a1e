"""Manifests as bytes: their presence, whole and valid, is what commits a checkpoint.

Pure functions, for the agent (which writes manifests) and for readers. What always holds:
:func:`decode_manifest` returns only manifests whose own checksum is right and whose every name,
number and range has been checked, so nothing that is read later can lead out of the files that they
describe.
"""

from __future__ import annotations

import msgspec
import xxhash

from gockpt.errors import CorruptError, StorageError
from gockpt.storage.checks import check_manifest
from gockpt.storage.records import FORMAT, Json, Manifest

MAX_MANIFEST = 1 << 30
"""Longest manifest that is read, in bytes."""

_CHECKSUM_END = len('"}')
_CHECKSUM_DIGITS = 32


def digest(data: bytes | memoryview) -> str:
    """xxh3-128 in 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def new_digest() -> xxhash.xxh3_128:
    """The same hash of bytes that come in pieces: ``update`` with each, then ``hexdigest``."""
    return xxhash.xxh3_128()


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as the bytes of its file, with its checksum filled in.

    Raises:
        StorageError: it would not read back as the same valid manifest (values that JSON has not).
    """
    try:
        blank = msgspec.json.encode(msgspec.structs.replace(manifest, checksum=""))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise StorageError(f"the manifest holds what JSON cannot: {error}") from error
    raw = blank[:-_CHECKSUM_END] + digest(blank).encode() + blank[-_CHECKSUM_END:]
    read_back = decode_manifest(raw)
    for field in ("groups", "extras", "recipe", "proof"):
        if getattr(read_back, field) != _listed(getattr(manifest, field)):
            raise StorageError(f"{field} of the manifest holds what JSON would change (nan, keys)")
    return raw


def _listed(value: Json) -> Json:
    """The value with its tuples as lists, which is how JSON returns them."""
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


class _Version(msgspec.Struct):
    format: int


def decode_manifest(raw: bytes) -> Manifest:
    """Read and check a manifest.

    Raises:
        CorruptError: it is damaged, not consistent, or of a newer format.
    """
    try:
        version = msgspec.json.decode(raw, type=_Version).format
        if version > FORMAT:
            raise CorruptError(
                f"the manifest has format {version}, this gockpt reads up to {FORMAT}; upgrade it"
            )
        _check_checksum(raw)
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"the manifest is damaged: {error}") from error
    check_manifest(manifest)
    return manifest


def _check_checksum(raw: bytes) -> None:
    cut = len(raw) - _CHECKSUM_END - _CHECKSUM_DIGITS
    stated = raw[cut:-_CHECKSUM_END]
    if cut < 0 or digest(raw[:cut] + raw[-_CHECKSUM_END:]).encode() != stated:
        raise CorruptError("the manifest is damaged: its checksum does not match")
