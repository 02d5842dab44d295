import json
import subprocess

import pytest

from configs.study import default_study, make_point, study_from
from launch import identity as module
from launch.identity import (
    REDACTED,
    code_of,
    git_state,
    provenance,
    relevant_environment,
    settings_key,
)
from launch.launchers import TRAINER_MODULE


def test_another_row_is_another_point():
    table = default_study().model_dump(mode="json", exclude_unset=True)
    model = default_study().load_model("tiny")[0].model_dump()

    def key(**row):
        engines = {**table["engines"], "dynamic": {**table["engines"]["dynamic"], **row}}
        study = study_from({**table, "name": "own", "engines": engines}, "here")
        return settings_key(study.make_point({"model": model, "engine": "dynamic"}))

    assert key() == key(title="other words") != key(ds_config={"x": 1})


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "fp16"},
        {"link_mbit": 20},
        {"zero_stage": 2},
        {"save_interval": 5},
        {"seed": 5},
    ],
    ids=str,
)
def test_a_field_of_another_value_is_another_point(fields):
    assert settings_key(make_point({"model": "tiny", **fields})) != settings_key(
        make_point({"model": "tiny"})
    )


def test_a_name_is_no_part_of_a_point():
    named = make_point({"model": "tiny", "name": "mine", "data_prefix": "elsewhere"})
    assert settings_key(named) == settings_key(make_point({"model": "tiny"}))


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with a trainer, what it imports, and what it does not."""
    root, plugin = tmp_path / "root", tmp_path / "root" / "src" / "plugin"
    files = {
        "launch/__init__.py": "",
        "launch/train.py": "import os\n\ndef main():\n    from launch.deep import loop\n",
        "launch/deep/__init__.py": "",
        "launch/deep/loop.py": "import plugin.zero\nimport torch\n",
        "launch/deep/unused.py": "",
        "launch/sweep.py": "import launch.train\n",
        "src/plugin/__init__.py": "",
        "src/plugin/zero.py": "",
        "src/plugin/other.py": "",
        "src/plugin/kernels/adam.cpp": "int x;",
        "notes.toml": "mine",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(module, "ROOT", root)
    monkeypatch.setattr(module, "PLUGIN", plugin)
    forget()
    yield root
    forget()


def forget():
    """Look at the files anew, as another process does."""
    for function in (module._files_of, module._hash):
        function.cache_clear()


USED = [
    *("launch/__init__.py", "launch/deep/__init__.py", "launch/deep/loop.py", "launch/train.py"),
    *("src/plugin/__init__.py", "src/plugin/kernels/adam.cpp", "src/plugin/zero.py"),
]


def test_files_are_those_that_a_program_imports_and_no_others(checkout):
    before = code_of(["launch.train"])
    assert list(before) == USED
    assert list(code_of(["no.module.of.ours"])) == []
    script = str(checkout / "launch" / "sweep.py")
    assert list(code_of([script])) == sorted([*USED, "launch/sweep.py"])
    for name in ("notes.toml", "launch/sweep.py", "launch/deep/unused.py", "new"):
        (checkout / name).write_text("other")
        forget()
        assert code_of(["launch.train"]) == before
    for name in USED:
        with (checkout / name).open("a") as file:
            file.write("\n# changed\n")
        forget()
        after = code_of(["launch.train"])
        assert [path for path in USED if before[path] != after[path]] == [name]
        before = after


def test_the_real_trainer_is_known_with_the_plugin_and_without_the_sweeps():
    files = code_of([TRAINER_MODULE])
    assert {"launch/pretrain_gpt.py", "launch/train_loop/loop.py", "configs/schema.py"} <= set(
        files
    )
    assert any(name.endswith("zero3/optimizer.py") for name in files)
    assert any(name.endswith("host_adam.cpp") for name in files)
    assert not any(name.startswith(("parse/", "plots/", "launch/sweep")) for name in files)


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
    assert record["environment"] == {"OMP_NUM_THREADS": "3"}
