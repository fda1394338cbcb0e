"""Steps that NVIDIA published of Megatron Bridge, beside predictions of the same recipes."""
