"""Code that runs inside a rank of a comparison."""
