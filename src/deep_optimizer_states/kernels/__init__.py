"""Adam in DeepSpeedCPUAdam's exact arithmetic: scalars, host kernel, device kernel."""
