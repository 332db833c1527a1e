"""Real file systems of other kinds than the disk's: each is used as well as it lets itself be.

They are mounted for the test, which takes root; elsewhere these tests are skipped with mount's own
words.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from storage_kit import assert_holds, large_image, save

from gockpt import faults
from gockpt.cli.main import call
from gockpt.faults import Fault
from gockpt.storage import fs

Mount = Callable[[str], Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    mounted: list[Path] = []

    def at(kind: str) -> Path:
        lower, upper, work, target = (tmp_path / name for name in ("lower", "upper", "work", kind))
        for one in (lower, upper, work, target):
            one.mkdir()
        options = f"lowerdir={lower},upperdir={upper},workdir={work}" if kind == "overlay" else "rw"
        command = ["mount", "-t", kind, "-o", options, kind, str(target)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if done.returncode:
            pytest.skip(f"cannot mount {kind}: {done.stderr.strip()}")
        mounted.append(target)
        return target

    yield at
    for target in mounted:
        subprocess.run(["umount", str(target)], check=True, timeout=200)


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs", "overlay"])
def test_a_checkpoint_comes_back_from_it(kind: str, mount: Mount) -> None:
    root = mount(kind)
    save(root, step=1)
    save(root, step=2)
    assert_holds(root, 2)


def test_one_without_direct_writes_is_written_through_the_page_cache(mount: Mount) -> None:
    """``ramfs`` never has them (``tmpfs`` does in newer kernels)."""
    root = mount("ramfs")
    fd, reason = fs.create_direct(root / "probe")
    fs.drop(fd, root / "probe")
    assert reason == "the file system has no O_DIRECT (Invalid argument)"
    save(root, step=3, image=large_image(3))


def test_doctor_says_why_writes_are_buffered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``ramfs`` has no limit, hence no room to report, so it is played here."""
    faults.arm([Fault(point="fs.direct", action="errno:EINVAL", times=1)])
    try:
        assert call(["doctor", "--dir", str(tmp_path), "--megabytes", "4", "--json", "-"]) == 0
    finally:
        faults.disarm()
    checks = json.loads(capsys.readouterr().out)["checks"]
    (found,) = [check for check in checks if check["name"].startswith("direct writes")]
    assert found["value"] == "no, buffered"
    assert found["remark"] == "the file system has no O_DIRECT (Invalid argument)"
    assert found["ok"]
