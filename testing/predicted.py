"""What a training call needs under the policy that an `Auto` has in force, as its plan predicts."""

from megatron_autorecompute.lines import Microbatch
from megatron_autorecompute.planner.cost.lengths import Arrangement


def predicted_peaks(auto, lengths, routed=()):
    """Peak bytes of every stage in a call with these microbatches.

    Args:
        auto: one with a plan.
        lengths: tokens of each microbatch on this rank, in order; of a packed one, a list of its
            samples' tokens.
        routed: as `Auto.routed` has it after a call. Layers that are not named got the most tokens
            that were seen so far.
    """
    given = tuple(Microbatch.packed([one] if isinstance(one, int) else one) for one in lengths)
    schedule, named = auto.shard.schedule(len(lengths)), tuple(routed) if any(routed) else ()
    profile, layout = auto.plan.profile, auto.shard.layout
    return tuple(Arrangement(profile, layout, schedule, auto.policy, given, named).peaks())
