import subprocess

import pytest

from configs.errors import ConfigError
from configs.files import ROOT
from configs.schema import Model
from configs.study import default_study, load_study
from launch import cli, run

STUDY = default_study()
FIELDS = STUDY.point_type.model_fields


def overrides(*argv):
    return cli.field_overrides(run.build_parser(STUDY).read(["tiny", *argv]), STUDY)


def test_every_field_is_an_option():
    text = run.build_parser(STUDY).format_help()
    names = [*FIELDS, *(f"model.{n}" for n in Model.model_fields)]
    for name in names:
        assert f"--{name.replace('_', '-')} " in text
        assert overrides(f"--{name}", "7") == {name: "7"}


def test_fields_of_another_study_are_its_own(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "study.toml").write_text(
        'title = "own"\nreference = "e"\n[engines.e]\ntitle = "e"\n'
        '[fields.bucket_numel]\ntitle = "bucket"\ndescription = "Elements of a bucket."\n'
    )
    study = cli.study_in(["tiny", "--study", str(tmp_path / "own"), "--bucket-numel", "3"])
    parser = run.build_parser(study)
    assert "Elements of a bucket. [default 0]" in parser.format_help()
    given = parser.read(["tiny", "--bucket_numel", "3"])
    assert cli.field_overrides(given, study) == {"bucket_numel": "3"}
    with pytest.raises(ConfigError, match="unknown option '--stride'"):
        parser.read(["tiny", "--stride", "2"])


@pytest.mark.parametrize("words", [[], ["--study", "interleaved"], ["--study=interleaved"]])
def test_a_study_is_the_default_one_or_the_one_that_is_named(words):
    assert cli.study_in(["tiny", "--zzz", *words]) is STUDY


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strid", "2"], r"unknown option '--strid': did you mean '--stride'\?"),
        (["--lst"], r"unknown option '--lst': see --help$"),
        (["--timeout", "x"], r"--timeout.*'x'"),
        (["--timeout", "-1"], r"--timeout.*above 0"),
        (["--hang-timeout", "-1"], r"--hang-timeout.*0 or above"),
        (["--dataset-impl", "mmap"], r"--dataset-impl': leave it out: .* mmap"),
        (["--train_iters", "9"], r"unknown option '--train-iters': give --iterations$"),
        (["--monitor-interval", "nan"], r"--monitor-interval.*0 or above"),
    ],
)
def test_a_wrong_option_is_named(words, message):
    with pytest.raises(ConfigError, match=message):
        overrides(*words)


@pytest.mark.parametrize("name", cli.MEGATRON)
def test_what_stands_for_megatrons_option_is_there(name):
    known = run.build_parser(STUDY)._option_string_actions
    assert name not in known
    verb, _, flag = cli.MEGATRON[name].partition(" ")
    assert verb != "give" or flag.partition(":")[0].split()[0] in known


def test_a_switch_may_have_no_value_and_another_spelling():
    study = load_study("optimus-cc")

    def read(*words):
        return cli.field_overrides(run.build_parser(study).read(["tiny", *words]), study)

    for words in ("--check_orth_error_acti", "--check-orth-error", "--check-orth-error=true"):
        assert read(words) == {"check_orth_error": "true"}
    assert read("--check-orth-error", "false") == {"check_orth_error": "false"}


def test_the_help_says_what_of_the_results_stays_and_what_is_made_anew():
    script = subprocess.run(
        ["bash", "master-script.sh", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for text in (run.build_parser(STUDY).format_help(), script):
        words = " ".join(text.partition("--results-dir DIR")[2].split())
        assert "run folders stay" in words
        assert "tables, figures and report are made anew" in words
    assert "and stride, on a GPU auto too" in " ".join(script.split())
