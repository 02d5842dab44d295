"""Where device lanes run: CUDA streams, or threads that emulate them on the CPU."""

from deep_optimizer_states.device.base import Device, Event, Lane, Wait

__all__ = ["Device", "Event", "Lane", "Wait"]
