"""Our half of DeepSpeed's optimizer of ZeRO-1 and ZeRO-2.

``optimizer`` is the one subclass of stock's class. Stock reduces, accumulates and keeps gradients
as ever; ``gradients`` knows what they are still to be multiplied with, ``homes`` where optimizer
state lives, ``stock`` how it is cut into subgroups. The rest is what all stages share
(``deep_optimizer_states.zero``).
"""
