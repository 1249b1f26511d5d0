"""The micro-benchmarks, each against a peer and a roofline."""
