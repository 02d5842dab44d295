"""Text to training tokens: Megatron's ``.bin``/``.idx``, fast, exact, resumable.

Run from the root of the checkout (``dataset`` is also a name on PyPI)::

    python -m dataset prepare                   # default corpus; last line of stdout: its prefix
    python -m dataset prepare oscar-1gb         # the paper's corpus, fetched
    python -m dataset prepare --input F ...     # one's own text, Megatron's flags
    python -m dataset inspect PREFIX            # documents, tokens, a decoded sample, checks
    python -m dataset merge PREFIX PREFIX ...   # several pairs to one
    python -m dataset clean | decontaminate     # text of the web, on datatrove
"""
