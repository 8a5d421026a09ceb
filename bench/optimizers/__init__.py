"""block-optim's optimizers: time, memory, distance from fp32."""
