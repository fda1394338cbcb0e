"""What tests, benchmarks and scripts share; it knows none of them."""
