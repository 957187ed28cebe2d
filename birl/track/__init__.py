"""What a run tells the world: files, TensorBoard, W&B, the terminal and a report (`tracker.Tracker` is the way in)."""
