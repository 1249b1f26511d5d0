"""What rows on NVMe need of locked memory and of disks."""
