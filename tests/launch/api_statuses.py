"""The answers with which an API server refuses, as the recordings of real servers have them."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]
_REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
}


def failure(code: int, message: str, details: Object | None = None, reason: str | None = None) -> Object:
    """Return the Status document of a refusal."""
    body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message}
    reason = _REASONS.get(code) if reason is None else reason
    body |= {"reason": reason} if reason else {}
    return body | ({} if details is None else {"details": details}) | {"code": code}


def named(group: str, plural: str | None) -> str:
    return f"{plural}.{group}" if group else str(plural)


def not_found(group: str, plural: str, name: str) -> Object:
    details = {"name": name} | ({"group": group} if group else {}) | {"kind": plural}
    return failure(404, f'{named(group, plural)} "{name}" not found', details)


def unknown_resource() -> Object:
    return failure(404, "the server could not find the requested resource", {})


def forbidden(user: str, verb: str, group: str, resource: str, name: str | None, namespace: str) -> Object:
    """Return the refusal of RBAC. `resource` is a plural, with its subresource if one was asked for."""
    plural = resource.partition("/")[0]
    what = named(group, plural) + (f' "{name}"' if name else "")
    said = f'{what} is forbidden: User "{user}" cannot {verb} resource "{resource}" in API group "{group}" in the namespace "{namespace}"'
    return failure(403, said, ({"name": name} if name else {}) | ({"group": group} if group else {}) | {"kind": plural})


def invalid(
    group: str, kind: str | None, name: str, field: str, fault: str, reason: str = "FieldValueInvalid"
) -> Object:
    causes = [{"reason": reason, "message": fault, "field": field}]
    details = {"name": name} | ({"group": group} if group else {}) | {"kind": kind, "causes": causes}
    return failure(422, f'{named(group, kind)} "{name}" is invalid: {field}: {fault}', details)


def deleted(group: str, plural: str, name: str, uid: str) -> Object:
    details = {"name": name} | ({"group": group} if group else {}) | {"kind": plural, "uid": uid}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
