"""Which launcher starts the ranks, and on which machines: everything as lists of arguments.

One machine: plain Python, torchrun, or DeepSpeed's launcher. Several, by a hostfile or inside a
Slurm job: :mod:`launch.nodes` starts the launcher's own part on each, and ends all when one fails.
DeepSpeed's ``pdsh`` is not used: it quotes neither blanks nor quotes, drops most of the environment
and ends a run with ``pkill -f`` on every host. Several, each started by hand:
:mod:`launch.hosts.meeting`.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import socket
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

from configs.errors import ConfigError
from configs.files import ROOT, write_json
from configs.schema import Point
from launch.hosts import namespaces
from launch.hosts.autotuning import tuned
from launch.hosts.hostfile import (
    Host,
    check_host_name,
    meeting_host,
    ranks_a_node,
    read_hostfile,
    same_slots,
    share_out,
)
from launch.hosts.ranks import (
    Program,
    free_port,
    node_environment,
    ranks_command,
    ranks_environment,
)

NODES_FILE = "nodes.json"
"""In a run folder: what is started where."""
HOSTS_FILE = "hostfile"
"""In a run folder: the hosts, in what of DeepSpeed's format its own launcher takes."""
TORCHRUN, DEEPSPEED = "torchrun", "deepspeed"
KINDS = (TORCHRUN, DEEPSPEED)
REMOTE_SHELL = ("ssh", "-o", "BatchMode=yes")
"""Never asks for a password: nobody is there to type it."""


@dataclass(frozen=True)
class Start:
    """How one node's part of a run is started."""

    host: str
    """Its name; ``srun`` for all nodes of a Slurm job at once."""
    prefix: tuple[str, ...]
    """What runs a command there; empty for this machine."""
    is_shell: bool
    """Whether the command goes through a shell there, as one word."""
    node: int | None
    """Position of the node; None when the node knows it itself."""


@dataclass(frozen=True)
class Commands:
    """Everything that a run starts."""

    starts: tuple[Start, ...]
    """Empty on one machine."""
    nodes: tuple[tuple[str, ...], ...]
    """The launcher's command on each node."""
    local_ranks: tuple[int, ...]
    """Ranks on each node."""
    hostfile: str = ""
    """Hosts as DeepSpeed's own launcher reads them, where it is the one."""

    def started_by(self, folder: Path) -> list[str]:
        """The one command that starts the run; several nodes' are written to its folder.

        Raises:
            OSError: they cannot be written.
        """
        if not self.starts:
            return list(self.nodes[0])
        write_json(folder / NODES_FILE, asdict(self))
        if self.hostfile:
            (folder / HOSTS_FILE).write_text(self.hostfile, encoding="utf-8")
        return [sys.executable, "-m", "launch.nodes", str(folder / NODES_FILE)]

    def describe(self) -> str:
        """A line a node: its command."""
        if not self.starts:
            return f"command  {shlex.join(self.nodes[0])}"
        names = [start.host for start in self.starts]
        names += [f"node {node}" for node in range(len(names), len(self.nodes))]
        pairs = zip(names, self.nodes, strict=True)
        return "\n".join(f"command  on {name}: {shlex.join(words)}" for name, words in pairs)


