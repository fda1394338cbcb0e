"""Everything that depends on megatron-core's version; from the sources of 0.16.1 to 0.19.2."""
