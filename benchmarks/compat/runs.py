"""What is run in an environment: the table of comparisons with stock, or the trainers' tests."""

from __future__ import annotations

import json
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.compat.environments import BUILT, Environment
from benchmarks.process import SOURCE_FOLDER, explain_status, run
from launch.hosts.ranks import free_port

WORKER = SOURCE_FOLDER / "tests" / "integration" / "engine" / "equality_worker.py"
SETTINGS: dict[str, Any] = tomllib.loads(
    (SOURCE_FOLDER / "pyproject.toml").read_text(encoding="utf-8")
)["tool"]["compat"]
"""Which Pythons, releases and tests, from pyproject.toml."""
TRAINER_TESTS: tuple[str, ...] = tuple(SETTINGS["trainer-tests"])
_VERSIONS = (
    "import json; from importlib.metadata import version; "
    "print(json.dumps({name: version(name) for name in ('torch', 'deepspeed', 'megatron-core')}))"
)


def versions_of(environment: Environment) -> dict[str, str]:
    """Package -> release, as an environment itself says."""
    command = [environment.python, "-c", _VERSIONS]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    versions: dict[str, str] = json.loads(text)
    return versions


def run_equality(
    environment: Environment, extent: str, ranks: Iterable[int], limit_s: float
) -> dict[str, Any]:
    """Compare with stock on each number of ranks.

    Args:
        environment: Whose DeepSpeed is stock.
        extent: Of the worker's table.
        ranks: Numbers of ranks, one after the other.
        limit_s: For each of them.

    Returns:
        Fields of a ``Result``.
    """
    reports: dict[int, list[dict[str, Any]]] = {}
    for number in ranks:
        with tempfile.TemporaryDirectory() as folder:
            words = (str(WORKER), extent, f"{folder}/report", folder)
            log = BUILT / f"{environment.folder.name}-{number}.log"
            launcher = ("-m", "torch.distributed.run", f"--nproc-per-node={number}")
            port = f"--master-port={free_port()}"
            command = [environment.python, *launcher, "--master-addr=127.0.0.1", port, *words]
            status = run(command, log, limit_s, environment.variables(), folder=SOURCE_FOLDER)
            if status != 0:
                reason = explain_status(status, limit_s, log)
                return {**summary(reports), "reason": f"{number} ranks: {reason} ({log.name})"}
            paths = [Path(f"{folder}/report.{rank}.json") for rank in range(number)]
            reports[number] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return summary(reports)


def summary(reports: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """What the reports of the worker say together.

    Args:
        reports: Number of ranks -> report of each rank.

    Returns:
        Fields of a ``Result``. A wait that may be left out without a difference counts as one.
    """
    equal: dict[str, int] = {}
    different: list[str] = []
    refused: dict[str, str] = {}
    of_feature: dict[str, bool] = {}
    for number, of_rank in reports.items():
        found = {
            key: any(r["comparisons"][key] for r in of_rank) for key in of_rank[0]["comparisons"]
        }
        equal[str(number)] = sum(not differs for differs in found.values())
        different += [f"{number} ranks: {key}" for key, differs in found.items() if differs]
        controls = of_rank[0]["controls"].items()
        different += [f"{number} ranks: without {key}" for key, differs in controls if not differs]
        refused |= dict.fromkeys(of_rank[0]["left_out"], "that release does not have it")
        refused |= of_rank[0]["refused"]
        for key, differs in found.items():
            feature = key.partition(" | ")[0]
            of_feature[feature] = of_feature.get(feature, True) and not differs
    return {
        "equal": equal,
        "different": different,
        "refused": refused,
        "features": of_feature,
    }


def run_trainer(environment: Environment, limit_s: float) -> dict[str, Any]:
    """Run the trainers' tests; returns fields of a ``Result``."""
    log = BUILT / f"{environment.folder.name}-trainer.log"
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        options = ("-q", "-m", "not exhaustive", "-p", "no:cacheprovider", f"--junitxml={results}")
        command = [environment.python, "-m", "pytest", *options, *TRAINER_TESTS]
        status = run(command, log, limit_s, environment.variables(), folder=SOURCE_FOLDER)
        if status not in (0, 1) or not results.is_file():
            return {"reason": f"{explain_status(status, limit_s, log)} ({log.name})"}
        cases = list(ElementTree.parse(results).getroot().iter("testcase"))
    bad = [
        case for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return {
        "equal": {"1": len(cases) - len(bad) - len(skipped)},
        "different": [f"{case.get('classname')}.{case.get('name')}" for case in bad],
    }
