"""Trainers and agents that are killed at every state of a slot; what comes after them goes on with
the newest committed step or a later one, bit for bit, from memory where there is memory.

The trainers that die are processes of takeover_kit; the one that comes after is this process.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from identity_kit import Bag, Truth, assert_same, checkpointer, one_pass, truth
from takeover_kit import EVERY, STATES, WINDOWS
from test_agent import DEADLINE, client_of, committed, gone, hello_for, until

import gockpt
from gockpt import storage
from gockpt.agent import inbox as inbox_module
from gockpt.agent import takeover
from gockpt.agent.protocol import PROTOCOL, Ask
from gockpt.agent.rendezvous import Door, Guest, key, knock, meeting_place, sockets
from gockpt.cli.main import call
from gockpt.faults import Fault
from gockpt.storage.lock import Lock, holder


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A trainer that waits to be killed, and its agent."""

    path: Path
    trainer: int
    agent: int
    child: int

    def kill(self, who: str) -> None:
        """SIGKILL the trainer, or ``both``; return when they are gone."""
        pids = (self.trainer, self.agent) if who == "both" else (self.trainer,)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            until(lambda pid=pid: gone(pid), "its end")  # type: ignore[misc]

    @property
    def sockets(self) -> list[Path]:
        return sockets(meeting_place(), key(self.path, 0))


