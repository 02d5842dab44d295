"""The command and environment that start a run's ranks.

On this machine that is plain Python or torchrun. Several machines are the launchers' own business:
torchrun's nodes meet at ``--rdzv-endpoint``, and the user starts the others; DeepSpeed's launcher
reads a hostfile; srun starts torchrun on every node of a Slurm job.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shlex
import socket
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Self

from configs.errors import ConfigError
from configs.files import ROOT, write_text
from deep_optimizer_states.core.host import usable_cores
from launch import links

TORCHRUN, DEEPSPEED, SRUN = "torchrun", "deepspeed", "srun"
KINDS = (TORCHRUN, DEEPSPEED, SRUN)
TRAINER_MODULE = "launch.pretrain_gpt"
EXTENSIONS_VARIABLE = "TORCH_EXTENSIONS_DIR"
"""Environment variable with the folder of DeepSpeed's compiled ops."""
EXPORTED = (
    *("CUDA_", "DEEPSPEED_", "DOS_", "DS_", "FI_", "GLOO_", "KMP_", "LD_LIBRARY_PATH", "MKL_"),
    *("NCCL_", "OMP_", "PATH", "PYTHON", "PYTORCH_", "TORCH", "TRITON_", "UCX_", "WANDB_"),
)
"""How the names of variables begin that DeepSpeed's launcher hands to ranks on other machines."""
_HOST_LINE = re.compile(r"^\s*([^#\s]+)\s+slots=([1-9]\d*)", re.MULTILINE)
_ENDPOINT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*):(\d{1,5})")
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
_PORTS = (10_000, 32_768)
"""Where free ports are looked for: lower ones belong to services, higher ones to the kernel."""
_MOST_KEPT = 64
_kept: list[socket.socket] = []
"""Names that keep the ports of the last calls from other processes of this project."""


@dataclass(frozen=True)
class Program:
    """What every rank runs."""

    name: str
    """A module, or the path of a script."""
    arguments: tuple[str, ...]
    is_module: bool = True

    @property
    def words(self) -> list[str]:
        """As Python and torchrun take it."""
        return [*(["-m"] if self.is_module else []), self.name, *self.arguments]


