"""Profiles without a device: the real Megatron model on meta tensors, times by a roofline.

`job` describes the training job, and `devices` the rates of a device. `kernels` has stand-ins for
fused kernels that need a device, `model` builds one rank's layers from Megatron's own specs,
`roofline` times operations, `kept_bytes` and `static_bytes` count what lives through the step, and
`profiling` makes the `Profile`.
"""
