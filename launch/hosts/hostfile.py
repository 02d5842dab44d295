"""Hosts of a run: DeepSpeed's hostfile, and which host runs how many ranks."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.errors import ConfigError

_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?[A-Za-z0-9](?:[A-Za-z0-9._:-]*[A-Za-z0-9])?")
"""A host's name or address, with a user before it or not; never an option, never a shell's word."""
_LINE = re.compile(r"(\S+)\s+slots=(\d+)")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Host:
    """A machine that runs ranks."""

    name: str
    """As the remote shell takes it."""
    slots: int
    """Ranks it has room for, at least 1."""

    @property
    def address(self) -> str:
        """Its name without a user."""
        return self.name.rpartition("@")[2]

    @property
    def is_loopback(self) -> bool:
        """Whether its name means another machine to every machine."""
        return self.address in _LOOPBACK

    @property
    def is_here(self) -> bool:
        """Whether it is this machine."""
        own = socket.gethostname()
        return self.is_loopback or self.name in (own, own.partition(".")[0])


def check_host_name(name: str, source: str) -> str:
    """The name, when it is one.

    Raises:
        ConfigError: it is not the name or the address of a host.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{source}: {name!r} is not the name or the address of a host")
    return name


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Hosts of a hostfile: lines ``HOST slots=N``; ``#`` begins a comment.

    Raises:
        ConfigError: the file cannot be read, a line is malformed, a host comes twice, or there is
            none; names file and line.
    """
    try:
        # Some editors begin a file with a byte-order mark.
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"hostfile {str(path)!r} cannot be read: {error}") from None
    hosts: dict[str, Host] = {}
    for number, text in enumerate(lines, start=1):
        line = text.partition("#")[0].strip()
        if not line:
            continue
        source = f"{path}:{number}"
        match = _LINE.fullmatch(line)
        if match is None or int(match[2]) < 1:
            raise ConfigError(f"{source}: {line!r}: write HOST slots=N, N at least 1")
        name = check_host_name(match[1], source)
        if name in hosts:
            raise ConfigError(f"{source}: host {name!r} is there already; one line a host")
        hosts[name] = Host(name, int(match[2]))
    if not hosts:
        raise ConfigError(f"hostfile {str(path)!r} names no host")
    return tuple(hosts.values())


def share_out(hosts: Sequence[Host], num_ranks: int, num_nodes: int | None) -> tuple[Host, ...]:
    """Which hosts run how many ranks: their ``slots`` are what they are to run.

    Without ``num_nodes`` the hosts are filled one after the other; with it the first ``num_nodes``
    run equally many.

    Raises:
        ConfigError: there are too few hosts or slots, or the ranks cannot be shared out equally.
    """
    if num_nodes is None:
        used, left = [], num_ranks
        for host in hosts:
            if left:
                used.append(Host(host.name, min(left, host.slots)))
                left -= used[-1].slots
        if left:
            room = num_ranks - left
            raise ConfigError(f"the run has {num_ranks} ranks, the hosts have {room} slots")
        return tuple(used)
    if num_nodes > len(hosts):
        raise ConfigError(f"--nnodes {num_nodes}: there are {len(hosts)} hosts")
    each = ranks_a_node(num_ranks, num_nodes)
    for host in hosts[:num_nodes]:
        if each > host.slots:
            raise ConfigError(
                f"--nnodes {num_nodes}: host {host.name!r} would run {each} ranks and has "
                f"{host.slots} slots"
            )
    return tuple(Host(host.name, each) for host in hosts[:num_nodes])


def ranks_a_node(num_ranks: int, num_nodes: int) -> int:
    """Ranks of each of ``num_nodes`` equal nodes.

    Raises:
        ConfigError: they cannot be equal.
    """
    if num_ranks % num_nodes:
        raise ConfigError(
            f"--nnodes {num_nodes}: {num_ranks} rank{'' if num_ranks == 1 else 's'} cannot be "
            f"shared out equally over them; --dp N sets how many there are (tp x pp x dp)"
        )
    return num_ranks // num_nodes


def same_slots(hosts: Sequence[Host]) -> int:
    """Ranks that every one of the hosts runs.

    Raises:
        ConfigError: they run different numbers.
    """
    numbers = {host.slots for host in hosts}
    if len(numbers) > 1:
        raise ConfigError(
            "--launcher deepspeed: every host must run equally many ranks, not "
            + ", ".join(f"{host.name} {host.slots}" for host in hosts)
            + "; give --nnodes"
        )
    return numbers.pop()


def meeting_host(hosts: Sequence[Host], given: str | None) -> str:
    """Address at which all ranks meet: the one given, or the first host's.

    Raises:
        ConfigError: it is a loopback name, which the other hosts would take for themselves.
    """
    if given is not None:
        return check_host_name(given, "--master-addr")
    if len(hosts) > 1 and hosts[0].is_loopback:
        raise ConfigError(
            f"host {hosts[0].name!r} comes first, and the others cannot reach it by that name; "
            "write its real name, or give --master-addr"
        )
    return hosts[0].address
