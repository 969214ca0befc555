"""How much accuracy quantization costs, on models with real weights: `make accuracy`."""
