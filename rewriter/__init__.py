"""k3rewrite: capture a model, rewrite its graph with named passes, emit the kernels of the target GPU."""
