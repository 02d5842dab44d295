"""Our half of DeepSpeed's optimizer of ZeRO-1 and ZeRO-2.

``optimizer`` is the subclass of stock's class. It hands its work to ``gradients`` (from backward to
the update) and ``stock`` (what is read of DeepSpeed's optimizer, and where state lives).
"""
