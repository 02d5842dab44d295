"""Our half of DeepSpeed's ZeRO-3 optimizer.

``optimizer`` is the subclass of stock's class. It hands its work to ``gradients`` (from backward to
the update), ``gathers`` (who waits for an update in flight), ``ahead`` (what begins in backward)
and ``stock`` (what is read of DeepSpeed's optimizer, and where state lives).
"""
