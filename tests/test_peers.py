"""Other people's engines in the bench: which there are, what they are charged for, that their
checkpoints are really compared."""

from __future__ import annotations

import dataclasses
import gc
import json
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gockpt.cli import bench_markdown
from gockpt.cli.bench_golden import tensor_hash
from gockpt.cli.bench_setup import order_strategies
from gockpt.cli.main import call
from gockpt.cli.peers import catalog
from gockpt.cli.peers.engine import REHEARSAL, Engine, Saving, State, done, place, size
from gockpt.cli.peers.host import Disk, Host, Link
from gockpt.cli.peers.measure import check
from gockpt.cli.peers.saver import Saver
from gockpt.cli.task import Task
from gockpt.devices import CpuDevice, EmulatedDevice, ModelledWork, load_profile
from gockpt.errors import ConfigError, GockptError

TASK = Task(
    model="gpt-tiny", device="cpu", profile_file=None, precision="fp32", seed=0, data=None,
    tokens=32, calibrated=False,
)  # fmt: skip

WITHIN = ("torch-save", "dcp", "dcp-async", "torchsnapshot")
"""Those that need no other process."""


# -- which there are -------------------------------------------------------------------------------


def test_engines_may_stand_among_the_strategies() -> None:
    assert order_strategies("gockpt, torch-save,none,gockpt,dcp") == (
        "none", "gockpt", "torch-save", "dcp", "none",
    )  # fmt: skip
    assert not set(order_strategies(None)) & set(catalog.PEERS)  # only those that are asked for


def test_an_unknown_name_is_answered_with_the_nearest_engine() -> None:
    with pytest.raises(ConfigError, match="did you mean 'dcp-async'"):
        order_strategies("dcp-asynch")


def test_what_cannot_run_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"bench --model gpt-tiny --device cpu --strategies bytecheckpoint --dir {tmp_path}"
    assert call(line.split()) == 2
    said = capsys.readouterr().err
    assert "bytecheckpoint cannot run here: " in said
    assert "2.5.0" in said
    assert list(tmp_path.iterdir()) == []


def test_every_engine_runs_or_is_listed_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "torch":
            return "2.13.0"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    running, rest = catalog.sort_out(TASK)
    assert {*running, *dict(rest)} == set(catalog.PEERS)
    assert {"torch-save", "dcp", "dcp-async"} <= set(running)
    assert dict(rest)["torchsnapshot"] == (
        "torchsnapshot is not installed; pip install 'gockpt[peers]'"
    )


def test_a_package_that_cannot_be_imported_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = dataclasses.replace(catalog.PEERS["dcp"], adapter="dcp:NoSuchEngine")
    reason = broken.why_not(TASK)
    assert reason is not None
    assert "cannot be imported: AttributeError" in reason


def test_a_small_shared_memory_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = catalog.PEERS["dcp-async-process"]
    monkeypatch.setattr(catalog, "SHARED_MEMORY", Path("/no/such/place"))
    assert "/no/such/place" in (peer.why_not(TASK) or "")


def test_each_engine_states_its_durability_with_a_source() -> None:
    for peer in catalog.PEERS.values():
        assert (peer.durability is None) == (peer.obstacle is not None)
        assert peer.durability is None or ".py" in peer.durability.note


# -- what they are charged for ---------------------------------------------------------------------


@pytest.fixture
def emulated() -> Iterator[EmulatedDevice]:
    work = ModelledWork(forward_s=1.0, backward_s=1.0, update_s=0.1, shrink=1000)
    device = EmulatedDevice(load_profile("a100-pcie4"), work)
    yield device
    device.close()


def test_a_copy_takes_the_time_of_the_link(emulated: EmulatedDevice) -> None:
    link = Link(emulated)
    began = time.monotonic()
    with link.carrying(1_000_000, 3):
        pass
    assert time.monotonic() - began >= 0.95 * 1_000_000 / emulated.rates.link_alone
    with link.carrying(10, REHEARSAL):
        pass
    assert link.nbytes == 1_000_000
    (span,) = (one for one in emulated.recorder.drain() if one.step == 3)
    assert span.lane == "state"


def test_a_file_takes_the_time_of_the_disk_also_in_another_process(tmp_path: Path) -> None:
    path, disk = tmp_path / "file", Disk(1e6)
    sent = Disk.__new__(Disk)
    sent.__setstate__(disk.__getstate__())
    for one in (disk, sent):
        began = time.monotonic()
        with one.writing(path):
            path.write_bytes(bytes(20_000))
        assert time.monotonic() - began >= 0.02


def test_two_files_at_a_time_share_the_disk(tmp_path: Path) -> None:
    path, disk = tmp_path / "file", Disk(1e6)
    path.write_bytes(bytes(20_000))
    began = time.monotonic()
    with disk.writing(path), disk.writing(path):
        pass
    assert time.monotonic() - began >= 0.04


