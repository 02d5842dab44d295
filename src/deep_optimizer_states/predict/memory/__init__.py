"""Memory of a training run, array by array: one model for ``plan``, admission and ``advise``.

``architecture`` counts parameters and what autograd keeps of a model, ``setting`` is what a run is
configured as, ``arrays`` the arrays of its states and buffers, ``activations`` what its passes
hold, and ``peaks`` their sum at the times at which a run takes the most. ``offload`` predicts the
workloads of the performance model from the same arrays.
"""
