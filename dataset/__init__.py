"""Text to training tokens: a corpus, its vocabulary and Megatron's ``.bin``/``.idx``.

Run from the root of the checkout (``dataset`` is also a name on PyPI)::

    python -m dataset prepare           # last line of stdout: the prefix to train on
    python -m dataset inspect PREFIX    # documents, tokens, a decoded sample, checks

One module, one step::

    embedded.py    the corpus every CPython ships: documentation topics, docstrings
    vocabulary.py  byte-level BPE: training, encoding, end-of-document
    indexed.py     the .bin/.idx pair: written by megatron-core, read by numpy
    manifest.py    what a prepared folder says of itself: manifest.json
    cache.py       folders named by their content, published whole or not at all
    prepare.py     the steps in order, for any Source
    inspection.py  the checks behind `inspect`

Another corpus is another `source.Source`; nothing else has to change for it.
"""
