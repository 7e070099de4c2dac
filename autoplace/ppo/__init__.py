"""PPO itself: tensors in, tensors out, on whatever device they are."""
