"""The HTTP server: Open Inference Protocol and plain JSON in front of one model, three backends."""
