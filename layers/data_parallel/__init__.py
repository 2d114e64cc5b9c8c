"""Training on several parts of a batch: replicated or sharded parameters, gradients and optimizer states."""
