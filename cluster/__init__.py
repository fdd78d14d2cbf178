"""How the parts are spread: configuration, pipelines, the drafter hub and its wire."""
