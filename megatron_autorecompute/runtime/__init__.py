"""What happens in a training job: policies applied, choices measured, a plan found and kept to."""
