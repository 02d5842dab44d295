import json
import subprocess

from launch.records.provenance import (
    REDACTED,
    git_state,
    provenance,
    redact,
    relevant_environment,
)


def test_only_what_matters_of_the_environment_is_kept_and_secrets_are_not():
    kept = relevant_environment(
        {
            "OMP_NUM_THREADS": "2",
            "NCCL_DEBUG": "INFO",
            "HOME": "/home/someone",
            "GITHUB_TOKEN": "abc",
            "DS_API_TOKEN": "abc",
            "TORCH_HUB_PASSWORD": "abc",
            "CUDA_MIRROR": "https://someone:abc@host/x",
            "RANDOM": "abc",
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
        }
    )
    assert kept == {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "CUDA_MIRROR": f"https://{REDACTED}@host/x",
        "DS_API_TOKEN": REDACTED,
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "2",
        "TORCH_HUB_PASSWORD": REDACTED,
    }
    assert "abc" not in json.dumps(kept)


def test_a_url_keeps_its_host_alone():
    assert redact("--data=ssh://me:pw@host:22/a") == f"--data=ssh://{REDACTED}@host:22/a"
    assert redact("a@b") == "a@b"


def test_git_state_tells_commit_and_changes(tmp_path):
    def git(*words):
        identity = ["-c", "user.name=n", "-c", "user.email=e@x"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    assert git_state(tmp_path) is None
    git("init")
    assert git_state(tmp_path) is None
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    clean = git_state(tmp_path)
    assert clean is not None
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "a").write_text("2")
    changed = git_state(tmp_path)
    assert (changed["commit"], changed["dirty"]) == (clean["commit"], True)
    (tmp_path / "a").write_text("3")
    other = git_state(tmp_path)
    assert other["changes_sha256"] != changed["changes_sha256"]
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == changed


def test_provenance_is_json_with_versions_and_hardware():
    record = json.loads(json.dumps(provenance({"OMP_NUM_THREADS": "3"})))
    assert record["versions"]["pydantic"]
    assert record["cpu"]["cores_usable"] >= 1
    assert record["host_memory_bytes"] > 0
    assert all(node["cores"] for node in record["numa"])
    assert record["environment"] == {"OMP_NUM_THREADS": "3"}
