"""Ranks of one machine behind links of a given rate, each rank in a network namespace of its own.

``python -m launch.hosts.namespaces start MBIT NUM_RANKS COMMAND...`` makes a namespace for each
rank and one for a bridge that joins them, and becomes COMMAND there, which starts the ranks. Each
rank is ``python -m launch.hosts.namespaces rank WORDS...``: it goes into its own namespace and
becomes ``python WORDS...``.

No namespace has a name, and nothing is made in the machine's own. So two runs cannot meet, though
both use the same addresses, and whatever ends the processes of a run, the kernel takes namespaces
and links away with them. Either end of a link sends at MBIT, as a full-duplex port of a switch
does.
"""

from __future__ import annotations

import ctypes
import functools
import ipaddress
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

INTERFACE = "link0"
"""A rank's end of its link."""
BRIDGE_ADDRESS = "10.0.255.254"
"""Where the ranks find who started them."""
_FIRST_ADDRESS = ipaddress.IPv4Address("10.0.0.1")
_PREFIX_BITS = 16
_BURST = "15k"
"""What may go out at once. With less, a packet of many segments waits longer than its bytes need;
with more, small messages would find no limit at all."""
_NAMESPACES_VARIABLE = "DOS_RANK_NAMESPACES"
"""Environment variable that tells the ranks where their namespaces are, in the order of ranks."""
_CLONE_NEWNET = 0x40000000
_PROGRAMS = ("ip", "tc", "unshare")
_PROBE = (
    "ip link add probe0 type veth peer name probe1"
    " && ip link add probe2 type bridge"
    " && tc qdisc add dev probe0 root handle 1: htb default 1"
)
"""What the links need, tried in a namespace that ends with it."""
_UNSHARED = ("unshare", "--net", "sh", "-c")


@functools.cache
def unavailable() -> str:
    """Say why this process cannot make links; empty where it can."""
    if sys.platform != "linux":
        return f"links are shaped by the kernel of Linux, and this is {sys.platform}"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"the command {missing[0]!r}, which shapes links, is not installed"
    if os.geteuid():
        return "only root may make network namespaces"
    done = subprocess.run([*_UNSHARED, _PROBE], capture_output=True, text=True, check=False)
    said = " ".join(done.stderr.split())
    refusal = f"this kernel or container refuses network namespaces ({said})"
    return refusal if done.returncode else ""


def start(mbit: int, num_ranks: int, command: Sequence[str]) -> NoReturn:
    """Make links whose ends each send at ``mbit`` Mbit/s, and become the command beside them.

    Raises:
        OSError: the kernel refuses a namespace.
        RuntimeError: ``ip`` or ``tc`` fails.
    """
    of_ranks = [_new_namespace() for _ in range(num_ranks)]
    own = _new_namespace()
    paths = [f"/proc/{os.getpid()}/fd/{number}" for number in of_ranks]
    _batch("ip", _bridge(paths))
    _batch("tc", (line for rank in range(num_ranks) for line in _shaped(f"port{rank}", mbit)))
    for rank, namespace in enumerate(of_ranks):
        with _inside(namespace, own):
            _batch("ip", _end_of(rank))
            _batch("tc", _shaped(INTERFACE, mbit))
        # What is started here keeps the namespaces until the ranks are in them.
        os.set_inheritable(namespace, True)
    os.close(own)
    os.environ[_NAMESPACES_VARIABLE] = ":".join(paths)
    sys.stdout.write(
        f"[launch] {num_ranks} ranks behind links of {mbit} Mbit/s each way; no name of a host is "
        "known there, of which warnings mean nothing\n"
    )
    sys.stdout.flush()
    os.execvp(command[0], list(command))


def rank(words: Sequence[str]) -> NoReturn:
    """Go into this rank's namespace, and become Python with these arguments.

    Raises:
        OSError: the namespace is gone, because whoever started this rank is.
    """
    path = os.environ[_NAMESPACES_VARIABLE].split(":")[int(os.environ["LOCAL_RANK"])]
    namespace = os.open(path, os.O_RDONLY)
    _enter(namespace)
    os.close(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    os.execv(sys.executable, [sys.executable, *words])


def _bridge(paths: Sequence[str]) -> Iterator[str]:
    """Commands of ``ip`` for the bridge and all links; the ranks' ends go into their namespaces."""
    yield "link set lo up"
    yield "link add bridge0 type bridge"
    yield "link set bridge0 addrgenmode none up"
    yield f"addr add {BRIDGE_ADDRESS}/{_PREFIX_BITS} dev bridge0"
    for number, path in enumerate(paths):
        yield f"link add port{number} type veth peer name {INTERFACE} netns {path}"
        yield f"link set port{number} master bridge0 addrgenmode none up"


def _end_of(number: int) -> Iterator[str]:
    yield "link set lo up"
    # Gloo would take the first address that it finds, and one of IPv6 is not ready for a second.
    yield f"link set {INTERFACE} addrgenmode none up"
    yield f"addr add {_FIRST_ADDRESS + number}/{_PREFIX_BITS} dev {INTERFACE}"


def _shaped(interface: str, mbit: int) -> Iterator[str]:
    """Commands of ``tc`` that let an interface send at a rate.

    A token bucket filter would drop what is larger than its burst, such as the packets of many
    segments that TCP hands to a virtual interface.
    """
    yield f"qdisc add dev {interface} root handle 1: htb default 1"
    rate = f"rate {mbit}mbit burst {_BURST} cburst {_BURST} quantum 1514"
    yield f"class add dev {interface} parent 1: classid 1:1 htb {rate}"


def _batch(program: str, lines: Iterator[str]) -> None:
    text = "".join(f"{line}\n" for line in lines)
    command = [program, "-batch", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{program}: {' '.join(done.stderr.split())}")


def _new_namespace() -> int:
    _check(_LIBC.unshare(_CLONE_NEWNET), "a new network namespace")
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def _enter(namespace: int) -> None:
    _check(_LIBC.setns(namespace, _CLONE_NEWNET), "a network namespace to go into")


@contextmanager
def _inside(namespace: int, back: int) -> Iterator[None]:
    _enter(namespace)
    try:
        yield
    finally:
        _enter(back)


# Python has both from 3.12 on.
_LIBC = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def main(argv: Sequence[str]) -> NoReturn:
    """Start the ranks, or be one."""
    if argv[0] == "rank":
        rank(argv[1:])
    start(int(argv[1]), int(argv[2]), argv[3:])


if __name__ == "__main__":
    main(sys.argv[1:])