def test_a_real_device_is_charged_for_nothing() -> None:
    device = CpuDevice()
    host = Host.of(device)
    assert host.disk.rate is None
    with host.link.carrying(1 << 50, 1):
        pass
    device.close()


# -- that their checkpoints are right --------------------------------------------------------------


def state() -> State:
    torch.manual_seed(1)
    tensors = {
        "model.weight": torch.randn(33, 7),
        "model.half": torch.randn(6).bfloat16(),
        "optim.weight.step": torch.tensor(3.0),
    }
    return State(tensors=tensors, objects={"extras": {"data": {"position": 4}}})


def golden(of: State) -> dict[str, str]:
    return {name: tensor_hash(tensor) for name, tensor in of.tensors.items()}


@pytest.fixture(params=WITHIN)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    name: str = request.param
    if reason := catalog.PEERS[name].why_not(TASK):
        pytest.skip(reason)
    device = CpuDevice()
    found = catalog.start(name, tmp_path, Host.of(device))
    yield found
    found.close()
    device.close()
    del found
    with warnings.catch_warnings(action="ignore"):
        gc.collect()  # torchsnapshot leaves event loops open


def finish(engine: Engine, saving: Saving) -> None:
    deadline = time.monotonic() + 60
    while not saving.saved.done() and time.monotonic() < deadline:
        engine.poll()
        time.sleep(0.001)
    saving.saved.result(0)


@pytest.mark.filterwarnings("default")
def test_an_engine_holds_what_was_there_when_it_was_called(engine: Engine, tmp_path: Path) -> None:
    live = state()
    expected = golden(live)
    saving = engine.save(live, 3)
    saving.staged.result(60)
    for tensor in live.tensors.values():
        tensor.add_(1)
    finish(engine, saving)
    assert size(place(tmp_path, 3)) > live.nbytes
    assert check(engine, 3, live, expected) is None
    assert check(engine, 3, live, golden(live)) is not None


@pytest.mark.filterwarnings("default")
def test_an_altered_tensor_and_a_lost_file_are_found(engine: Engine, tmp_path: Path) -> None:
    live = state()
    expected = golden(live)
    finish(engine, engine.save(live, 3))
    path = place(tmp_path, 3)
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    raw = live.tensors["model.weight"].numpy().tobytes()
    (file,) = (one for one in files if raw in one.read_bytes())
    altered = bytearray(file.read_bytes())
    altered[altered.index(raw) + 40] ^= 1
    file.write_bytes(altered)
    found = check(engine, 3, live, expected)
    assert found == "step 3: 'model.weight' is not as in the golden run"
    file.unlink()
    assert "cannot be loaded" in (check(engine, 3, live, expected) or "")


# -- when they are called --------------------------------------------------------------------------


class Fake:
    """An engine whose checkpoints are done when the test says so."""

    def __init__(self, in_flight: int = 2, directory: Path | None = None) -> None:
        self.in_flight, self.directory = in_flight, directory
        self.calls: list[int] = []
        self.open: list[Future[Any]] = []
        self.staged: Future[Any] = done()

    def save(self, state: State, step: int) -> Saving:
        self.calls.append(step)
        if step == REHEARSAL and self.directory is not None:
            place(self.directory, step).write_bytes(b"x")
            return Saving(staged=done(), saved=done())
        self.open.append(Future())
        return Saving(staged=self.staged, saved=self.open[-1])

    def poll(self) -> None:
        """In a wait, time passes."""

    def load(self, step: int, into: dict[str, Tensor]) -> Mapping[str, Tensor]:
        return into

    def close(self) -> None: ...


def saver(engine: Engine, directory: Path, *, every: int = 1, rehearse: bool = False) -> Saver:
    return Saver(
        engine=engine, take=state, device=CpuDevice(), directory=directory, every=every,
        rehearse=rehearse,
    )  # fmt: skip


def test_a_full_engine_is_waited_for_and_that_is_stall(tmp_path: Path) -> None:
    class Slow(Fake):
        polls = 0

        def poll(self) -> None:
            self.polls += 1
            if self.polls == 4:  # the first three are those of the passes
                time.sleep(0.02)
                self.open[0].set_result(None)

    engine = Slow()
    ckpt = saver(engine, tmp_path)
    ckpt.step()
    ckpt.step()
    ckpt.step()
    assert engine.calls == [1, 2, 3]
    assert ckpt.in_flight_max == 2
    assert ckpt.device.blocked_seconds() >= 0.02
    for one in engine.open[1:]:
        one.set_result(None)
    ckpt.wait()
    assert all(ckpt.reached[step].saved is not None for step in (1, 2, 3))


