"""Devices: CUDA streams, or threads that emulate them on the CPU."""
