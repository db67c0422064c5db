"""Cut: data, tensor, pipeline, context and expert parallelism."""
