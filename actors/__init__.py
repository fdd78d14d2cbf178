"""Ray actors and gRPC servers: thin shells over plain classes."""
