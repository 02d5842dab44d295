import sys
import threading

import pytest
from processes import wait_for

from dataset import alive as module
from dataset.alive import alive
from dataset.default.build import prepare
from dataset.tokenizer.bpe import ByteLevelBpe


def test_a_long_step_is_heard_of_until_it_is_over(monkeypatch, capsys):
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    heard = ""

    def is_heard_twice():
        nonlocal heard
        heard += capsys.readouterr().err
        return heard.count("\n") > 1

    with alive("thinking"):
        wait_for(is_heard_twice)
    assert heard.startswith("thinking: 0 s so far\n")
    assert not any(thread.name.endswith("(tell)") for thread in threading.enumerate())


def test_a_short_step_and_one_that_fails_say_nothing(capsys):
    with pytest.raises(ZeroDivisionError), alive("thinking"):
        sys.exit(1 / 0)
    assert capsys.readouterr().err == ""


def test_building_the_default_corpus_is_heard_of(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    real, said = ByteLevelBpe.learn.__func__, []

    def learn(cls, texts, vocab_size):
        def is_heard():
            said.append(capsys.readouterr().err)
            return "building the default corpus: 0 s so far" in said[-1]

        wait_for(is_heard)
        return real(cls, texts, vocab_size)

    monkeypatch.setattr(ByteLevelBpe, "learn", classmethod(learn))
    assert prepare(source, tmp_path, lambda line: None, 300).is_new
