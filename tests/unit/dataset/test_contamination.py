import random

import pytest

from dataset import contamination
from dataset.contamination import Contamination

QUESTION = "which of these seven animals would jump over a lazy dog in the old village at night"


def filler(seed, num_words=200):
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(10_000)}" for _ in range(num_words))


def sentences(seed):
    return f"{filler(seed)}. Then {filler(seed + 100, 60)}"


def test_what_is_shared_goes_with_its_surroundings_up_to_the_ends_of_sentences():
    # The ends of sentences next to it lie within the margin.
    text = f"{sentences(1)}. So. {QUESTION.upper()}. So! {filler(3, 60)}! So {filler(4)}"
    known = Contamination([QUESTION])
    assert known.clean(text) == [f"{filler(1)}.", f" So {filler(4)}"]
    # Without an end of a sentence all of that side goes.
    assert known.clean(f"{filler(1)} {QUESTION} {filler(2)}") == []
    assert known.clean(filler(5)) == [filler(5)]


@pytest.mark.parametrize(
    ("num_words", "changed", "is_found"),
    [
        (17, 13, True),  # the first 13 words in a row
        (17, 12, False),
        (8, 8, True),  # a short one counts as a whole
        (7, 7, False),  # a shorter one could be in any text
    ],
)
def test_thirteen_words_in_a_row_or_a_whole_text_of_eight_are_shared(num_words, changed, is_found):
    known = Contamination([" ".join(QUESTION.split()[:num_words])])
    shared = [*QUESTION.split()[:changed], *(["other"] * (num_words - changed))]
    text = f"{sentences(1)} {' '.join(shared)}. {filler(3)}"
    assert (known.clean(text) != [text]) is is_found


def test_short_pieces_go_and_a_text_of_many_pieces_goes_whole(monkeypatch):
    known = Contamination([QUESTION])
    long = f"{filler(1)}. {filler(2, 60)} {QUESTION} {filler(3, 60)}. Short. {filler(4, 60)} "
    text = f"{long} {QUESTION} {filler(5, 60)}. {filler(6)}."
    assert known.clean(text) == [f"{filler(1)}.", f" {filler(6)}."]
    monkeypatch.setattr(contamination, "MOST_PIECES", 1)
    assert known.clean(text) == []


def test_a_common_phrase_stays_whole_and_is_counted_at_all_its_places():
    counts = Contamination([QUESTION]).count(f"{filler(1)} {QUESTION} {filler(2)}")
    assert list(counts.values()) == [1] * 5  # 17 words hold five sequences of 13
    text = f"{sentences(1)} {QUESTION}. {filler(3)}"
    assert Contamination([QUESTION], frozenset(counts)).clean(text) == [text]


def test_letters_whose_lower_case_is_longer_do_not_move_the_cut():
    text = f"{'İ' * 400}. {filler(1, 60)} {QUESTION} {filler(2, 60)}. {'İ' * 300}"
    assert Contamination([QUESTION]).clean(text) == [f"{'İ' * 400}.", f" {'İ' * 300}"]
