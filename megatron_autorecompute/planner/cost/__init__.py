"""What a policy costs, whoever chose it.

`layout` and `schedule` say what runs where and in which order, `unit_costs` what a unit takes.
`peak_memory` and `step_time` put them together, `policy_cost` is all of it.
"""
