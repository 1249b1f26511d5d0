"""What a launcher and its ranks say to each other."""
