"""Text to training tokens: Megatron's ``.bin``/``.idx``, fast, exact, resumable.

Run from the root of the checkout (``dataset`` is also a name on PyPI)::

    python -m dataset prepare                   # default corpus; last line of stdout: its prefix
    python -m dataset prepare oscar-1gb         # the paper's corpus, fetched
    python -m dataset prepare --input F ...     # one's own text, Megatron's flags
    python -m dataset urls --input F ...        # sift lists of addresses
    python -m dataset download --input F ...    # pages to texts, politely, resumable
    python -m dataset clean --input F ...       # filter a crawl first
    python -m dataset shuffle --input F ...     # lines in a random order
    python -m dataset find oscar-1gb            # where prepared data lies
    python -m dataset inspect PREFIX            # documents, tokens, a decoded sample, checks
    python -m dataset merge PREFIX PREFIX ...   # several pairs to one

One folder, one concern::

    readers/       files to blocks: globs, compression, JSON lines and arrays, text, Parquet
    tokenizer/     byte-level BPE and SentencePiece, from local files or learnt
    pipeline/      blocks to parts by worker processes, parts to pairs; survives kill -9
    crawl/         addresses sifted, pages fetched by each host's rules
    clean/         text fixed, filtered, deduplicated, decontaminated
    fetch.py       the paper's corpus and GPT-2's vocabulary, from the hub or put there by hand
    default/       the corpus every CPython ships, cached by content
    cli/           the commands
    shuffling.py   lines in the order of a seed; outputs.py: files that are whole or not there
    indexed.py     the .bin/.idx format; manifest.py, inspection.py, merging.py: about pairs
"""
