"""DeepSpeed's ZeRO stages, SuperOffload and DeepCompile as strategies."""
