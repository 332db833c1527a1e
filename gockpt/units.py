"""Numbers with their units, as people read them: in tables, messages and figures.

Pure functions; a dash stands for what is not known.
"""

from __future__ import annotations


def seconds(value: float | None) -> str:
    """``1.234 s``, ``12.3 ms``, ``45 µs``; a dash for nothing."""
    if value is None:
        return "–"
    if abs(value) >= 1:
        return f"{value:.2f} s"
    if abs(value) >= 0.1:
        return f"{value:.3f} s"
    if abs(value) >= 0.001:
        return f"{value * 1e3:.1f} ms"
    return f"{value * 1e6:.0f} µs"


def size(value: float | None) -> str:
    """Bytes in decimal units, as disks and links are sold: ``84.3 MB``."""
    if value is None:
        return "–"
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= factor:
            return (
                f"{value / factor:.3g} {unit}"
                if value < 1e3 * factor
                else f"{value / factor:.0f} {unit}"
            )
    return f"{value:.0f} B"


def count(value: float | None) -> str:
    """``1.32 G``, ``5.18 M``."""
    if value is None:
        return "–"
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share as a percentage."""
    return "–" if value is None else f"{value * 100:.{digits}f} %"
