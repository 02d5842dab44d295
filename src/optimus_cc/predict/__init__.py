"""Predicts an iteration of 1F1B with compressed communication; nothing is run, and no torch needed.

Reading order: :mod:`~optimus_cc.predict.workload` (sizes and FLOPs),
:mod:`~optimus_cc.predict.fluid` (the event simulation),
:mod:`~optimus_cc.predict.pipeline` (what every rank does in it),
:mod:`~optimus_cc.predict.cluster` and :mod:`~optimus_cc.predict.fit` (where times come from).
"""