def free_port() -> int:
    """Return a TCP port that nobody listens on now.

    The kernel would give one of its own range, and give it again to any process that asks before
    the ranks, which start seconds later, listen on it. So it is drawn from below that range, and
    no other call gives it as long as this process lives.
    """
    for port in [*(SystemRandom().randrange(*_PORTS) for _ in range(20)), 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found: int = probe.getsockname()[1]
            _keep(found)
            return found
    raise ConfigError("no TCP port of 127.0.0.1 can be bound, and ranks meet at one")


def _keep(port: int) -> None:
    """Take a name of Linux's for a port; an error if somebody has it."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0deep_optimizer_states/port/{port}")
    except OSError:
        name.close()
        raise
    _kept.append(name)
    atexit.register(name.close)
    if len(_kept) > _MOST_KEPT:
        _kept.pop(0).close()


def extensions_folder(environment: Mapping[str, str]) -> Path:
    """Return where the ranks find their compiled ops; nothing is made yet.

    It is the folder that ``environment`` names, or that of this Python environment, into which
    ``make setup`` builds: not one folder a user shared by all environments.
    """
    return Path(environment.get(EXTENSIONS_VARIABLE) or Path(sys.prefix) / "torch_extensions")


@dataclass(frozen=True)
class Launcher:
    """Who starts the ranks, and on which machines."""

    kind: str = TORCHRUN
    """``torchrun``, ``deepspeed`` or ``srun``."""
    hostfile: Path | None = None
    """Hosts for DeepSpeed's launcher; None for this machine."""
    nnodes: int | None = None
    """Machines to use; None for as many as the ranks need."""
    rdzv_endpoint: str | None = None
    """``HOST:PORT`` at which the ranks meet; None to derive it."""

    @classmethod
    def of(cls, given: Namespace) -> Self:
        """Read the options of :func:`launch.cli.add_run_options`.

        Raises:
            ConfigError: options exclude or need each other.
        """
        launcher = cls(given.launcher, given.hostfile, given.nnodes, given.rdzv_endpoint)
        kind, endpoint = launcher.kind, launcher.rdzv_endpoint
        knows_where = kind == SRUN or (kind == TORCHRUN and endpoint is not None)
        if launcher.hostfile is not None:
            if kind != DEEPSPEED:
                raise ConfigError("--hostfile goes with --launcher deepspeed")
            read_hostfile(launcher.hostfile)
        elif (launcher.nnodes or 1) > 1 and not knows_where:
            raise ConfigError(
                f"--nnodes {launcher.nnodes}: say where, with --rdzv-endpoint HOST:PORT of this "
                "machine, --launcher deepspeed --hostfile FILE, or --launcher srun inside a "
                "Slurm job"
            )
        if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
            raise ConfigError(f"--rdzv-endpoint {endpoint!r}: write HOST:PORT")
        if kind == SRUN and "SLURM_JOB_ID" not in os.environ:
            raise ConfigError("--launcher srun: this is not a Slurm job; use it in one's script")
        return launcher

    @property
    def is_far(self) -> bool:
        """Whether ranks may run on machines other than this one."""
        return self.hostfile is not None or self.kind == SRUN or (self.nnodes or 1) > 1

    def versions(self, num_ranks: int) -> dict[str, str]:
        """Return what tells runs so started from others; nothing for one machine's own torchrun.

        Raises:
            ConfigError: the hosts cannot run so many ranks.
        """
        found = {"launcher": self.kind} if self.kind == DEEPSPEED else {}
        nodes, _ = self._shares(num_ranks)
        return {**found, "nodes": str(nodes)} if nodes > 1 else found

    def port(self) -> int:
        """Return the port at which the ranks meet; one that is free here, unless it was given."""
        return int(self.rdzv_endpoint.rpartition(":")[2]) if self.rdzv_endpoint else free_port()

    def environment(self, base: Mapping[str, str], num_ranks: int, port: int) -> dict[str, str]:
        """Return the environment of what is started here, over the caller's own.

        What the caller set stays: ``OMP_NUM_THREADS`` and ``TORCH_EXTENSIONS_DIR``.
        """
        environment = dict(base)
        here = self._shares(num_ranks)[1] if self.is_far else num_ranks
        # torchrun would leave one thread a rank, and the CPU's update runs on these threads.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // here)))
        environment[EXTENSIONS_VARIABLE] = str(extensions_folder(base))
        # The environment's own ninja before the system's: another version of it builds every op
        # anew.
        own_tools = str(Path(sys.executable).parent)
        environment["PATH"] = os.pathsep.join([own_tools, base.get("PATH", os.defpath)])
        # NVML, and so the monitor, numbers GPUs by bus; CUDA would put the fastest first.
        environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        environment["PYTHONUNBUFFERED"] = "1"
        paths = [str(ROOT), str(ROOT / "src"), *filter(None, [base.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        if self.is_far:
            return environment
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if num_ranks == 1:
            one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
            environment |= {**one, "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0"}
        return environment

    def command(self, program: Program, num_ranks: int, port: int, link_mbit: int = 0) -> list[str]:
        """Return the one command that starts a run of ``program``.

        Args:
            program: what every rank runs.
            num_ranks: ranks on all machines.
            port: where they meet.
            link_mbit: rate of the links between ranks of this machine; 0 for links as they are.

        Raises:
            ConfigError: the hosts cannot run so many ranks.
        """
        if self.kind == DEEPSPEED:
            return self._deepspeed(program, num_ranks, port)
        if self.kind == SRUN:
            return self._srun(program, num_ranks, port)
        if self.is_far:
            return self._torchrun(program, num_ranks)
        torchrun = [*_TORCHRUN, f"--nproc-per-node={num_ranks}"]
        if link_mbit:
            torchrun += [f"--master-addr={links.BRIDGE_ADDRESS}", f"--master-port={port}"]
            return links.command_behind_links(torchrun, program.words, link_mbit)
        if num_ranks == 1:
            return [sys.executable, *program.words]
        return [*torchrun, f"--master-port={port}", *program.words]

    def elsewhere(self, command: list[str], environment: Mapping[str, str]) -> list[str]:
        """Return the lines of shell that the user runs on the other machines; torchrun's alone.

        Args:
            command: what :meth:`command` gave for this machine, the first.
            environment: its environment.
        """
        if self.kind != TORCHRUN or not self.is_far:
            return []
        own = [f"{n}={v}" for n, v in environment.items() if os.environ.get(n) != v and n != "PATH"]
        lines = []
        for node in range(1, self.nnodes or 1):
            words = [w.replace("--node-rank=0", f"--node-rank={node}") for w in command]
            lines.append(f"cd {shlex.quote(str(ROOT))} && {shlex.join(['env', *own, *words])}")
        return lines

    def export(self, environment: dict[str, str], folder: Path) -> None:
        """Write into a run folder which variables DeepSpeed's launcher hands to other machines."""
        if self.hostfile is None:
            return
        path = folder / "deepspeed_env"
        lines = [
            f"{name}={value}\n"
            for name, value in environment.items()
            # It puts values between double quotes, for a shell.
            if name.startswith(EXPORTED) and not set(value) & set('"$`\\\n')
        ]
        write_text(path, "".join(lines))
        environment["DS_ENV_FILE"] = str(path)

    def _shares(self, num_ranks: int) -> tuple[int, int]:
        """Return how many machines run, and the ranks of each: they are equal.

        Raises:
            ConfigError: the ranks cannot be shared out, or the hosts have too few slots for them.
        """
        slots = list(read_hostfile(self.hostfile).values()) if self.hostfile else []
        nodes = self.nnodes or (
            int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) if self.kind == SRUN else 1
        )
        if slots and self.nnodes is None:
            nodes = next(
                (n for n in range(1, len(slots)) if sum(slots[:n]) >= num_ranks), len(slots)
            )
        each, left = divmod(num_ranks, nodes)
        if left:
            raise ConfigError(
                f"{nodes} nodes: {num_ranks} ranks cannot be shared out equally over them; --dp N "
                "sets how many there are (tp x pp x dp)"
            )
        if slots and (nodes > len(slots) or each > min(slots[:nodes])):
            raise ConfigError(
                f"{nodes} nodes of {each} ranks: hostfile '{self.hostfile}' has hosts of "
                f"{', '.join(map(str, slots))} slots; give --nnodes, or fewer ranks"
            )
        return nodes, each

    def _torchrun(self, program: Program, num_ranks: int) -> list[str]:
        nodes, each = self._shares(num_ranks)
        return [
            *_TORCHRUN,
            f"--nnodes={nodes}",
            # The first machine has rank 0, and with it the log's own lines.
            "--node-rank=0",
            f"--nproc-per-node={each}",
            "--rdzv-backend=static",
            f"--rdzv-endpoint={self.rdzv_endpoint}",
            *program.words,
        ]

    def _srun(self, program: Program, num_ranks: int, port: int) -> list[str]:
        nodes, each = self._shares(num_ranks)
        srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        srun += ["--kill-on-bad-exit=1", f"--chdir={ROOT}"]
        if cores := os.environ.get("SLURM_CPUS_PER_TASK"):
            srun.append(f"--cpus-per-task={cores}")  # srun does not take it over from the job
        return [
            *srun,
            *_TORCHRUN,
            f"--nnodes={nodes}",
            f"--nproc-per-node={each}",
            "--rdzv-backend=c10d",
            f"--rdzv-id={port}",
            # The script of a job runs on its first node.
            f"--rdzv-endpoint={self.rdzv_endpoint or f'{socket.gethostname()}:{port}'}",
            *program.words,
        ]

    def _deepspeed(self, program: Program, num_ranks: int, port: int) -> list[str]:
        address = "127.0.0.1"
        if self.hostfile is None:
            # Without a hostfile it would look for one in /job.
            options = ["--hostfile", os.devnull, *_devices(num_ranks)]
        else:
            options = self._on_hosts(self.hostfile, program, num_ranks)
            address = next(iter(read_hostfile(self.hostfile))).rpartition("@")[2]
            if self.rdzv_endpoint:
                address = self.rdzv_endpoint.rpartition(":")[0]
        return [
            *(sys.executable, "-m", "deepspeed.launcher.runner"),
            *options,
            *("--master_addr", address, "--master_port", str(port)),
            "--no_local_rank",
            *(["--module"] if program.is_module else []),
            program.name,
            *program.arguments,
        ]

    def _on_hosts(self, hostfile: Path, program: Program, num_ranks: int) -> list[str]:
        nodes, each = self._shares(num_ranks)
        for word in program.words:
            if shlex.quote(word) != word:
                raise ConfigError(
                    f"{word!r}: DeepSpeed's launcher hands this to a remote shell as it is; use "
                    "letters, digits and . _ / : = @ % + - alone in paths and values"
                )
        hosts = ["--hostfile", str(hostfile.absolute())]
        return [*hosts, "--num_nodes", str(nodes), "--num_gpus", str(each)]


THIS_MACHINE = Launcher()


def read_hostfile(path: Path) -> dict[str, int]:
    """Return the slots of a hostfile's hosts: lines ``HOST slots=N``, which DeepSpeed checks.

    Raises:
        ConfigError: the file cannot be read, or has no such line.
    """
    try:
        found = _HOST_LINE.findall(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"hostfile {str(path)!r} cannot be read: {error}") from None
    if not found:
        raise ConfigError(f"hostfile {str(path)!r} has no line HOST slots=N")
    return {name: int(slots) for name, slots in found}


def _devices(num_ranks: int) -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "").split(",")
    if all(map(str.isdigit, visible)) and len(visible) >= num_ranks:
        # It counts from 0 otherwise, and leaves the devices that the caller chose.
        return ["--include", f"localhost:{','.join(visible[:num_ranks])}"]
    return ["--num_gpus", str(num_ranks)]
