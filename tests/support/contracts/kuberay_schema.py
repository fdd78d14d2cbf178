"""What Kubernetes and its operators allow in the manifests of `deploy/kuberay/`, as far as they use
it.

Fields and types of KubeRay 1.6 (`ray-operator/apis/ray/v1`), whose whole CRD has 800 kB, of
Kubernetes 1.33 and of Prometheus' operator. A field that is not here is refused, so a misspelt one
is found.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
QUANTITY: Schema = {"type": "string", "pattern": r"^\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$"}


def fields(required: str = "", **properties: Schema) -> Schema:
    """An object of these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def one_of(*values: str) -> Schema:
    """One of these texts."""
    return {"enum": list(values)}


def several(item: Schema) -> Schema:
    """A list that is not empty."""
    return {"type": "array", "items": item, "minItems": 1}


SECRET_KEY = fields("secretKeyRef", secretKeyRef=fields("name key", name=TEXT, key=TEXT))
VARIABLE = {
    "oneOf": [
        fields("name value", name=TEXT, value=TEXT),
        fields("name valueFrom", name=TEXT, valueFrom=SECRET_KEY),
    ]
}
QUANTITIES = {"type": "object", "additionalProperties": QUANTITY}
RESOURCES = fields("requests limits", requests=QUANTITIES, limits=QUANTITIES)
POD_SECURITY = fields(
    "runAsNonRoot",
    runAsNonRoot=FLAG,
    runAsUser=COUNT,
    runAsGroup=COUNT,
    fsGroup=COUNT,
    seccompProfile=fields("type", type=one_of("RuntimeDefault")),
)
CONTAINER_SECURITY = fields(
    "allowPrivilegeEscalation readOnlyRootFilesystem",
    allowPrivilegeEscalation=FLAG,
    readOnlyRootFilesystem=FLAG,
    capabilities=fields("drop", drop=several(TEXT)),
)
VOLUME_MOUNT = fields("name mountPath", name=TEXT, mountPath=TEXT, readOnly=FLAG)
PROJECTION = fields(
    "secret",
    secret=fields("name", name=TEXT, items=several(fields("key path", key=TEXT, path=TEXT))),
)
VOLUME = {
    "oneOf": [
        fields("name emptyDir", name=TEXT, emptyDir=fields(medium=TEXT, sizeLimit=QUANTITY)),
        fields(
            "name secret",
            name=TEXT,
            secret=fields("secretName", secretName=TEXT, defaultMode=COUNT),
        ),
        fields(
            "name projected",
            name=TEXT,
            projected=fields("sources", defaultMode=COUNT, sources=several(PROJECTION)),
        ),
        fields(
            "name persistentVolumeClaim",
            name=TEXT,
            persistentVolumeClaim=fields("claimName", claimName=TEXT, readOnly=FLAG),
        ),
    ]
}
TOLERATION = fields(key=TEXT, operator=one_of("Exists", "Equal"), effect=TEXT)
CONTAINER = fields(
    "name image resources",
    name=TEXT,
    image=TEXT,
    imagePullPolicy=one_of("Always", "IfNotPresent", "Never"),
    securityContext=CONTAINER_SECURITY,
    env=several(VARIABLE),
    ports=several(fields("containerPort", containerPort=COUNT, name=TEXT)),
    resources=RESOURCES,
    volumeMounts=several(VOLUME_MOUNT),
)
POD = fields(
    "containers",
    automountServiceAccountToken=FLAG,
    terminationGracePeriodSeconds=COUNT,
    securityContext=POD_SECURITY,
    tolerations=several(TOLERATION),
    containers=several(CONTAINER),
    volumes=several(VOLUME),
)
TEMPLATE = fields("spec", metadata=fields(labels=TEXTS), spec=POD)
CLUSTER = fields(
    "headGroupSpec",
    rayVersion=TEXT,
    authOptions=fields(mode=one_of("disabled", "token"), secretName=TEXT),
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=fields(
        idleTimeoutSeconds=COUNT, upscalingMode=one_of("Default", "Aggressive", "Conservative")
    ),
    gcsFaultToleranceOptions=fields(
        "redisAddress",
        redisAddress=TEXT,
        redisPassword=fields(value=TEXT, valueFrom=SECRET_KEY),
        externalStorageNamespace=TEXT,
    ),
    headGroupSpec=fields("template", rayStartParams=TEXTS, template=TEMPLATE),
    workerGroupSpecs=several(
        fields(
            "groupName template",
            groupName=TEXT,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            numOfHosts=COUNT,
            rayStartParams=TEXTS,
            template=TEMPLATE,
        )
    ),
)
RAY_SERVICE = fields(
    "apiVersion kind metadata spec",
    apiVersion=one_of("ray.io/v1"),
    kind=one_of("RayService"),
    metadata=fields("name", name=TEXT, labels=TEXTS),
    spec=fields(
        "serveConfigV2 rayClusterConfig",
        serveConfigV2=TEXT,
        upgradeStrategy=fields(
            type=one_of("NewCluster", "None", "NewClusterWithIncrementalUpgrade")
        ),
        rayClusterDeletionDelaySeconds=COUNT,
        excludeHeadPodFromServeSvc=FLAG,
        rayClusterConfig=CLUSTER,
    ),
)
GROUP_VALUES = {
    "labels": TEXTS,
    "resources": RESOURCES,
    "tolerations": several(TOLERATION),
    "podSecurityContext": POD_SECURITY,
    "securityContext": CONTAINER_SECURITY,
    "volumes": several(VOLUME),
    "volumeMounts": several(VOLUME_MOUNT),
    "rayStartParams": TEXTS,
}
# Values of the chart kuberay/ray-cluster 1.6, as far as they are used.
HELM_VALUES = fields(
    "image common head worker",
    image=fields("repository tag", repository=TEXT, tag=TEXT, pullPolicy=TEXT),
    common=fields("containerEnv", containerEnv=several(VARIABLE)),
    head=fields("resources", **GROUP_VALUES),
    worker=fields(
        "groupName",
        groupName=TEXT,
        replicas=COUNT,
        minReplicas=COUNT,
        maxReplicas=COUNT,
        **GROUP_VALUES,
    ),
    service=fields("type", type=one_of("ClusterIP", "NodePort", "LoadBalancer")),
)

