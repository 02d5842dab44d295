from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

TEXTS = [f"the cat number {n} sat on the mat and said {'meow ' * (n % 7)}" for n in range(40)]


@dataclass
class ListSource:
    texts: list[str] = field(default_factory=lambda: list(TEXTS))
    name: str = "listed"
    reads: int = 0

    def fingerprint(self) -> str:
        return repr(self.texts)

    def documents(self) -> Iterator[str]:
        self.reads += 1
        yield from self.texts


@pytest.fixture
def source():
    return ListSource()
