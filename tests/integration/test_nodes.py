"""Runs over two hosts: network namespaces of this machine, under the real launchers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.hosts.ranks import free_port

ROOT = Path(__file__).resolve().parents[2]
FAKES = ROOT / "tests" / "unit" / "launch" / "fakes"
PATHS = os.pathsep.join([str(FAKES), str(ROOT / "src")])


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def hosts():
    """Addresses of two hosts that see each other, and what the fake ssh must know of them."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need iproute2's `ip`")
    names = [f"dos-{os.getpid()}-{letter}" for letter in "ab"]
    made = [name for name in names if ip("netns", "add", name).returncode == 0]
    try:
        if made != names:
            pytest.skip("network namespaces cannot be made here (they need root)")
        pair = [f"v{os.getpid()}{letter}" for letter in "ab"]
        done = ip("link", "add", pair[0], "type", "veth", "peer", "name", pair[1])
        if done.returncode:
            pytest.skip(f"no veth pair can be made here: {done.stderr.strip()}")
        addresses = ["10.213.77.1", "10.213.77.2"]
        for name, link, address in zip(names, pair, addresses, strict=True):
            for words in (
                ["link", "set", link, "netns", name],
                ["-n", name, "link", "set", link, "name", "eth0"],
                ["-n", name, "addr", "add", f"{address}/30", "dev", "eth0"],
                ["-n", name, "link", "set", "eth0", "up"],
                ["-n", name, "link", "set", "lo", "up"],
            ):
                done = ip(*words)
                assert done.returncode == 0, done.stderr
        pairs = zip(addresses, names, strict=True)
        yield addresses, " ".join(f"{address}={name}" for address, name in pairs)
    finally:
        for name in made:
            ip("netns", "del", name)


def environment(**more):
    path = os.pathsep.join([str(FAKES), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **more}


def command(results, *words):
    options = ["--results-dir", str(results), "--no-echo", "--monitor-interval", "0"]
    return [sys.executable, "-m", "launch.run", "tiny", "--dp", "2", *options, *words]


def hostfile(folder, addresses):
    path = folder / "host file"
    path.write_text("".join(f"{address} slots=1\n" for address in addresses))
    return str(path)


def run_dir(results):
    (path,) = results.glob("single/log-*/run-001")
    return path


def result(results):
    text = (run_dir(results) / "metrics.jsonl").read_text()
    events = [json.loads(line) for line in text.splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "iteration"]
    return losses, events[-1]["weights_sha256"], events[-1]["optimizer_sha256"]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hosts_train_as_one_machine_does(tmp_path, hosts):
    addresses, known = hosts
    far = ["--hostfile", hostfile(tmp_path, addresses)]
    env = environment(SSH_HOSTS=known, GLOO_SOCKET_IFNAME="eth0")
    ways = {
        "one": ([], environment()),
        "torchrun": (far, env),
        "deepspeed": ([*far, "--launcher", "deepspeed"], env),
    }
    results = {}
    for name, (words, variables) in ways.items():
        words = [*words, "--iterations", "2", "--device", "cpu"]
        done = subprocess.run(
            command(tmp_path / name, *words),
            cwd=ROOT,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        log = "".join(path.read_text() for path in (tmp_path / name).rglob("log-*.log"))
        assert done.returncode == 0, done.stderr + log[-3000:]
        results[name] = result(tmp_path / name)
    assert len(results["one"][0]) == 2
    assert results["torchrun"] == results["deepspeed"] == results["one"]


STAGES = """
name = "stages"
model = "tiny"
point = { pp = 2, dp = 1, device = "cpu", iterations = 2, eval_interval = 0, global_batch_size = 8 }
engines = [{ engine = "cb+fe", inter_grad_comp_rank = 4 }]
"""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_batch_job_of_two_hosts_trains_stages_as_one_machine_does(tmp_path, hosts):
    """LSF's own script, started with what LSF tells a job; the link between stages is a veth."""
    addresses, known = hosts
    sweep = tmp_path / "stages.toml"
    sweep.write_text(STAGES)
    told = tmp_path / "hosts"
    told.write_text("".join(f"{address}\n" * 2 for address in addresses))  # a line a slot
    words = ["--study", "optimus-cc", "--sweep", str(sweep), "--results-dir"]
    lsf = {"LSB_DJOB_HOSTFILE": str(told), "LSB_JOBID": "7", "LSB_JOBINDEX": "1"}
    env = environment(SSH_HOSTS=known, GLOO_SOCKET_IFNAME="eth0", **lsf)
    env["BATCH_LOG"] = str(tmp_path / "calls")
    far, near = tmp_path / "far", tmp_path / "near"
    submit = [sys.executable, "-m", "launch.submit", "--scheduler", "lsf", "--ranks-per-node", "1"]
    rest = ["--", "--monitor-interval", "0"]
    subprocess.run([*submit, *words, str(far), *rest], cwd=ROOT, env=env, check=True)
    (script,) = far.glob("optimus-cc/stages/submissions/001/stages-2-nodes.sh")
    sweep_here = [sys.executable, "-m", "launch.sweep", *words, str(near), *rest[1:], "--no-report"]
    found = []
    for folder, words in ((far, ["bash", str(script)]), (near, sweep_here)):
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        log = "".join(path.read_text() for path in folder.rglob("log-*.log"))
        assert done.returncode == 0, done.stdout + done.stderr + log[-3000:]
        (metrics,) = folder.rglob("metrics.jsonl")
        events = [json.loads(line) for line in metrics.read_text().splitlines()]
        losses = [event["loss"] for event in events if event["event"] == "iteration"]
        found.append((losses, events[-1]["weights_sha256"], events[-1]["optimizer_sha256"]))
    assert len(found[0][0]) == 2
    assert found[0] == found[1]
    (nodes,) = far.rglob("nodes.json")
    assert [start["host"] for start in json.loads(nodes.read_text())["starts"]] == addresses


@pytest.fixture
def empty_data(tmp_path):
    prefix = tmp_path / "data"
    for end in (".bin", ".idx"):
        Path(f"{prefix}{end}").touch()
    return ["--data-prefix", str(prefix), "--trainer-module", "fake_trainer", "--device", "cpu"]


@pytest.mark.exhaustive
def test_srun_starts_one_launcher_a_node(tmp_path, empty_data):
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    env = environment(PYTHONPATH=PATHS, FAKE_TRAINER="ok", **job)
    words = [*empty_data, "--srun", "--master-addr", "127.0.0.1"]
    done = subprocess.run(
        command(tmp_path / "shared", *words),
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (log,) = run_dir(tmp_path / "shared").glob("log-*.log")
    for rank in range(2):
        assert f"rank {rank} of 2 how ok" in log.read_text()


@pytest.mark.exhaustive
def test_nodes_that_are_started_by_hand_find_each_other(tmp_path, empty_data):
    words = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    words += empty_data
    env = environment(PYTHONPATH=PATHS, FAKE_TRAINER="ok")
    nodes = [
        subprocess.Popen(
            command(tmp_path / "shared", *words, "--node-rank", str(node)),
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (1, 0)
    ]
    said = [node.communicate()[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    folder = run_dir(tmp_path / "shared")
    assert json.loads((folder / "status.json").read_text())["status"] == "ok"
    (log,) = folder.glob("log-*.log")
    assert "rank 0 of 2 how ok" in log.read_text()
    assert "rank 1 of 2 how ok" in (folder / "node-1.log").read_text()
