"""Kinds of Karpenter and others, as far as ours use them: no schema of theirs comes with a package.

See karpenter.sh/docs.
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

KINDS = {"NodePool": NODE_POOL, "EC2NodeClass": EC2_NODE_CLASS, "PodMonitor": POD_MONITOR}
