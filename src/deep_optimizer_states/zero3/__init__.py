"""Our half of DeepSpeed's ZeRO-3 optimizer.

``optimizer`` is our subclass of stock's class. It overrides stock's methods and hands their
work to objects that it owns: ``gradients`` (from backward to the update), ``gathers`` (who waits
for an update in flight), ``homes`` (where optimizer state lives), and what all stages share
(``deep_optimizer_states.zero``). ``stock`` lists all that these objects read of DeepSpeed's, and
``releases`` adds what older releases lack of it.
"""
