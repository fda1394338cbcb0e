"""What a policy costs, whoever chose it.

`layout` and `schedule` say what runs where and in which order, `unit_costs` what a unit takes.
`peak_memory` and `step_time` put them together, `policy_cost` is all of it.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
