"""`/openapi.json`: bodies and answers of the routes, which FastAPI does not parse itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from ..schema.request_models import RequestModel

REFS = "#/components/schemas/{model}"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the field at fault"},
                "code": {"type": "integer", "description": "the HTTP status"},
            },
        }
    },
}


def describe(app: FastAPI, bodies: Mapping[str, type[RequestModel]]) -> None:
    """Add bodies, by path, and errors to `/openapi.json`."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _schema(app, bodies)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign] - as FastAPI's documentation does


def _schema(app: FastAPI, bodies: Mapping[str, type[RequestModel]]) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    models = sorted(set(bodies.values()), key=lambda model: model.__name__)
    keys, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template=REFS
    )
    components = schema.setdefault("components", {})
    components["schemas"] = {**definitions["$defs"], "Error": ERROR}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    # A server without keys asks for none.
    schema["security"] = [{}, {"key": []}]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            _describe(operation)
            if method == "post" and path in bodies:
                reference = keys[bodies[path], "validation"]
                operation["requestBody"] = _json(reference, required=True)
                _describe_answer(operation, bodies[path])
    return schema


def _describe(operation: dict[str, Any]) -> None:
    """Every error has one shape."""
    responses = operation["responses"]
    responses.pop("422", None)
    responses["default"] = {
        "description": "an error",
        **_json({"$ref": REFS.format(model="Error")}),
    }


def _describe_answer(operation: dict[str, Any], model: type[RequestModel]) -> None:
    content = operation["responses"]["200"]["content"]
    content["application/json"] = {"schema": {"type": "object"}}
    if "stream" in model.model_fields:
        content["text/event-stream"] = {"schema": {"type": "string"}}


def _json(schema: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}, **more}
