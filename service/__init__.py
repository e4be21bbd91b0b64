"""The HTTP server: the Open Inference Protocol and plain JSON in front of one model with three backends."""
