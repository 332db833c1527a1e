"""States of a disk, put on a real one; the recorder and the model are those of ``crash-test``."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

from gockpt.cli.crash_disk import Disk, State, Tree, as_it_was, choices, states
from gockpt.cli.crash_recorder import Op, Recorder

__all__ = ["Disk", "Op", "Recorder", "Shelf", "State", "Tree", "as_it_was", "choices", "states"]


class Shelf:
    """Puts states on a real disk; equal contents are written once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._contents = folder / "contents"
        self._contents.mkdir(parents=True)
        self._made = 0

    def put(self, tree: Tree, *, shared: bool = True) -> Path:
        """The directory that holds the state; its files may only be read if ``shared``."""
        self._made += 1
        root = self._folder / f"state-{self._made}"
        root.mkdir()
        for path, content in sorted(tree.items()):
            if content is None:
                (root / path).mkdir()
            elif shared:
                os.link(self._content(content), root / path)
            else:
                (root / path).write_bytes(content)
        return root

    def _content(self, content: bytes) -> Path:
        path = self._contents / xxhash.xxh3_128_hexdigest(content)
        if not path.exists():
            path.write_bytes(content)
        return path
