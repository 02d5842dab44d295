"""What the page on configurations says of DeepSpeed is what the installed release says."""

import re
import tomllib
from pathlib import Path

import pytest
from in_process import VERSION, ask, told

from ds_config.explain import words

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "studies" / "config-guide.md").read_text(encoding="utf-8")
of_this_release = pytest.mark.skipif(
    f"DeepSpeed {VERSION}" not in TEXT, reason="the page is of another DeepSpeed"
)


@of_this_release
def test_the_keys_that_have_gone_are_those_that_the_release_refuses():
    (line,) = re.findall(r"^Keys that end the start with an error: (.*)\.$", TEXT, re.MULTILINE)
    removed = {".".join(key) for key, fact in ask({}).keys.items() if fact.removed}
    assert set(re.findall(r"`([\w.]+)`", line)) == removed


@of_this_release
def test_the_older_names_are_those_that_the_release_renames():
    (line,) = re.findall(r"^Older names: (.*?)\. Other", TEXT, re.MULTILINE)
    known = ask({}).keys.items()
    renamed = {key[-1] for key, fact in known if fact.deprecated and fact.replaced_by}
    assert set(re.findall(r"`(\w+)`", line)) == renamed


def test_every_key_of_the_release_has_a_meaning():
    facts = ask({}).keys
    assert [
        key
        for key, fact in facts.items()
        if key not in words()
        and not fact.removed
        and key[0] != "bfloat16"
        and (*key[:-1], f"stage3_{key[-1]}") not in facts
    ] == []


def test_sizes_by_hidden_size_are_those_that_both_frameworks_compute():
    """Bucket, prefetch bucket and persistence threshold."""
    hidden = 4096
    (sizes,) = re.findall(r"\(4096: ([^)]*)\)", TEXT)
    expected = [hidden * hidden, 9 * hidden * hidden // 10, 10 * hidden]
    assert sizes.split(", ") == [f"{size:,}" for size in expected]


def test_two_buckets_take_what_explain_tells():
    zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8}
    found = told({"train_batch_size": 1, "bf16": {"enabled": True}, "zero_optimization": zero})
    (size,) = re.findall(r"holds two buckets .*: ([\d.]+ GB)", found.warnings[0].text)
    assert f"({size} in all at 5e8)" in TEXT


def test_the_illnesses_of_the_four_troubles_are_known():
    section = TEXT.partition("## The four troubles")[2].partition("\n## ")[0]
    named = re.findall(r"`([a-z]+(?:-[a-z]+)+)`", section)
    illnesses = tomllib.loads((ROOT / "parse" / "illnesses.toml").read_text())
    assert len(named) >= 7
    assert set(named) <= illnesses.keys()


def test_a_number_for_the_switch_is_refused_and_a_higher_start_is_not():
    zero = {"stage": 2, "overlap_comm": 0.5}
    assert not told({"train_batch_size": 1, "zero_optimization": zero}).is_accepted
    fp16 = {"enabled": True, "initial_scale_power": 32}
    assert told({"train_batch_size": 1, "fp16": fp16}).is_accepted
