"""From a profile to a plan. Imports neither torch nor Megatron.

`layout` and `schedule` say what runs where and in which order. `unit_costs`, `peak_memory`,
`step_time` and `policy_cost` compute what a policy costs. `search` and `planner` choose one.
`plan` is the result, as a file.
"""
