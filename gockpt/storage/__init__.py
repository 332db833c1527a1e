"""Checkpoints on disk: images, manifests, commit, discovery, deletion, checked reading.

The format is described in docs/format.md; :mod:`gockpt.storage.fs` is the only place with file
system calls.
"""

from gockpt.storage.catalog import Found, examine, newest, next_sequence, scan
from gockpt.storage.commit import commit, create_checkpoint, make_directories
from gockpt.storage.format import decode_manifest, encode_manifest
from gockpt.storage.header import build_header, header_reserve
from gockpt.storage.lock import Lock
from gockpt.storage.marks import pin, unpin
from gockpt.storage.names import CheckpointName, parse_name
from gockpt.storage.reader import (
    Checkpoint,
    Info,
    Place,
    candidates,
    load_first,
    load_newest,
    open,
)
from gockpt.storage.records import (
    EXTENT,
    FORMAT,
    Extent,
    FileRecord,
    Manifest,
    Piece,
    TensorRecord,
    file_name,
    manifest_name,
    tensor_records,
)
from gockpt.storage.replica import replicate
from gockpt.storage.retention import collect_leftovers, discard, prune
from gockpt.storage.tier import Tier
from gockpt.storage.writer import ImageWriter

__all__ = [
    "EXTENT",
    "FORMAT",
    "Checkpoint",
    "CheckpointName",
    "Extent",
    "FileRecord",
    "Found",
    "ImageWriter",
    "Info",
    "Lock",
    "Manifest",
    "Piece",
    "Place",
    "TensorRecord",
    "Tier",
    "build_header",
    "candidates",
    "collect_leftovers",
    "commit",
    "create_checkpoint",
    "decode_manifest",
    "discard",
    "encode_manifest",
    "examine",
    "file_name",
    "header_reserve",
    "load_first",
    "load_newest",
    "make_directories",
    "manifest_name",
    "newest",
    "next_sequence",
    "open",
    "parse_name",
    "pin",
    "prune",
    "replicate",
    "scan",
    "tensor_records",
    "unpin",
]
