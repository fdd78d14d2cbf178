"""The composition root: command line, Ray Serve app, OpenAI API, bundled models."""
