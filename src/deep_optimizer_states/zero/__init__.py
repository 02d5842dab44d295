"""What our halves of DeepSpeed's ZeRO optimizers share, whatever the stage.

``homes`` (where optimizer state lives), ``steppers`` (both Adams and the lanes), ``update`` (one
step's work and its launch) and ``loading`` (state that is replaced). ``zero3`` and ``zero12`` have
one subclass of stock's optimizer each, which hands its work to these and to objects of its own.
"""
