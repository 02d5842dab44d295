"""The engine: Adam on tiles of master weights, moments, gradients and weights, over several lanes.

It knows torch and not DeepSpeed: ``adapter`` hands it tiles, and says when they may be stepped.
"""
