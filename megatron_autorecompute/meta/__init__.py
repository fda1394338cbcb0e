"""Profiles without a device: the real Megatron model on meta tensors, times by a roofline.

`job` says what is asked, `devices` what a device can do, `kernels` stands in for fused kernels that
need a device, `model` builds one rank's layers from Megatron's own specs, `roofline` counts
operations, `static` bytes that live through the step, `profiling` puts a `Profile` together.
"""
