"""Ranks of one machine behind links of a given rate, so that bytes cost wall-clock time.

``python -m launch.links bridge MBIT COMMAND...`` becomes COMMAND, which starts the ranks, in a
network namespace with a bridge. Each rank is ``python -m launch.links rank MBIT WORDS...``: it
becomes ``python WORDS...`` in a namespace of its own, which a pair of virtual interfaces joins to
the bridge. Both ends send at MBIT, as a full-duplex port of a switch does.

No namespace has a name, and nothing is made in the machine's own. So two runs cannot meet, though
both use the same addresses, and whatever ends the processes of a run, the kernel takes namespaces
and links away with them.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

import psutil

from configs.cli import say
from configs.errors import ConfigError
from configs.files import ROOT
from configs.schema import Point

INTERFACE = "link0"
"""A rank's end of its link."""
BRIDGE_ADDRESS = "10.0.0.254"
"""Where the ranks find who started them."""
_PROGRAMS = ("ip", "tc", "unshare", "nsenter")

_BRIDGE = f"""
ip link set lo up
ip link add bridge0 type bridge
ip link set bridge0 addrgenmode none up
ip addr add {BRIDGE_ADDRESS}/24 dev bridge0
exec "$@"
"""
# $PPID started the rank, and so is in the namespace of the bridge. Gloo would take the first
# address that it finds, and one of IPv6 (addrgenmode) is not ready for a second.
_RANK = f"""
port=port$LOCAL_RANK
at_bridge="nsenter --net=/proc/$PPID/ns/net"
ip link set lo up
ip link add {INTERFACE} type veth peer name $port netns $PPID
$at_bridge tc qdisc add dev $port root handle 1: htb default 1
$at_bridge tc class add dev $port parent 1: classid 1:1 htb $RATE
$at_bridge ip link set $port master bridge0 addrgenmode none up
tc qdisc add dev {INTERFACE} root handle 1: htb default 1
tc class add dev {INTERFACE} parent 1: classid 1:1 htb $RATE
ip link set {INTERFACE} addrgenmode none up
ip addr add 10.0.0.$((LOCAL_RANK + 1))/24 dev {INTERFACE}
exec "$@"
"""
_RATE = "rate {}mbit burst 15k cburst 15k quantum 1514"
"""Of HTB: a token bucket filter would drop what is larger than its burst, such as the packets of
many segments that TCP hands to a virtual interface. With a smaller burst such a packet waits longer
than its bytes need; with a larger one small messages would find no limit."""


def command_behind_links(starter: Sequence[str], words: Sequence[str], mbit: int) -> list[str]:
    """Return the command of a run whose ranks are behind links.

    Args:
        starter: Command that starts the ranks, up to what each of them runs.
        words: What Python runs as a rank.
        mbit: Rate at which a rank sends, and at which it receives, in Mbit/s.
    """
    module = ("-m", __name__)
    bridge = (sys.executable, *module, "bridge", str(mbit))
    return [*bridge, *starter, *module, "rank", str(mbit), *words]


@functools.cache
def unavailable() -> str:
    """Say why this process cannot make links; empty where one rank could be put behind one."""
    if sys.platform != "linux":
        return f"Linux shapes links, and this is {sys.platform}"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"the command {missing[0]!r} of iproute2 or util-linux is not installed"
    if os.geteuid():
        return "only root may make network namespaces"
    # The shell is the parent that a rank's own would be.
    starter = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable]
    done = subprocess.run(
        command_behind_links(starter, ["-c", ""], 1),
        env={**os.environ, "LOCAL_RANK": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    said = " ".join(done.stderr.split())
    return f"this kernel or container refuses links ({said})" if done.returncode else ""


def link_sent_bytes(point: Point) -> int:
    """Return the bytes that the kernel counts as sent on this rank's own link, headers included.

    0 without a link of its own: ranks of one machine share an interface with everything else on it.

    Raises:
        ConfigError: the point asks for a link, and this rank has none.
    """
    if not point.link_mbit:
        return 0
    interfaces = psutil.net_io_counters(pernic=True, nowrap=False)
    if INTERFACE not in interfaces:
        raise ConfigError(
            f"link_mbit = {point.link_mbit}: this rank is behind no link; start it with "
            "python -m launch.run, or give link_mbit = 0"
        )
    return int(interfaces[INTERFACE].bytes_sent)


def main(role: str, mbit: str, *words: str) -> NoReturn:
    """Become the command on the bridge, or Python as a rank behind its link."""
    script, command = _BRIDGE, words
    if role == "rank":
        script, command = _RANK, (sys.executable, *words)
        os.environ |= {"RATE": _RATE.format(mbit), "GLOO_SOCKET_IFNAME": INTERFACE}
    else:
        say(
            f"[launch] ranks behind links of {mbit} Mbit/s each way; no name of a host is known "
            "there, of which warnings mean nothing"
        )
    os.execvp("unshare", ["unshare", "--net", "sh", "-ec", script, "sh", *command])


if __name__ == "__main__":
    main(*sys.argv[1:])
