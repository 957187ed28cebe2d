"""Reports of a run: files, TensorBoard, W&B, the terminal and an HTML report (`tracker.Tracker` is the entry point)."""
