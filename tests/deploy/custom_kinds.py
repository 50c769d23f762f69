"""Kinds of Karpenter and others, as far as ours use them: no schema of theirs comes with a package.

See karpenter.sh/docs, lws.sigs.k8s.io/docs, kserve.github.io, gateway-api.sigs.k8s.io,
gateway-api-inference-extension.sigs.k8s.io.
"""

from __future__ import annotations

from typing import Any


def closed(required: str, **properties: Any) -> dict[str, Any]:
    """An object with these properties and no other; names in `required` must be there."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


TEXT, NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
TAGS = {"type": "array", "minItems": 1, "items": closed("tags", tags=TEXTS)}
METADATA = closed("name", name=TEXT)  # both kinds are cluster-wide

NODE_POOL = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "karpenter.sh/v1"},
    kind={"const": "NodePool"},
    metadata=METADATA,
    spec=closed(
        "template replicas",
        replicas=NUMBER,
        limits=closed("nodes", nodes=NUMBER),  # of a static pool: this limit alone
        template=closed(
            "spec",
            metadata=closed("", labels=TEXTS),
            spec=closed(
                "nodeClassRef requirements",
                nodeClassRef=closed(
                    "group kind name",
                    group={"const": "karpenter.k8s.aws"},
                    kind={"const": "EC2NodeClass"},
                    name=TEXT,
                ),
                requirements={
                    "type": "array",
                    "items": closed(
                        "key operator values",
                        key=TEXT,
                        operator={"enum": ["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]},
                        values={"type": "array", "items": TEXT},
                    ),
                },
                taints={
                    "type": "array",
                    "items": closed(
                        "key effect",
                        key=TEXT,
                        value=TEXT,
                        effect={"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
                    ),
                },
                expireAfter={"type": "string", "pattern": r"^(([0-9]+(s|m|h))+|Never)$"},
            ),
        ),
        disruption=closed(
            "consolidateAfter",
            consolidationPolicy={"enum": ["WhenEmpty", "WhenEmptyOrUnderutilized", "Balanced"]},
            consolidateAfter={"type": "string", "pattern": r"^(([0-9]+(s|m|h))+|Never)$"},
            budgets={"type": "array", "items": closed("nodes", nodes=TEXT)},
        ),
    ),
)

EC2_NODE_CLASS = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "karpenter.k8s.aws/v1"},
    kind={"const": "EC2NodeClass"},
    metadata=METADATA,
    spec=closed(
        "amiSelectorTerms role subnetSelectorTerms securityGroupSelectorTerms",
        amiSelectorTerms={
            "type": "array",
            "minItems": 1,
            "items": closed("alias", alias={"type": "string", "pattern": "^al2023@.+$"}),
        },
        role=TEXT,
        subnetSelectorTerms=TAGS,
        securityGroupSelectorTerms=TAGS,
        capacityReservationSelectorTerms=TAGS,
        instanceStorePolicy={"const": "RAID0"},
        blockDeviceMappings={
            "type": "array",
            "items": closed(
                "deviceName ebs",
                deviceName=TEXT,
                ebs=closed(
                    "volumeSize",
                    volumeSize=TEXT,
                    volumeType=TEXT,
                    encrypted={"type": "boolean"},
                    deleteOnTermination={"type": "boolean"},
                ),
            ),
        },
    ),
)

POD_MONITOR = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "monitoring.coreos.com/v1"},
    kind={"const": "PodMonitor"},
    metadata={"type": "object"},
    spec=closed(
        "namespaceSelector selector podMetricsEndpoints",
        namespaceSelector=closed("matchNames", matchNames={"type": "array", "items": TEXT}),
        selector={"type": "object"},
        podMetricsEndpoints={"type": "array", "items": closed("port", port=TEXT, interval=TEXT)},
    ),
)

LEADER_WORKER_SET = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "leaderworkerset.x-k8s.io/v1"},
    kind={"const": "LeaderWorkerSet"},
    # The name is a Service's too, so a DNS label that begins with a letter.
    metadata=closed(
        "name namespace", name={"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}, namespace=TEXT
    ),
    spec=closed(
        "leaderWorkerTemplate",
        replicas=NUMBER,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        leaderWorkerTemplate=closed(
            "leaderTemplate workerTemplate size",
            size={"type": "integer", "minimum": 1},
            restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
            leaderTemplate={"type": "object"},  # pods: Kubernetes' own schema (manifests.valid)
            workerTemplate={"type": "object"},
        ),
    ),
)

NAMED = closed("name namespace", name=TEXT, namespace=TEXT)
REFERENCE = closed("group kind name", group=TEXT, kind=TEXT, name=TEXT)
PORT = closed("number", number={"type": "integer", "minimum": 1, "maximum": 65535})


def several(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


def kind(group: str, name: str, metadata: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    return closed(
        "apiVersion kind metadata spec", apiVersion={"const": group}, kind={"const": name}, metadata=metadata, spec=spec
    )


INFERENCE_SERVICE = kind(
    "serving.kserve.io/v1beta1",
    "InferenceService",
    closed("name namespace", name=TEXT, namespace=TEXT, annotations=TEXTS),
    closed(
        "predictor",
        predictor={  # and a pod's fields: Kubernetes' own schema (manifests.valid)
            "type": "object",
            "required": ["containers", "labels"],
            "properties": {
                "labels": TEXTS,
                "minReplicas": NUMBER,
                "timeout": NUMBER,
                "deploymentStrategy": closed("type", type={"enum": ["Recreate", "RollingUpdate"]}),
            },
        },
    ),
)

INFERENCE_POOL = kind(
    "inference.networking.k8s.io/v1",
    "InferencePool",
    NAMED,
    closed(
        "selector targetPorts endpointPickerRef",
        selector=closed("matchLabels", matchLabels=TEXTS),
        targetPorts=several(PORT),
        endpointPickerRef=closed("name port", name=TEXT, port=PORT, failureMode={"enum": ["FailOpen", "FailClose"]}),
    ),
)

HTTP_ROUTE = kind(
    "gateway.networking.k8s.io/v1",
    "HTTPRoute",
    NAMED,
    closed(
        "parentRefs rules",
        parentRefs=several(NAMED),
        rules=several(closed("backendRefs", backendRefs=several(REFERENCE), timeouts=closed("request", request=TEXT))),
    ),
)

BACKEND_TLS_POLICY = kind(
    "gateway.networking.k8s.io/v1",
    "BackendTLSPolicy",
    NAMED,
    closed(
        "targetRefs validation",
        targetRefs=several(REFERENCE),
        validation=closed("hostname caCertificateRefs", hostname=TEXT, caCertificateRefs=several(REFERENCE)),
    ),
)

KINDS = {
    "InferenceService": INFERENCE_SERVICE,
    "InferencePool": INFERENCE_POOL,
    "HTTPRoute": HTTP_ROUTE,
    "BackendTLSPolicy": BACKEND_TLS_POLICY,
    "NodePool": NODE_POOL,
    "EC2NodeClass": EC2_NODE_CLASS,
    "PodMonitor": POD_MONITOR,
    "LeaderWorkerSet": LEADER_WORKER_SET,
}
