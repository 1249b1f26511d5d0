"""What runs inside a rank of a comparison."""
