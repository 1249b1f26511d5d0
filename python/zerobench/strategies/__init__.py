"""Ways to train: zerobench's own ZeRO stages and every peer, behind one protocol (base.py)."""
