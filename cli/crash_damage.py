"""The scenarios of the family ``damage``: files that are no longer what was written.

Runs in the parent, while no process of the trial does. What is expected: the newest checkpoint that
was not damaged is restored.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from gockpt.cli.crash_methods import PLAIN_FILE
from gockpt.cli.crash_setup import INTERVAL, STEPS
from gockpt.cli.crash_trial import Skipped, Trial, why
from gockpt.storage import Found, encode_manifest, manifest_name, scan

ENOUGH = 3
"""Checkpoints that there must be before any is damaged."""


def damage(trial: Trial) -> None:
    """A scenario of the family ``damage``."""
    if trial.case.scenario.name == "disk-lost":
        _disk_lost(trial)
        return
    life = trial.live(pace=trial.setup.pace)
    if not life.until(lambda: len(life.durable) >= ENOUGH, 240):
        raise Skipped(f"there were no {ENOUGH} checkpoints ({why(life)})")
    trial.moment(life, earliest=life.step, latest=min(life.step + INTERVAL, STEPS - 1))
    trial.strike(life)
    trial.kill(life)
    if trial.policy is None:
        _damage_plain(trial)
    else:
        _damage(trial)
    trial.finish()


def _damage(trial: Trial) -> None:
    valid = [one for one in scan(trial.directory) if one.problem is None]
    if len(valid) < ENOUGH:
        raise Skipped(f"there were only {len(valid)} checkpoints")
    name = trial.case.scenario.name
    spoiled = {"swapped": 2, "stale-directory": 0}.get(name, 1)
    trial.facts.promised = valid[spoiled].step
    if name == "swapped":
        _swap(_image(valid[0]), _image(valid[1]))
    elif name == "stale-directory":
        _stale(trial.directory, valid[0])
    elif name == "foreign-manifest":
        _foreign(valid[0])
    else:
        manifest = trial.case.point == "manifest"
        file = valid[0].path / manifest_name(0) if manifest else _image(valid[0])
        HOW[name](trial, file)
    trial.facts.notes.append(f"damaged: {name} of step {valid[0].step}")


def _damage_plain(trial: Trial) -> None:
    file = trial.directory / PLAIN_FILE
    name = trial.case.scenario.name
    if name not in HOW or trial.case.point != "data":
        raise Skipped("a plain torch.save has one file and no more")
    HOW[name](trial, file)
    trial.facts.promised = None


def _image(found: Found) -> Path:
    return found.path / found.manifests[0].files[0].name


def _flip(trial: Trial, file: Path) -> None:
    data = bytearray(file.read_bytes())
    header = trial.case.point == "header"
    at = trial.chance.randrange(8, 512) if header else trial.chance.randrange(4096, len(data) - 64)
    if trial.case.point == "manifest":
        at = trial.chance.randrange(len(data))
    data[at] ^= 1 << trial.chance.randrange(8)
    file.write_bytes(data)


def _truncate(trial: Trial, file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: trial.chance.randrange(len(data))])


def _zero(trial: Trial, file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def _delete(trial: Trial, file: Path) -> None:
    file.unlink()


HOW: dict[str, Callable[[Trial, Path], None]] = {
    "bit-flip": _flip,
    "truncated": _truncate,
    "zero-filled": _zero,
    "deleted": _delete,
    "no-manifest": _delete,
}


def _swap(one: Path, two: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


def _stale(directory: Path, newest: Found) -> None:
    """A directory with a higher number whose data looks good and whose manifest never came."""
    stale = directory / f"step-{STEPS * 10:09d}-s{999:06d}-deadbeef"
    stale.mkdir()
    shutil.copy(_image(newest), stale)
    (stale / (manifest_name(0) + ".tmp")).write_bytes(b'{"format"')


def _foreign(found: Found) -> None:
    """A manifest that is whole and right, but of another launch of another run."""
    other = msgspec.structs.replace(found.manifests[0], run_id="f" * 16, launch_id="0" * 8)
    (found.path / manifest_name(0)).write_bytes(encode_manifest(other))


def _disk_lost(trial: Trial) -> None:
    if trial.policy is None:
        raise Skipped("a plain torch.save has no second tier")
    tier = trial.tier = trial.place / "disk" / "tier"
    life = trial.live(pace=trial.setup.pace)

    def copied() -> bool:
        return len([one for one in scan(tier) if one.problem is None]) >= 2

    if not life.until(copied, 240):
        raise Skipped(f"the tier had no two checkpoints ({why(life)})")
    trial.strike(life)
    trial.kill(life)
    shutil.rmtree(trial.directory)
    trial.facts.promised = next(one.step for one in scan(tier) if one.problem is None)
    trial.finish()
