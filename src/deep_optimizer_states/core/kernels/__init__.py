"""Adam for the CPU and for the GPU, with the same bits."""