METADATA = fields("name", name=TEXT, labels=TEXTS)
SELECTOR = fields("matchLabels", matchLabels=TEXTS)
DURATION: Schema = {"type": "string", "pattern": r"^\d+(ms|s|m|h)$"}
# monitoring.coreos.com/v1 of Prometheus' operator 0.85, as far as it is used.
POD_MONITOR = fields(
    "apiVersion kind metadata spec",
    apiVersion=one_of("monitoring.coreos.com/v1"),
    kind=one_of("PodMonitor"),
    metadata=METADATA,
    spec=fields(
        "selector podMetricsEndpoints",
        jobLabel=TEXT,
        selector=SELECTOR,
        podMetricsEndpoints=several(
            fields(
                "port",
                port=TEXT,
                path=TEXT,
                interval=DURATION,
                authorization=fields(
                    "credentials",
                    type=TEXT,
                    credentials=fields("name key", name=TEXT, key=TEXT),
                ),
            )
        ),
    ),
)
RULE = fields(
    "alert expr",
    alert=TEXT,
    expr=TEXT,
    labels=TEXTS,
    annotations=TEXTS,
    **{"for": DURATION},
)
PROMETHEUS_RULE = fields(
    "apiVersion kind metadata spec",
    apiVersion=one_of("monitoring.coreos.com/v1"),
    kind=one_of("PrometheusRule"),
    metadata=METADATA,
    spec=fields("groups", groups=several(fields("name rules", name=TEXT, rules=several(RULE)))),
)
CONFIG_MAP = fields(
    "apiVersion kind metadata data",
    apiVersion=one_of("v1"),
    kind=one_of("ConfigMap"),
    metadata=METADATA,
    data=TEXTS,
)
PORTS = several(fields("port protocol", port=COUNT, protocol=one_of("TCP")))
NETWORK_POLICY = fields(
    "apiVersion kind metadata spec",
    apiVersion=one_of("networking.k8s.io/v1"),
    kind=one_of("NetworkPolicy"),
    metadata=METADATA,
    spec=fields(
        "podSelector policyTypes",
        podSelector=SELECTOR,
        policyTypes=several(one_of("Ingress", "Egress")),
        ingress=several(
            fields(
                "from",
                ports=PORTS,
                **{
                    "from": several(
                        fields(
                            podSelector=SELECTOR,
                            namespaceSelector=fields(matchLabels=TEXTS),
                        )
                    )
                },
            )
        ),
    ),
)
DISRUPTION_BUDGET = fields(
    "apiVersion kind metadata spec",
    apiVersion=one_of("policy/v1"),
    kind=one_of("PodDisruptionBudget"),
    metadata=METADATA,
    spec=fields("selector", maxUnavailable=COUNT, minAvailable=COUNT, selector=SELECTOR),
)
