"""Messages and jobs between a launcher and its ranks."""
