"""The code that runs in a training job: it applies policies, measures choices, and runs plans."""
