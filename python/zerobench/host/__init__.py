"""What the kernel and the driver tell about this host: processors, memory, disks, GPUs, processes."""
