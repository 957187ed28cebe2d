"""The part of KubeRay's RayJob (ray.io/v1, KubeRay 1.5.1 and newer) and of Kubernetes' pods that birl writes, as JSON
schema. Stricter than the operator where that is of use: a field that is not listed here is an error, as a misspelt one
would silently be dropped by some API servers."""

from typing import Any

QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"
NAME = {"type": "string", "pattern": r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"}
TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}


def thing(needed: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(needed),
        "properties": {**needed, **optional},
        "additionalProperties": False,
    }


def several(kind: dict[str, Any], least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": kind, "minItems": least}


def by_name(kind: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": kind}


METADATA = thing({"name": NAME}, namespace=NAME, labels=by_name(TEXT), annotations=by_name(TEXT))
# Only references: a value written into the manifest would be a secret in a file.
ENV = thing({"name": TEXT, "valueFrom": thing({"secretKeyRef": thing({"name": NAME, "key": TEXT})})})
AMOUNTS = by_name({"type": "string", "pattern": QUANTITY})
CONTAINER = thing(
    {"name": NAME, "image": TEXT},
    workingDir=TEXT,
    env=several(ENV),
    resources=thing({}, requests=AMOUNTS, limits=AMOUNTS),
    securityContext=thing({}, allowPrivilegeEscalation={"const": False}),
    volumeMounts=several(thing({"name": NAME, "mountPath": TEXT}, subPath=TEXT, readOnly={"type": "boolean"})),
)
EMPTY = thing({}, medium={"const": "Memory"}, sizeLimit={"type": "string", "pattern": QUANTITY})
VOLUME = thing(
    {"name": NAME},
    emptyDir=EMPTY,
    configMap=thing({"name": NAME}),
    persistentVolumeClaim=thing({"claimName": NAME}),
) | {"minProperties": 2, "maxProperties": 2}
POD = thing(
    {"containers": several(CONTAINER, 1)},
    serviceAccountName=NAME,
    restartPolicy={"const": "Never"},
    securityContext=thing({}, fsGroup=COUNT),
    terminationGracePeriodSeconds=COUNT,
    volumes=several(VOLUME),
)
TEMPLATE = thing({"spec": POD}, metadata=METADATA)
# KubeRay writes them into the command `ray start`: texts only, numbers are refused
START = by_name({"type": "string"})
WORKERS = thing(
    {"groupName": NAME, "minReplicas": COUNT, "maxReplicas": COUNT, "rayStartParams": START, "template": TEMPLATE},
    replicas=COUNT,
    numOfHosts=COUNT,
)
CLUSTER = thing(
    {"headGroupSpec": thing({"rayStartParams": START, "template": TEMPLATE})},
    rayVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
    authOptions=thing({"mode": {"enum": ["token", "disabled"]}}),
    enableInTreeAutoscaling={"type": "boolean"},
    workerGroupSpecs=several(WORKERS),
)
JOB = thing(
    {"rayClusterSpec": CLUSTER},
    entrypoint=TEXT,
    shutdownAfterJobFinishes={"type": "boolean"},
    ttlSecondsAfterFinished=COUNT,
    activeDeadlineSeconds=COUNT,
    backoffLimit=COUNT,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
    suspend={"type": "boolean"},
)
RAY_JOB = thing({"apiVersion": {"const": "ray.io/v1"}, "kind": {"const": "RayJob"}, "metadata": METADATA, "spec": JOB})
CONFIG_MAP = thing(
    {
        "apiVersion": {"const": "v1"},
        "kind": {"const": "ConfigMap"},
        "metadata": METADATA,
        "data": {
            "type": "object",
            "patternProperties": {r"^[-._a-zA-Z0-9]+$": {"type": "string"}},
            "additionalProperties": False,
        },
    }
)
