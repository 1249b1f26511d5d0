"""Facts from the kernel and the driver about this host: processors, memory, disks, GPUs, processes."""
