"""Mend what DeepSpeed before 0.19.8 does wrong on gloo, in stock and ours alike.

It waits for the last of several gathers, which end one by one there: with ranks that are late, two
runs of stock itself differ.
"""


def wait_for_every_gather(*modules):
    """Let each gather of these modules of DeepSpeed's be waited for when it is begun."""
    for module in modules:
        for name in ("all_gather", "all_gather_into_tensor"):
            setattr(module, name, _waited_for(getattr(module, name)))


def _waited_for(gather):
    def gather_and_wait(*args, **kwargs):
        handle = gather(*args, **kwargs)
        if handle is not None:
            handle.wait()
        return handle

    return gather_and_wait