@dataclass(frozen=True)
class Launcher:
    """What the user asked for."""

    kind: str = TORCHRUN
    """``torchrun`` or ``deepspeed``."""
    hostfile: Path | None = None
    """Hosts to start on, in DeepSpeed's format; None for this machine."""
    srun: bool = False
    """Start on the nodes of the Slurm job that this process is in."""
    nnodes: int | None = None
    """Machines to use; None for as many as the ranks need."""
    node_rank: int | None = None
    """Which of them this one is, where the user starts the same command on each."""
    master_addr: str | None = None
    """Address of the first machine; None to derive it."""
    master_port: int | None = None
    """Port at which the ranks meet; None for a free one."""
    remote_shell: tuple[str, ...] = REMOTE_SHELL
    """Runs a command on a host of the hostfile."""
    num_gpus: int | None = None
    """Ranks that the user means to start on each machine; None for what the point says."""
    autotuning: str | None = None
    """``tune`` or ``run``: DeepSpeed's launcher looks for a config first; None for not."""

    @classmethod
    def of(cls, given: Namespace) -> Self:
        """From the options of :func:`add_launcher_options`.

        Raises:
            ConfigError: options that exclude or need each other.
        """
        values = {**vars(given), "kind": given.launcher}
        values["remote_shell"] = tuple(shlex.split(given.remote_shell))
        launcher = cls(**{field.name: values[field.name] for field in fields(cls)})
        launcher._check()
        return launcher

    def _check(self) -> None:
        """Refuse options that exclude or need each other."""
        ways = {
            "--hostfile": self.hostfile is not None,
            "--srun": self.srun,
            "--node-rank": self.node_rank is not None,
        }
        chosen = [name for name, is_given in ways.items() if is_given]
        if len(chosen) > 1:
            raise ConfigError(f"{' and '.join(chosen)} exclude each other")
        if self.nnodes is not None and self.nnodes > 1 and not chosen:
            raise ConfigError(
                f"--nnodes {self.nnodes}: say where, with --hostfile FILE, --srun inside a Slurm "
                "job, or --node-rank N in the same command on each machine"
            )
        if self.node_rank is not None:
            self._check_by_hand(self.node_rank)
        if self.srun:
            self._check_slurm()
        if self.hostfile is not None:
            read_hostfile(self.hostfile)
        if not self.remote_shell:
            raise ConfigError("--remote-shell is empty; the default is 'ssh -o BatchMode=yes'")

        if self.autotuning and importlib.util.find_spec("tabulate") is None:
            raise ConfigError(
                f"--autotuning {self.autotuning}: DeepSpeed's autotuner needs the package "
                "tabulate, which is not installed; run 'pip install tabulate'"
            )
        if self.autotuning and (self.kind != DEEPSPEED or self.is_far):
            raise ConfigError(
                f"--autotuning {self.autotuning}: DeepSpeed's launcher does that, on one machine; "
                "give --launcher deepspeed, without --hostfile, --srun and --nnodes"
            )

    def _check_slurm(self) -> None:
        if "SLURM_JOB_ID" not in os.environ:
            raise ConfigError("--srun: this is not a Slurm job; use it in a script for sbatch")
        if self.kind != TORCHRUN:
            raise ConfigError("--srun goes with --launcher torchrun")

    def _check_by_hand(self, node_rank: int) -> None:
        if self.kind != TORCHRUN:
            raise ConfigError("--node-rank goes with --launcher torchrun; use --hostfile otherwise")
        needed = ("nnodes", "master_addr", "master_port")
        missing = [f"--{n.replace('_', '-')}" for n in needed if getattr(self, n) is None]
        if missing:
            raise ConfigError(f"--node-rank {node_rank} needs {', '.join(missing)} too")
        if not 0 <= node_rank < (self.nnodes or 0):
            raise ConfigError(f"--node-rank {node_rank}: must lie between 0 and --nnodes - 1")

    @property
    def is_far(self) -> bool:
        """Whether ranks may run on machines other than this one."""
        return self.hostfile is not None or self.srun or (self.nnodes or 1) > 1

    def versions(self, num_ranks: int) -> dict[str, str]:
        """What tells runs so started from others; nothing for torchrun on one machine.

        Raises:
            ConfigError: the hosts cannot run so many ranks.
        """
        found = {} if self.kind == TORCHRUN else {"launcher": self.kind}
        found |= {"autotuning": self.autotuning} if self.autotuning else {}
        nodes = self._num_nodes(num_ranks)
        return {**found, "nodes": str(nodes)} if nodes > 1 else found

    def _num_nodes(self, num_ranks: int) -> int:
        if self.hostfile is not None:
            return len(share_out(read_hostfile(self.hostfile), num_ranks, self.nnodes))
        return self.nnodes or (_slurm_nodes() if self.srun else 1)

    def lacks(self, point: Point) -> list[str]:
        """Why a point cannot be started as it was asked for; empty where it can.

        Raises:
            ConfigError: the hosts cannot run so many ranks.
        """
        dropped = [
            f"--autotuning {self.autotuning}: DeepSpeed's autotuner drops the offload section, and "
            f"the run has {field} = 'cpu'; choose an engine without offload"
            for field in ("offload_optimizer", "offload_param")
            if self.autotuning and point.value(field) != "none"
        ]
        return [*dropped, *self._other_ranks(point)]

    def _other_ranks(self, point: Point) -> list[str]:
        """Why a point does not start the ranks that ``--num-gpus`` asks for."""
        if self.num_gpus is None:
            return []
        nodes = self._num_nodes(point.num_ranks)
        asked, alone = self.num_gpus * nodes, point.tp * point.pp
        if asked == point.num_ranks:
            return []
        wanted = f"give --dp {asked // alone}" if asked % alone == 0 else "change --tp or --pp"
        return [
            f"--num-gpus {self.num_gpus} on {nodes} machine{'s'[: nodes > 1]} is {asked} ranks, "
            f"and tp {point.tp} x pp {point.pp} x dp {point.dp} is {point.num_ranks}; {wanted}"
        ]

    def port(self) -> int:
        """Port at which the ranks meet; one that is free here, unless it was given."""
        return self.master_port if self.master_port is not None else free_port()

    def commands(self, program: Program, num_ranks: int, port: int, link_mbit: int = 0) -> Commands:
        """Everything that a run of ``program`` starts; its links are of this machine alone.

        Raises:
            ConfigError: the hosts cannot run so many ranks.
        """
        if self.hostfile is not None:
            hosts = share_out(read_hostfile(self.hostfile), num_ranks, self.nnodes)
            return self._on_hosts(program, hosts, port)
        if self.srun:
            return self._in_slurm(program, num_ranks, port)
        if self.node_rank is not None and (self.nnodes or 1) > 1:
            return self._by_hand(program, num_ranks, port)
        if self.autotuning:
            command = _deepspeed_here(tuned(program), num_ranks, port, self.autotuning)
            return Commands((), (tuple(command),), (num_ranks,))
        if link_mbit:
            linked = _behind_links(program, num_ranks, port, link_mbit)
            return Commands((), (linked,), (num_ranks,))
        alone = _deepspeed_here if self.kind == DEEPSPEED else ranks_command
        return Commands((), (tuple(alone(program, num_ranks, port)),), (num_ranks,))

    def environment(self, base: Mapping[str, str], num_ranks: int, port: int) -> dict[str, str]:
        """Environment of what is started here."""
        if self.node_rank is not None:
            return node_environment(base, num_ranks // (self.nnodes or 1))
        if self.is_far:
            return node_environment(base, 0)
        return ranks_environment(base, num_ranks, port)

    def _on_hosts(self, program: Program, hosts: tuple[Host, ...], port: int) -> Commands:
        address = meeting_host(hosts, self.master_addr)
        starts = tuple(self._start(host, node) for node, host in enumerate(hosts))
        slots = tuple(host.slots for host in hosts)
        if self.kind == TORCHRUN:
            return Commands(starts, _torchrun(program, slots, address, port), slots)
        options = [
            *("--hostfile", str(program.run_json.with_name(HOSTS_FILE))),
            *("--num_nodes", str(len(hosts))),
            *("--num_gpus", str(same_slots(hosts))),
            "--no_ssh",
        ]
        nodes = [
            _deepspeed(program, [*options, "--node_rank", str(node)], address, port)
            for node in range(len(hosts))
        ]
        text = "".join(f"{host.name} slots={host.slots}\n" for host in hosts)
        return Commands(starts, tuple(nodes), slots, text)

    def _start(self, host: Host, node: int) -> Start:
        if host.is_here:
            return Start(host.name, (), is_shell=False, node=node)
        return Start(host.name, (*self.remote_shell, host.name), is_shell=True, node=node)

    def _in_slurm(self, program: Program, num_ranks: int, port: int) -> Commands:
        count = self.nnodes or _slurm_nodes()
        slots = (ranks_a_node(num_ranks, count),) * count
        # The script of a job runs on its first node.
        address = self.master_addr or socket.gethostname()
        prefix = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
        prefix += ["--kill-on-bad-exit=1", f"--chdir={ROOT}"]
        if cores := os.environ.get("SLURM_CPUS_PER_TASK"):
            prefix.append(f"--cpus-per-task={cores}")  # srun does not take it over from the job
        check_host_name(address, "--master-addr")
        start = Start("srun", tuple(prefix), is_shell=False, node=None)
        return Commands((start,), _torchrun(program, slots, address, port), slots)

    def _by_hand(self, program: Program, num_ranks: int, port: int) -> Commands:
        count = self.nnodes or 1
        slots = (ranks_a_node(num_ranks, count),) * count
        address = check_host_name(self.master_addr or "", "--master-addr")
        node = self.node_rank or 0
        command = _torchrun(program, slots, address, port)[node]
        if node == 0:
            meet = ["-m", "launch.hosts.meeting", str(port), str(count), str(program.run_json)]
            command = (sys.executable, *meet, *command)
        return Commands((), (command,), slots[:1])


THIS_MACHINE = Launcher()


def _slurm_nodes() -> int:
    text = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    return int(text) if text.isdigit() else 1


def _torchrun(
    program: Program, slots: Sequence[int], address: str, port: int
) -> tuple[tuple[str, ...], ...]:
    common = (sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(slots)}")
    return tuple(
        (
            *common,
            f"--node-rank={node}",
            f"--nproc-per-node={count}",
            f"--master-addr={address}",
            f"--master-port={port}",
            *program.words,
        )
        for node, count in enumerate(slots)
    )


def _behind_links(program: Program, num_ranks: int, port: int, link_mbit: int) -> tuple[str, ...]:
    """Links first, then torchrun on the bridge between them, whose ranks go behind them."""
    module = namespaces.__name__
    rank = Program(module, ("rank", *program.words), program.run_json)
    (command,) = _torchrun(rank, (num_ranks,), namespaces.BRIDGE_ADDRESS, port)
    return (sys.executable, "-m", module, "start", str(link_mbit), str(num_ranks), *command)


def _deepspeed(
    program: Program, options: Sequence[str], address: str, port: int
) -> tuple[str, ...]:
    return (
        *(sys.executable, "-m", "deepspeed.launcher.runner"),
        *options,
        *("--master_addr", address, "--master_port", str(port)),
        "--no_local_rank",
        *(["--module"] if program.is_module else []),
        program.name,
        *program.arguments,
    )


def _deepspeed_here(
    program: Program, num_ranks: int, port: int, autotuning: str | None = None
) -> list[str]:
    # Without a hostfile it would look for one in /job.
    options = ["--hostfile", os.devnull]
    options += ["--autotuning", autotuning] if autotuning else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if all(word.strip().isdigit() for word in visible) and len(visible) >= num_ranks:
        # It counts from 0 otherwise, and leaves the devices that the caller chose.
        chosen = ",".join(word.strip() for word in visible[:num_ranks])
        options += ["--include", f"localhost:{chosen}"]
    else:
        options += ["--num_gpus", str(num_ranks)]
    return list(_deepspeed(program, options, "127.0.0.1", port))
