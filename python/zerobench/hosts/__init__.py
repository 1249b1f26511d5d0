"""Start one program on several hosts with launchers that exist: torchrun, ssh, Slurm, SkyPilot, Kubeflow."""
