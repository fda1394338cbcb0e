"""All that knows megatron-core's versions; read from the sources of 0.16.1 to 0.19.2."""