def test_the_update_waits_until_the_state_is_copied(tmp_path: Path) -> None:
    class Copying(Fake):
        def poll(self) -> None:
            if self.calls and not self.staged.done():
                time.sleep(0.02)
                self.staged.set_result(None)

    engine = Copying()
    engine.staged = Future()
    ckpt = saver(engine, tmp_path)
    ckpt.step()
    assert not engine.staged.done()
    ckpt.before_update()
    assert engine.staged.done()
    assert ckpt.device.blocked_seconds() >= 0.02


def test_the_rehearsal_leaves_nothing(tmp_path: Path) -> None:
    engine = Fake(directory=tmp_path)
    ckpt = saver(engine, tmp_path, every=5, rehearse=True)
    for _ in range(3):
        ckpt.step()
    assert engine.calls == [REHEARSAL]
    assert (list(tmp_path.iterdir()), ckpt.reached, ckpt.in_flight_max) == ([], {}, 0)


def test_an_engine_that_fails_is_named_with_its_error(tmp_path: Path) -> None:
    engine = Fake()
    ckpt = saver(engine, tmp_path)
    ckpt.step()
    engine.open[0].set_exception(OSError("no space\nleft"))
    with pytest.raises(GockptError, match="its save failed by step 2: OSError: no space left"):
        ckpt.step()


# -- all together ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_run_with_engines_of_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    line = (
        "bench --model gpt-nano --device cpu --steps 6 --interval 3 --strategies "
        f"torch-save,dcp-async-process --dir {work} --db {tmp_path}/results.db "
        f"--json {tmp_path}/bench.json --markdown {tmp_path}/page.md"
    )
    code = call(line.split())
    out = capsys.readouterr().out
    assert code == 0, out
    document = json.loads((tmp_path / "bench.json").read_text())
    rows = {one["strategy"]: one for one in document["results"]}
    assert list(rows) == ["none", "torch-save", "dcp-async-process"]
    for name in ("torch-save", "dcp-async-process"):
        one = rows[name]
        assert one["valid"], one["problems"]
        assert one["checkpoints"]["identical"] == one["checkpoints"]["requested"] == 2
        assert one["bytes"]["persisted"] >= 2 * document["workload"]["state_bytes"]
        assert one["bytes"]["state"] >= 2 * document["workload"]["state_bytes"]
        assert one["latency_s"]["consistent"] <= one["latency_s"]["durable"]
        assert one["stall"]["blocked_s_per_checkpoint"] > 0
    assert "torch-save (torch 2." in out
    assert "NOT synced" in out
    page = (tmp_path / "page.md").read_text()
    assert "| torch-save |" in page
    assert "**Measured on `cpu`.**" in page
    assert list(work.iterdir()) == []


# -- the page --------------------------------------------------------------------------------------


def test_the_page_says_emulated_and_what_did_not_run() -> None:
    figures = {
        "strategy": "dcp", "valid": True, "problems": [], "relative_throughput": 0.5,
        "stall": {"blocked_s_per_checkpoint": 1.5, "excess_s_per_checkpoint": 1.6},
        "loop_s": 2.0, "drain_s": 0.0, "windows": 0, "fallbacks": [],
        "bytes": {"state": 5, "gradients": 0, "persisted": 5},
        "latency_s": {"consistent": 1.5, "durable": 1.5},
        "checkpoints": {"requested": 3, "identical": 3, "in_flight_max": 1},
        "memory_bytes": {"trainer_added": 1_000_000, "agent_added": 0, "predicted": None},
    }  # fmt: skip
    none = {**figures, "strategy": "none", "relative_throughput": 1.0}
    page = bench_markdown.page(
        {
            "run_id": "r1",
            "environment": {
                "device": "emulated:a100-pcie4", "emulated": True, "profile": "a100-pcie4",
                "shrink": 8, "python": "3.11", "torch": "2.13.0", "git_sha": "abc",
            },
            "workload": {
                "model": "gpt-1.3b", "precision": "bf16-master", "tokens_per_step": 4096,
                "steps": 36, "interval": 12, "seed": 0,
                "params": 1_315_723_264, "device_params": 3_379_600,
            },
            "results": [none, figures, none],
            "engines": [
                {"strategy": "dcp", "version": "torch 2.13.0", "fsync": True, "atomic": True,
                 "verified": False, "note": "see filesystem.py"},
            ],
            "not_run": [{"strategy": "bytecheckpoint", "reason": "it does not install"}],
        },
        "2 cores",
    )  # fmt: skip
    assert "**Emulated by the profile `a100-pcie4`**" in page
    assert "has 389 times fewer parameters" in page
    assert "| dcp | 50.00 % | 1.50 s | 1.60 s |" in page
    assert "| 1 | 3 of 3 | 1 MB | yes, yes, **no** |" in page
    assert "- **dcp** (torch 2.13.0): synced to disk, atomic, NOT verified when read; see" in page
    assert "--strategies dcp --peers --markdown FILE" in page
    assert "- bytecheckpoint: it does not install." in page
