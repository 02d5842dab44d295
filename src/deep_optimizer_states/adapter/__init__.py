"""Our half of DeepSpeed's ZeRO optimizers: the only package that knows DeepSpeed's internals.

``hooks`` stands around methods of its config and engine, and ``guard`` refuses releases that are
not known. ``zero12`` and ``zero3`` have one subclass of stock's optimizer each. It hands its work
to objects of its own and to what all stages share: ``steppers`` (both Adams and the lanes),
``homes`` (where optimizer state lives) and ``launcher`` (which launches one update a step).
"""