Start = Callable[..., Victim]


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    """What trainers are forked from: torch is imported once."""
    kit = Path(__file__).parent / "takeover_kit.py"
    with subprocess.Popen(
        [sys.executable, str(kit)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        yield process
        process.kill()


@pytest.fixture
def start(nursery: subprocess.Popen[str], tmp_path: Path) -> Iterator[Start]:
    victims: list[Victim] = []

    def begin(
        state: str,
        *,
        linger: float = 60.0,
        fork: bool = False,
        slots: int = 2,
        resume: bool = False,
    ) -> Victim:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        order = {
            "path": str(tmp_path),
            "state": state,
            "linger": linger,
            "fork": fork,
            "slots": slots,
            "resume": resume,
        }
        nursery.stdin.write(json.dumps(order) + "\n")
        nursery.stdin.flush()
        said = json.loads(nursery.stdout.readline())
        victims.append(Victim(path=tmp_path, agent=agent_of(tmp_path), **said))
        return victims[-1]

    yield begin
    for victim in victims:
        for pid in (victim.trainer, victim.agent, victim.child):
            with contextlib.suppress(ProcessLookupError):
                if pid:
                    os.kill(pid, signal.SIGKILL)


def agent_of(path: Path) -> int:
    pid = holder(path / ".gockpt" / "rank-00000.lock")["pid"]
    assert isinstance(pid, int)
    return pid


def state_of(step: int) -> Truth:
    """What a training that never stopped holds after this step."""
    twin = Bag()
    for number in range(1, step + 1):
        twin.compute(number)
        twin.update(number)
    return truth(twin)


def successor(path: Path, training: Bag, **arguments: Any) -> gockpt.Checkpointer:
    settings = {"every": EVERY, "windows": WINDOWS, "agent": "process"} | arguments
    return checkpointer(training, path, **settings)


def go_on(ckpt: gockpt.Checkpointer, training: Bag, last: int) -> None:
    for step in range(ckpt.current_step + 1, last + 1):
        one_pass(ckpt, training, step)
        ckpt.step()


def restored_right(ckpt: gockpt.Checkpointer, training: Bag, step: int | None) -> gockpt.Restored:
    restored = ckpt.restore(step)
    assert restored is not None
    assert_same(truth(training), state_of(restored.step), f"restored, step {restored.step}")
    return restored


def all_good(path: Path, steps: set[int]) -> None:
    """Exactly these are committed, and each is what it should be."""
    assert committed(path) == steps
    for step in steps:
        found = gockpt.open(path, step)
        assert found.verify() == []
        assert_same(found.load(), state_of(step), f"committed, step {step}")


# -- killed at every state of a slot ---------------------------------------------------------------


@pytest.mark.parametrize("state", [state for state in STATES if state != "free"])
def test_the_trainer_is_killed(state: str, start: Start) -> None:
    victim, newest = start(state), STATES[state][2]
    victim.kill("trainer")
    training = Bag(99)
    with successor(victim.path, training) as ckpt:
        assert agent_of(victim.path) == victim.agent
        restored = restored_right(ckpt, training, None)
        assert (restored.step, restored.source, restored.problems) == (newest, "memory", ())
        go_on(ckpt, training, restored.step + EVERY)
    expected = set(range(EVERY, restored.step + EVERY + 1, EVERY))
    all_good(victim.path, expected)
    until(lambda: gone(victim.agent), "the agent's end")
    assert victim.sockets == []


@pytest.mark.parametrize("state", STATES)
def test_trainer_and_agent_are_killed(state: str, start: Start) -> None:
    victim = start(state)
    victim.kill("both")
    newest = storage.newest(victim.path)
    training = Bag(99)
    with successor(victim.path, training) as ckpt:
        assert agent_of(victim.path) != victim.agent
        if newest is None:
            assert state == "free"
            assert ckpt.restore() is None
        else:
            restored = restored_right(ckpt, training, None)
            assert (restored.step, restored.source) == (newest.step, "ssd")
            assert restored.step >= EVERY
    assert victim.sockets == []


def test_a_trainer_killed_before_its_first_checkpoint_leaves_nothing(start: Start) -> None:
    victim = start("free")
    victim.kill("trainer")
    until(lambda: gone(victim.agent), "the agent's end")
    assert victim.sockets == []
    with successor(victim.path, Bag()) as ckpt:
        assert ckpt.restore() is None


def test_one_takes_over_from_another_again_and_again(start: Start) -> None:
    victim = start("retained")
    victim.kill("trainer")
    again = start("filling")  # a trainer that restores nothing, and gets as far as step 4 and 7
    assert again.agent == victim.agent
    again.kill("trainer")
    training = Bag(99)
    with successor(victim.path, training) as ckpt:
        assert agent_of(victim.path) == victim.agent
        restored = restored_right(ckpt, training, None)
        # The newest is what was taken last, not what has the highest step.
        assert (restored.step, restored.source) == (4, "memory")
        sequences = [gockpt.open(one).info.sequence for one in victim.path.glob("step-*")]
        assert sorted(sequences) == [1, 2, 3]
        runs = {gockpt.open(one).info.run_id for one in victim.path.glob("step-*")}
        assert len(runs) == 1


def test_what_earlier_trainers_went_on_from_does_not_stay(start: Start) -> None:
    first = start("retained")
    first.kill("trainer")
    for _ in range(3):
        again = start("retained", resume=True)  # each goes on from the newest of the one before
        assert again.agent == first.agent
        again.kill("trainer")
    training = Bag(99)
    with successor(first.path, training, keep=1) as ckpt:
        came_from = ckpt.restore()
        assert came_from is not None
        go_on(ckpt, training, ckpt.current_step + EVERY)
    # The newest, and the one that this trainer went on from: those of the others have gone.
    left = {path.name for path in first.path.glob("step-*")}
    assert came_from.path.name in left
    assert len(left) == 2


# -- which agent is taken over, and which is not ---------------------------------------------------


def test_a_living_trainer_is_named(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "PATIENCE", 0.1)
    victim = start("retained")
    with pytest.raises(gockpt.LockedError, match=f"in use by trainer {victim.trainer}"):
        successor(victim.path, Bag())
    assert not gone(victim.agent)


@pytest.mark.parametrize("before", [False, True], ids=["new", "taken-over"])
def test_of_two_that_start_at_once_one_has_the_directory(
    before: bool, nursery: subprocess.Popen[str], start: Start, tmp_path: Path
) -> None:
    """Be it that there is no agent yet, or that one waits to be taken over."""
    if before:
        start("retained").kill("trainer")
    order = {"path": str(tmp_path), "state": "retained", "linger": 0.0, "fork": False}
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    nursery.stdin.write(2 * (json.dumps(order | {"slots": 2, "resume": True}) + "\n"))
    nursery.stdin.flush()
    said = [json.loads(nursery.stdout.readline()) for _ in range(2)]
    (winner,) = [one["trainer"] for one in said if "trainer" in one]
    agent = agent_of(tmp_path)
    try:
        (error,) = [one["error"] for one in said if "error" in one]
        assert f"in use by trainer {winner} (its agent is {agent})" in error
    finally:
        os.kill(winner, signal.SIGKILL)
    until(lambda: gone(agent), "its end")
    assert sockets(meeting_place(), key(tmp_path, 0)) == []
    assert all(gockpt.open(one).verify() == [] for one in tmp_path.glob("step-*"))


@pytest.mark.parametrize("shapes", [((9, 65), (3,)), ((400, 65), (130,), (2000,))])
def test_another_model_takes_nothing_over_and_harms_nothing(
    shapes: tuple[tuple[int, ...], ...], start: Start
) -> None:
    """A smaller one uses the memory as it is; a larger one gets its own. What was there stays."""
    victim = start("consistent")  # step 12 is not written yet
    victim.kill("trainer")
    training = Bag(5, shapes=shapes)
    untouched = truth(training)
    with successor(victim.path, training, when_busy="wait") as ckpt:
        assert agent_of(victim.path) == victim.agent
        with pytest.raises(gockpt.StateError, match="model"):
            ckpt.restore()
        assert_same(truth(training), untouched, "after a restore that was refused")
        for step in range(1, 9):
            one_pass(ckpt, training, step)
            ckpt.step()
            if step == 4:
                first = truth(training)
    for step in (4, 8, 12):  # the earlier model's
        found = [gockpt.open(one) for one in victim.path.glob(f"step-{step:09d}-*")]
        found.sort(key=lambda one: one.info.sequence)
        assert [one.verify() for one in found] == [[] for _ in found]
        assert_same(found[0].load(), state_of(step), f"the earlier model's step {step}")
        if step == 4:
            assert_same(found[1].load(), first, "the new model's step 4")


def test_a_fork_that_holds_the_socket_is_no_trainer(start: Start) -> None:
    victim = start("retained", fork=True)
    victim.kill("trainer")
    assert not gone(victim.child)
    training = Bag(99)
    with successor(victim.path, training) as ckpt:
        assert restored_right(ckpt, training, None).source == "memory"


def test_another_lock_file_means_another_directory(start: Start) -> None:
    victim = start("retained")
    victim.kill("trainer")
    (victim.path / ".gockpt" / "rank-00000.lock").unlink()
    training = Bag(99)
    with successor(victim.path, training) as ckpt:
        restored = restored_right(ckpt, training, None)
        assert (restored.step, restored.source) == (8, "ssd")
    until(lambda: gone(victim.agent), "the end of an agent that nobody can use")


def test_another_protocol_is_not_served_and_not_waited_for(start: Start) -> None:
    victim = start("retained")
    victim.kill("trainer")
    hello = hello_for(victim.path, protocol=PROTOCOL + 1, meeting=str(meeting_place()))
    assert takeover.inherit(hello) is None
    until(lambda: gone(victim.agent), "its end")


def test_memory_that_does_not_fit_is_written_and_given_back(start: Start) -> None:
    victim = start("persisting")
    victim.kill("trainer")
    training = Bag(99)
    with successor(victim.path, training, slots=3) as ckpt:
        assert agent_of(victim.path) == victim.agent
        restored = restored_right(ckpt, training, None)
        assert (restored.step, restored.source) == (8, "ssd")
        go_on(ckpt, training, 12)
    all_good(victim.path, {4, 8, 12})


def test_what_lay_in_a_slot_that_is_no_more_is_not_offered(start: Start) -> None:
    victim = start("consistent", slots=4)  # held up: step 4, 8 and 12 lie in slots of their own
    victim.kill("trainer")
    training = Bag(99)
    with successor(victim.path, training, slots=2) as ckpt:
        assert agent_of(victim.path) == victim.agent
        restored = restored_right(ckpt, training, None)
        assert (restored.step, restored.source) == (12, "ssd")
        go_on(ckpt, training, 16)
    all_good(victim.path, {4, 8, 12, 16})


def test_an_agent_that_is_stuck_does_not_hang_the_start(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "ANSWER", 0.3)
    monkeypatch.setattr(takeover, "PATIENCE", 0.1)
    victim = start("retained")
    os.kill(victim.agent, signal.SIGSTOP)
    with pytest.raises(gockpt.LockedError, match=f"agent {victim.agent}, which is stuck"):
        successor(victim.path, Bag())
    victim.kill("trainer")
    training = Bag(99)
    with successor(victim.path, training) as ckpt:
        assert gone(victim.agent)
        assert restored_right(ckpt, training, None).source == "ssd"


def test_one_that_cannot_be_met_is_given_time_to_finish(start: Start) -> None:
    victim = start("persisting", linger=0)
    for path in victim.sockets:
        path.unlink()
    victim.kill("trainer")
    training = Bag(99)
    with successor(victim.path, training) as ckpt:
        until(lambda: gone(victim.agent), "the end of the one that gave up its lock")
        restored = restored_right(ckpt, training, None)
        assert (restored.step, restored.source) == (8, "ssd")


# -- lingering -------------------------------------------------------------------------------------


@pytest.mark.parametrize("linger", [0.0, 0.5])
def test_what_is_complete_is_written_and_nothing_stays(linger: float, start: Start) -> None:
    victim = start("consistent", linger=linger)
    victim.kill("trainer")
    until(lambda: gone(victim.agent), "the end of its patience")
    assert victim.sockets == []
    all_good(victim.path, {4, 8, 12})
    Lock.acquire(victim.path, 0, {}).release()


def test_the_command_lists_and_stops(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    def row() -> Any:
        assert call(["agents", "--json", "-"]) == 0
        agents = json.loads(capsys.readouterr().out)["agents"]
        return next(one for one in agents if one["pid"] == victim.agent)

    victim = start("retained")
    assert row()["trainer"] == victim.trainer
    assert call(["agents", "--stop", str(victim.agent)]) == 2
    assert f"in use by trainer {victim.trainer}" in capsys.readouterr().err
    assert not gone(victim.agent)
    victim.kill("trainer")
    until(lambda: row()["trainer"] is None, "its death to be seen")
    found = row()
    assert (found["directory"], found["rank"]) == (str(victim.path), 0)
    assert found["steps"] == [4, 8]
    assert 0 < found["seconds_left"] <= 60
    assert found["bytes"] > 0
    assert call(["agents"]) == 0
    assert "lingering" in capsys.readouterr().out
    assert call(["agents", "--stop", str(victim.path)]) == 0
    until(lambda: gone(victim.agent), "its end")
    assert call(["agents", "--stop", str(victim.path)]) == 2
    assert "no agent" in capsys.readouterr().err


# -- memory, and when it is not used ---------------------------------------------------------------


def flip_a_bit(agent: int) -> None:
    """In every slot of an agent, in the middle, while nobody looks."""
    fds = Path(f"/proc/{agent}/fd").iterdir()
    slots = {fd.stat().st_ino: fd for fd in fds if "gockpt-slot" in os.readlink(fd)}
    for fd in slots.values():
        with fd.open("r+b", buffering=0) as file, mmap.mmap(file.fileno(), 0) as memory:
            memory[64] ^= 1


def test_one_bit_that_changed_in_memory_is_found(start: Start) -> None:
    victim = start("retained")
    victim.kill("trainer")
    flip_a_bit(victim.agent)
    training = Bag(99)
    with successor(victim.path, training) as ckpt:
        restored = restored_right(ckpt, training, None)
        assert (restored.step, restored.source) == (8, "ssd")
    assert len(restored.problems) == 1
    assert "in memory are not those that were written" in restored.problems[0]
    assert "model.list.0" in restored.problems[0]


def test_memory_gives_the_step_that_is_asked_for(start: Start) -> None:
    victim = start("retained")
    victim.kill("trainer")
    with successor(victim.path, training := Bag(99)) as ckpt:
        for step in (4, 8, 4):
            assert restored_right(ckpt, training, step).source == "memory"
        with pytest.raises(gockpt.NoCheckpointError, match="no checkpoint of step 5, only of 4, 8"):
            ckpt.restore(5)


def trained(path: Path, **arguments: Any) -> tuple[gockpt.Checkpointer, Bag]:
    """A training in this process, with checkpoints of steps 4 and 8 in memory and on disk."""
    settings = {"every": EVERY, "windows": WINDOWS} | arguments
    ckpt = checkpointer(training := Bag(), path, **settings)
    go_on(ckpt, training, 5)
    ckpt.wait(DEADLINE)
    go_on(ckpt, training, 9)
    ckpt.wait(DEADLINE)
    return ckpt, training


def test_a_training_goes_back_by_memory(tmp_path: Path) -> None:
    ckpt, training = trained(tmp_path)
    with ckpt:
        assert restored_right(ckpt, training, None).source == "memory"
        go_on(ckpt, training, 13)
    all_good(tmp_path, {4, 8, 12})


def test_what_was_deleted_does_not_come_back(tmp_path: Path) -> None:
    ckpt, training = trained(tmp_path)
    with ckpt:
        for one in tmp_path.glob("step-000000008-*"):
            one.rename(tmp_path / "elsewhere")
        assert restored_right(ckpt, training, None).step == 4
        for one in tmp_path.glob("step-000000004-*"):
            one.rename(tmp_path / "elsewhere-too")
        assert ckpt.restore() is None


def test_memory_helps_where_the_disk_is_damaged(tmp_path: Path) -> None:
    ckpt, training = trained(tmp_path)
    with ckpt:
        newest = next(tmp_path.glob("step-000000008-*"))
        (newest / "rank-00000.safetensors").write_bytes(b"damaged")
        assert restored_right(ckpt, training, None).step == 8


def test_only_what_was_restored_from_last_is_spared(tmp_path: Path) -> None:
    ckpt = successor(tmp_path, training := Bag(), agent="thread", keep=1)
    with ckpt:
        for target in (4, 8):
            go_on(ckpt, training, target + 1)
            ckpt.wait(DEADLINE)
            restored_right(ckpt, training, target)
        assert committed(tmp_path) == {4, 8}  # the one from before is spared, and the newest stays
        go_on(ckpt, training, 13)
    all_good(tmp_path, {8, 12})


def test_a_newer_checkpoint_on_disk_goes_before_memory(tmp_path: Path) -> None:
    """A run that went on elsewhere was copied back."""
    ckpt, training = trained(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there", ignore=lambda *_: [".gockpt"])
    with ckpt:
        moved = Bag(99)
        with checkpointer(moved, tmp_path / "there", every=EVERY, windows=WINDOWS) as there:
            there.restore()
            go_on(there, moved, 12)
        newest = next((tmp_path / "there").glob("step-000000012-*"))
        shutil.copytree(newest, tmp_path / "here" / newest.name)
        restored = restored_right(ckpt, training, None)
        assert (restored.step, restored.source) == (12, "ssd")


def test_a_run_keeps_its_name(tmp_path: Path) -> None:
    for _ in range(2):
        ckpt, _ = trained(tmp_path)
        ckpt.close()
    found = [gockpt.open(one).info for one in tmp_path.glob("step-*")]
    assert len(found) == 4
    assert len({one.run_id for one in found}) == 1
    assert len({one.launch_id for one in found}) == 2


# -- an agent that hangs ---------------------------------------------------------------------------


def test_an_agent_that_hangs_is_replaced_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_module, "SILENCE", 2.0)
    ckpt, training = trained(tmp_path, agent="process", when_busy="skip")
    with ckpt:
        first = agent_of(tmp_path)
        os.kill(first, signal.SIGSTOP)
        began = time.monotonic()
        go_on(ckpt, training, 12)
        assert time.monotonic() - began < 1.0  # nobody waits for it
        until(lambda: client_of(ckpt).generation == 2 and client_of(ckpt).ready, "a new agent")
        assert gone(first)
        ckpt.wait(DEADLINE)  # so that a slot is free again
        go_on(ckpt, training, 16)
        ckpt.wait(DEADLINE)
    assert {4, 8, 16} <= committed(tmp_path)


STOPPED = {"filling": ("replay.update", 2, 7, 1), "persisting": ("output.written", 1, 9, 3)}
"""State of step 8's slot → where the agent is stopped, at which pass of that point and of the loop,
and in how many windows step 8 is there all the same."""


@pytest.mark.parametrize("state", STOPPED)
def test_an_agent_that_is_stopped_at_work_is_replaced(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was being captured is taken by one copy; what was proved is written by the next one."""
    monkeypatch.setattr(inbox_module, "SILENCE", 2.0)
    point, after, passes, windows = STOPPED[state]
    stop = Fault(point=point, action="stop", after=after)
    with successor(tmp_path, training := Bag(), faults=[stop]) as ckpt:
        client, first = client_of(ckpt), agent_of(tmp_path)
        go_on(ckpt, training, 5)
        ckpt.wait(DEADLINE)
        go_on(ckpt, training, passes)
        until(lambda: client.generation == 2 and client.ready, "a new agent")
        assert gone(first)
        go_on(ckpt, training, 9)
    all_good(tmp_path, {4, 8})
    assert gockpt.open(tmp_path, 8).info.windows == windows


# -- the socket and its directory ------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"gockpt-{os.getuid()}"


def test_the_directory_is_the_users_alone(elsewhere: Path) -> None:
    assert meeting_place() == elsewhere
    assert elsewhere.stat().st_mode & 0o777 == 0o700
    assert meeting_place() == elsewhere


@pytest.mark.parametrize("make", ["mode", "owner", "file", "link"])
def test_a_directory_that_others_could_enter_is_refused(make: str, elsewhere: Path) -> None:
    if make == "mode":
        elsewhere.mkdir()
        elsewhere.chmod(0o755)
    elif make == "owner":
        if os.getuid() != 0:
            pytest.skip("only root can give a directory away")
        elsewhere.mkdir(mode=0o700)
        os.chown(elsewhere, 65534, 65534)
    elif make == "file":
        elsewhere.write_bytes(b"")
    else:
        (elsewhere.parent / "real").mkdir(mode=0o700)
        elsewhere.symlink_to(elsewhere.parent / "real")
    with pytest.raises(gockpt.AgentError, match=r"must be a directory of user \d+ with mode 700"):
        checkpointer(Bag(), elsewhere.parent / "ckpt", agent="process")
    assert not (elsewhere.parent / "ckpt").exists()


def test_a_thread_needs_no_such_directory(elsewhere: Path) -> None:
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    with checkpointer(Bag(), elsewhere.parent / "ckpt", agent="thread") as ckpt:
        assert ckpt.restore() is None


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = socket.socketpair()
    with two:
        monkeypatch.setattr(os, "getuid", lambda: 4711)
        with pytest.raises(ConnectionError, match="the other side is of user"):
            Guest(one)
        assert one.fileno() == -1


def test_a_socket_that_nobody_listens_at_is_removed(elsewhere: Path) -> None:
    place = meeting_place()
    door = Door(place, key(elsewhere, 0))
    (path,) = sockets(place, key(elsewhere, 0))
    door._socket.close()  # as if it had been killed
    assert knock(path, 1.0) is None
    assert sockets(place) == []


def test_a_door_lets_one_in_after_the_other(elsewhere: Path) -> None:
    place = meeting_place()
    door = Door(place, key(elsewhere, 3))
    assert door.guest() is None
    outside = knock(sockets(place)[0], 1.0)
    inside = door.guest()
    assert outside is not None
    assert inside is not None
    assert outside.pid == inside.pid == os.getpid()
    outside.channel.send(Ask())
    assert inside.channel.receive(5) == (Ask(), None)
    for one in (outside, inside):
        one.channel.close()
    door.close()
    assert sockets(place) == []
