"""A small grammar of film reviews, for machines that cannot download real ones.

A review's label is the sign of what most of its opinions say. What makes it hard to read off single
words: opinions against the verdict, negated adjectives, and sentences about the story that hold
adjectives without meaning an opinion. Some verdicts are wrong on purpose, so that no model that has
learned the grammar gets everything right.
"""

from __future__ import annotations

from random import Random

NOISE = 0.06
"""Share of reviews whose label is not what their opinions say."""
AGREES = 0.85
"""Share of a review's opinions that are on the side of its label."""
NEGATED = 0.15
"""Share of opinions that negate an adjective of the other side."""

_GOOD = (
    *("brilliant", "moving", "gripping", "charming", "inventive", "tender", "hilarious"),
    *("convincing", "graceful", "sharp", "haunting", "warm", "fresh", "dazzling", "clever"),
)
_BAD = (
    *("dull", "clumsy", "tedious", "shallow", "lifeless", "predictable", "grating", "muddled"),
    *("wooden", "stale", "pointless", "sloppy", "dreary", "forced", "hollow"),
)
_ASPECTS = (
    *("the acting", "the script", "the camera work", "the pacing", "the score", "the ending"),
    *("the dialogue", "the lead", "the editing", "the humour", "the opening", "the villain"),
)
_OPINIONS = (
    "{aspect} is {adverb} {adjective}",
    "i found {aspect} {adverb} {adjective}",
    "{aspect} felt {adjective} from start to finish",
    "everybody told me that {aspect} would be {adjective}, and it is",
    "there is something {adjective} about {aspect}",
)
_NEGATED = (
    "{aspect} is not {adjective} at all",
    "i would never call {aspect} {adjective}",
    "nothing about {aspect} is {adjective}",
)
_ADVERBS = ("really", "quite", "rather", "truly", "somewhat", "oddly", "simply")
_PEOPLE = ("a retired sailor", "two sisters", "a young clerk", "an old painter", "a lonely judge")
_PLACES = ("a harbour town", "the far north", "a crowded city", "an empty hotel", "the desert")
_EVENTS = (
    "finds a letter that was never sent",
    "must choose between a friend and a promise",
    "loses everything in a single night",
    "waits for a train that does not come",
    "hides a secret from the whole family",
)
_STORY = (
    "the story follows {person} in {place}",
    "in {place}, {person} {event}",
    "it begins when {person} {event}",
    "critics argued over a {adjective} scene with {person}",
    "i saw it with a friend who once lived in {place}",
)
_JOINTS = (". ", ". ", ". ", ", and ", "; ", ". still, ", ". then again, ")


def compose(numbers: Random, positive: bool) -> str:
    """One review.

    Args:
        numbers: where chance comes from.
        positive: the label that it will have.
    """
    says = positive != (numbers.random() < NOISE)
    num_opinions = numbers.choice((1, 3, 3, 3, 5))
    # An odd number of opinions with fewer than half against the verdict never leaves it open.
    against = sum(numbers.random() > AGREES for _ in range(num_opinions))
    sides = [says] * num_opinions
    for place in range(min(against, num_opinions // 2)):
        sides[place] = not says
    sentences = [_opinion(numbers, good) for good in sides]
    sentences += [_story(numbers) for _ in range(numbers.choice((0, 0, 1, 1, 3)))]
    numbers.shuffle(sentences)
    text = sentences[0]
    for sentence in sentences[1:]:
        text += numbers.choice(_JOINTS) + sentence
    return f"{text}."


def _opinion(numbers: Random, good: bool) -> str:
    negated = numbers.random() < NEGATED
    words = _GOOD if good != negated else _BAD
    return numbers.choice(_NEGATED if negated else _OPINIONS).format(
        aspect=numbers.choice(_ASPECTS),
        adverb=numbers.choice(_ADVERBS),
        adjective=numbers.choice(words),
    )


def _story(numbers: Random) -> str:
    return numbers.choice(_STORY).format(
        person=numbers.choice(_PEOPLE),
        place=numbers.choice(_PLACES),
        event=numbers.choice(_EVENTS),
        adjective=numbers.choice(_GOOD + _BAD),
    )
