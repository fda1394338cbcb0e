"""From a profile to a plan. Imports neither torch nor Megatron.

`cost` is what a policy costs, `search` which policy is best, `plan` the result as a file.
"""
