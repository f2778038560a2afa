"""Coming and going at run time, by hand and by file."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings, load
from pdproxy.errors import ConfigError, InstanceConflict, InvalidRequest, NoSuchInstance
from pdproxy.fleet.file_watch import FileWatch
from pdproxy.fleet.membership import Membership
from pdproxy.fleet.pool import Pool
from pdproxy.fleet.roster import Entry, Roster
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fleet import ClosableClient, Held, make_admission, make_instance, make_ready, settings
from tests.fakes.proxy_harness import proxy_in_front_of, until


def check(fleet: Sequence[InstanceSettings]) -> None:
    Settings(port=0, proxy_port=0).check_instances(fleet)


def make_membership(*names: str) -> tuple[Pool, Membership]:
    admission = make_admission()
    fleet = (make_instance(name, "prefill" if name[0] == "p" else "decode", admission=admission) for name in names)
    pool = Pool(admission, map(make_ready, fleet))
    return pool, Membership(pool, make_instance=partial(make_instance, admission=admission), check=check)


def present(pool: Pool) -> list[str]:
    return [instance.name for instance in pool.instances]


# ── by hand ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_added_once() -> None:
    pool, membership = make_membership("d0")
    membership.add(settings("d1"))
    assert present(pool) == ["d0", "d1"]
    with pytest.raises(InstanceConflict, match="name 'd1'"):
        membership.add(settings("d1", url="http://elsewhere:1"))
    with pytest.raises(InstanceConflict, match="url 'http://d1:1/'"):
        membership.add(settings("d2", url="http://d1:1/"))


def test_what_could_not_be_configured_cannot_be_added() -> None:
    pool, membership = make_membership("d0")
    with pytest.raises(InvalidRequest, match="is not http"):
        membership.add(settings("d1", url="d1:1"))
    membership.add(settings("d2", chunk_size=16))
    with pytest.raises(InvalidRequest, match="chunk_size"):
        membership.add(settings("p2", "prefill", chunk_size=32))
    assert present(pool) == ["d0", "d2"]


@pytest.mark.parametrize("bad", [(), (3,), (0, 5, 6, 11)])
def test_many_that_join_at_once_are_checked_together(bad: tuple[int, ...]) -> None:
    """A check reads the whole fleet. Those who join together cost one, and one with a mistake keeps nobody else out."""
    num_checks = 0

    def counted(fleet: Sequence[InstanceSettings]) -> None:
        nonlocal num_checks
        num_checks += 1
        check(fleet)

    admission = make_admission()
    pool = Pool(admission, map(make_ready, [make_instance("d0", admission=admission)]))
    membership = Membership(pool, make_instance=partial(make_instance, admission=admission), check=counted)
    roster = Roster("it", membership, pool)
    # A url that is none, one that a member has, and one that another newcomer has.
    urls = {0: "d1:1", 3: "http://d0:1", 5: "http://d0:1/", 6: "http://p:1", 11: "http://p:1"}
    many = [
        settings(f"n{number}", url=urls[number]) if number in bad else settings(f"n{number}") for number in range(64)
    ]
    roster.want(map(Entry, many))
    roster.converge()
    refused = [f"n{number}" for number in bad if number != 6]
    assert present(pool) == ["d0", *(one.name for one in many if one.name not in refused)]
    assert num_checks <= 1 + 16 * len(refused)
    assert roster.is_done == (not refused)


def test_chunk_sizes_are_compared_across_unknown_models() -> None:
    fleet = [settings(f"d{number}", chunk_size=16, model=model) for number, model in enumerate(("a", "a", None, "b"))]
    check(fleet)
    for model in ("a", None, "c"):
        with pytest.raises(ConfigError, match="tokens per page"):
            check([*fleet, settings("x", chunk_size=32, model=model)])
    check([fleet[0], settings("x", chunk_size=32, model="c")])


async def test_a_busy_one_is_removed_by_force_only_and_its_client_closed_when_it_is_idle() -> None:
    pool, membership = make_membership("d0")
    instance = pool.instances[0]
    client = instance.client
    assert isinstance(client, ClosableClient)
    era = instance.leg_started()
    with pytest.raises(InstanceConflict, match="force"):
        membership.remove("d0", force=False)
    assert present(pool) == ["d0"]
    membership.remove("d0", force=True)
    await membership.sweep()
    assert (present(pool), client.is_closed) == ([], False)
    instance.leg_finished(era, "ok")
    await membership.sweep()
    assert client.is_closed
    membership.add(settings("d0"))


async def test_an_idle_one_is_removed_at_once() -> None:
    pool, membership = make_membership("d0")
    membership.remove("d0", force=False)
    await membership.sweep()
    assert pool.leaving == ()


def test_drained_it_gets_nothing_new_and_stays() -> None:
    pool, membership = make_membership("d0")
    membership.drain("d0")
    assert present(pool) == ["d0"]
    assert not pool.instances[0].is_routable


def test_who_is_not_there() -> None:
    _, membership = make_membership("d0")
    for act in (membership.drain, membership.retire, lambda name: membership.remove(name, force=True)):
        with pytest.raises(NoSuchInstance, match="there are 'd0'"):
            act("d9")


async def test_run_lets_go_of_who_has_left() -> None:
    pool, membership = make_membership("d0")
    running = asyncio.ensure_future(membership.run())
    await asyncio.sleep(0)
    client = pool.instances[0].client
    assert isinstance(client, ClosableClient)
    membership.retire("d0")
    async with asyncio.timeout(5):
        while not client.is_closed:  # noqa: ASYNC110
            await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


# ── by file ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class File:
    """A file, and what is read from it: whatever a test says it means."""

    def __init__(self, path: Path, pool: Pool, membership: Membership) -> None:
        self.path = path
        self.fleet: list[InstanceSettings] = [instance.settings for instance in pool.instances]
        self.num_read = 0
        self._num_written = 0
        self.write()
        roster = Roster(str(path), membership, pool, present=map(Entry, self.fleet))
        self.watch = FileWatch(path, self.read, roster, interval_s=1.0)

    def write(self) -> None:
        self._num_written += 1
        self.path.write_text("x" * self._num_written)

    def read(self) -> list[InstanceSettings]:
        self.num_read += 1
        if not self.fleet:
            raise ConfigError("instances: nobody")
        return self.fleet

    async def change(self, *fleet: InstanceSettings) -> None:
        """Written, and looked at until it counts."""
        self.fleet = list(fleet)
        self.write()
        await self.watch.look()
        await self.watch.look()


async def test_the_fleet_follows_the_file(tmp_path: Path) -> None:
    pool, membership = make_membership("p0", "d0")
    file = File(tmp_path / "fleet.toml", pool, membership)
    p0, d0 = file.fleet
    await file.watch.look()
    assert file.num_read == 0, "nothing has changed"
    await file.change(p0, d0, settings("d1"))
    assert present(pool) == ["p0", "d0", "d1"]
    await file.change(p0, settings("d1"))
    assert present(pool) == ["p0", "d1"]
    assert [instance.name for instance in pool.leaving] == ["d0"]


async def test_a_file_still_being_written_is_left_alone(tmp_path: Path) -> None:
    pool, membership = make_membership("p0", "d0")
    file = File(tmp_path / "fleet.toml", pool, membership)
    p0, d0 = file.fleet
    file.fleet = [p0]  # the first half
    file.write()
    await file.watch.look()
    file.fleet = [p0, d0, settings("d1")]
    file.write()
    await file.watch.look()
    assert file.num_read == 0
    await file.watch.look()
    assert present(pool) == ["p0", "d0", "d1"]


async def test_a_broken_or_missing_file_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool, membership = make_membership("p0", "d0")
    file = File(tmp_path / "fleet.toml", pool, membership)
    await file.change()
    assert present(pool) == ["p0", "d0"]
    assert "instances: nobody" in caplog.text
    num_lines = len(caplog.records)
    await file.watch.look()
    assert len(caplog.records) == num_lines, "said once"
    file.path.unlink()
    await file.watch.look()
    await file.watch.look()
    assert present(pool) == ["p0", "d0"]
    await file.change(settings("p0", "prefill"), settings("d0"), settings("d1"))
    assert present(pool) == ["p0", "d0", "d1"]


async def test_a_file_that_was_replaced_with_one_of_equal_size_and_time(tmp_path: Path) -> None:
    pool, membership = make_membership("p0", "d0")
    file = File(tmp_path / "fleet.toml", pool, membership)
    stat = file.path.stat()
    file.fleet = [*file.fleet, settings("d1")]
    other = tmp_path / "other"
    other.write_bytes(file.path.read_bytes())
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.rename(file.path)
    await file.watch.look()
    await file.watch.look()
    assert present(pool) == ["p0", "d0", "d1"]


async def test_one_that_changed_comes_back_as_the_new_one_at_once_with_the_same_pages(tmp_path: Path) -> None:
    """One process has one account, whatever it is called and however often its settings change."""
    pool, membership = make_membership("p0", "d0")
    file = File(tmp_path / "fleet.toml", pool, membership)
    p0, d0 = file.fleet
    old = pool.instances[1]
    era, held = old.leg_started(), await Held(old, 4).wait()
    await file.change(p0, d0.model_copy(update={"receiver_ports": (7300,)}))
    await file.watch.look()
    assert present(pool) == ["p0", "d0"]
    new = pool.instances[1]
    assert new.settings.receiver_ports == (7300,)
    assert (old.held, new.held) == (0, 4)
    assert pool.leaving == (old,), "its leg is under way"
    old.leg_finished(era, "ok")
    await membership.sweep()
    assert pool.leaving == ()
    held.release()
    assert new.is_idle


async def test_what_was_done_by_hand_stays_as_it_is(tmp_path: Path) -> None:
    pool, membership = make_membership("p0", "d0")
    file = File(tmp_path / "fleet.toml", pool, membership)
    p0, d0 = file.fleet
    membership.add(settings("by-hand"))
    membership.remove("d0", force=False)
    await membership.sweep()
    await file.change(p0, d0, settings("d1"))
    assert present(pool) == ["p0", "by-hand", "d1"]


def test_reread_reads_the_file_again(tmp_path: Path) -> None:
    path = tmp_path / "proxy.toml"
    table = '[[instances]]\nname = "{}"\nrole = "{}"\nurl = "http://{}:1"\n'
    path.write_text(table.format("p0", "prefill", "p0") + table.format("d0", "decode", "d0"))
    makers = (lambda: load(["--config", str(path), "--decode", "http://d1:1"]), lambda: Settings(config=path))
    for make in makers:
        now = make()
        before = {one.name for one in now.fleet()}
        with path.open("a") as file:
            file.write(table.format(f"new-{make is makers[0]}", "decode", f"new-{make is makers[0]}"))
        assert {one.name for one in now.reread().fleet()} - before == {f"new-{make is makers[0]}"}
    path.write_text("[[instances")
    with pytest.raises(ConfigError, match="not valid TOML"):
        now.reread()


async def test_a_running_proxy_follows_its_config_file(tmp_path: Path) -> None:
    path = tmp_path / "proxy.toml"
    table = '[[instances]]\nname = "{}"\nrole = "{}"\nurl = "http://{}:1"\n'
    path.write_text(table.format("p0", "prefill", "p0") + table.format("d0", "decode", "d0"))
    decoders = [FakeEngine("decode"), FakeEngine("decode")]
    instances = Settings(config=path).instances
    async with proxy_in_front_of(decoders=decoders, config=path, instances=instances) as house:
        path.write_text(table.format("p0", "prefill", "p0") + table.format("d1", "decode", "d1"))
        await until(lambda: present(house.proxy.pool) == ["p0", "d1"])
        await until(lambda: all(one.is_ready for one in house.proxy.pool.instances))
        assert (await house.post()).headers["x-pdproxy-decoder"] == "d1"
