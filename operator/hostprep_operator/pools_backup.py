"""The pools of an uninstall, kept in ConfigMaps until they are restored.

Each pool is one key, `<pool>.json`, with a manifest that `kubectl apply` takes. A key is written
before its pool is changed or deleted, and no key is ever rewritten for another's sake: an
interruption at any instant loses nothing. What an uninstall changes on a pool before it deletes it
is recorded on the pool itself, so a manifest is always of the pool as people wrote it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from hostprep.api.names import API_VERSION, GROUP, POOL_KIND, POOL_PLURAL, VERSION
from hostprep.api.selector import NodeSelection
from hostprep.errors import BadInputError, FailedError
from hostprep.kube.client import POOLS, Json, KubeClient, Resource
from hostprep.kube.errors import (
    ConflictError,
    NoSuchResourceError,
    RefusedError,
    UnauthorizedError,
)

BACKUP_NAME = "hostprep-pools-backup"
MAX_PARTS = 8
PART_NAMES = (BACKUP_NAME, *(f"{BACKUP_NAME}-{i}" for i in range(2, MAX_PARTS + 1)))
"""The ConfigMaps: more than the first only where the pools need more than PART_BYTES."""
PART_BYTES = 900_000
"""Of a ConfigMap's keys and values. The API server takes 1 MiB (core/v1 MaxSecretSize, which its
validation of ConfigMaps uses too)."""
ORIGINAL_ANNOTATION = f"{GROUP}/before-uninstall"
"""On a pool that is about to be deleted: the fields that were changed, as they were."""
_LABELS = {"app.kubernetes.io/name": "hostprep", f"{GROUP}/backup": "pools"}
_STATE, _TIME = f"{GROUP}/backup-state", f"{GROUP}/backup-time"
_SUFFIX = ".json"
_CHANGED_FIELDS = ("deletionProtection", "release")


def configmaps(namespace: str) -> Resource:
    """Return the ConfigMaps of a namespace."""
    return Resource("ConfigMap", f"/api/v1/namespaces/{namespace}/configmaps")


def manifest_of(pool: Mapping[str, Any]) -> Json:
    """Return the pool as people wrote it: name, labels, annotations and spec.

    Without status and what servers write, and without owners and finalizers, which would not be
    those of today when it is restored. A pool of before the word `allNodes`, which selects every
    node by naming none, gets the word: it could not be created again without it. Raises KeyError
    without a name.
    """
    metadata = pool["metadata"]
    annotations = dict(metadata.get("annotations") or {})
    spec = copy.deepcopy(dict(pool.get("spec") or {}))
    for name, value in _original(annotations.pop(ORIGINAL_ANNOTATION, None)).items():
        if value is None:
            spec.pop(name, None)
        else:
            spec[name] = value
    if NodeSelection.from_spec(spec).selects_all:
        spec = {k: v for k, v in spec.items() if k not in ("nodeSelector", "nodeSelectorTerms")}
        spec["allNodes"] = True
    kept: Json = {"name": metadata["name"]}
    if metadata.get("labels"):
        kept["labels"] = dict(metadata["labels"])
    if annotations:
        kept["annotations"] = annotations
    return {"apiVersion": API_VERSION, "kind": POOL_KIND, "metadata": kept, "spec": spec}


def patch_before_deleting(pool: Mapping[str, Any]) -> Json:
    """Return the merge patch that lets this very version go, at once, and records what it was."""
    spec = manifest_of(pool)["spec"]
    original = json.dumps({name: spec.get(name) for name in _CHANGED_FIELDS}, sort_keys=True)
    return {
        "metadata": {
            "resourceVersion": pool["metadata"]["resourceVersion"],
            "annotations": {ORIGINAL_ANNOTATION: original},
        },
        "spec": {"deletionProtection": "None", "release": {"when": "Immediately"}},
    }


def patch_after_all(pool: Mapping[str, Any]) -> Json | None:
    """Return the merge patch that takes back `patch_before_deleting`; None without one."""
    annotations = pool["metadata"].get("annotations") or {}
    if ORIGINAL_ANNOTATION not in annotations:
        return None
    return {
        "metadata": {
            "resourceVersion": pool["metadata"]["resourceVersion"],
            "annotations": {ORIGINAL_ANNOTATION: None},
        },
        "spec": _original(annotations[ORIGINAL_ANNOTATION]),
    }


def _original(text: str | None) -> dict[str, Any]:
    """Return the recorded fields; none where somebody else wrote the annotation."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    fields = found if isinstance(found, dict) else {}
    return {name: fields[name] for name in _CHANGED_FIELDS if name in fields}


@dataclass(slots=True)
class Backup:
    """The ConfigMaps of one namespace, as they were read."""

    namespace: str
    parts: dict[str, Json] = field(default_factory=dict)
    """The ConfigMaps that exist, by name."""

    @property
    def state(self) -> str:
        """`open` while an uninstall has not ended, `complete`, `restored`; empty for none."""
        return self._annotation(_STATE)

    @property
    def time(self) -> str:
        """When it was begun, RFC 3339."""
        return self._annotation(_TIME)

    @property
    def manifests(self) -> dict[str, Json]:
        """The pools by name. Raises FailedError for a key that holds no pool."""
        found: dict[str, Json] = {}
        for part in self.parts.values():
            for key, text in (part.get("data") or {}).items():
                manifest = _parsed(part["metadata"]["name"], key, text)
                found[manifest["metadata"]["name"]] = manifest
        return found

    def _annotation(self, name: str) -> str:
        metadata = (self.parts.get(BACKUP_NAME) or {}).get("metadata") or {}
        return str((metadata.get("annotations") or {}).get(name) or "")


class BackupStore:
    """Reads and writes the backup. All methods raise ApiError."""

    def __init__(self, kube: KubeClient, namespace: str) -> None:
        self._kube = kube
        self._resource = configmaps(namespace)
        self._namespace = namespace

    async def read(self) -> Backup:
        """Return the backup; empty where there is none."""
        backup = Backup(self._namespace)
        for name in PART_NAMES:
            if (part := await self._kube.get(self._resource, name)) is not None:
                backup.parts[name] = part
        return backup

    async def begin(self) -> Backup:
        """Return the backup of an uninstall that was interrupted, or an empty one.

        One that is complete or restored belongs to an uninstall that has ended: it is replaced.
        """
        backup = await self.read()
        if backup.state == "open":
            return backup
        for name, part in reversed(backup.parts.items()):
            await self._kube.delete(self._resource, name, uid=part["metadata"]["uid"])
        return Backup(self._namespace)

    async def keep(self, backup: Backup, manifests: Iterable[Json]) -> None:
        """Write these pools, and read them back.

        Raises BadInputError where they need more room than there is, and FailedError where the
        answer differs from what was written.
        """
        manifests = list(manifests)
        for manifest in manifests:
            await self._keep_one(backup, manifest)
        backup.parts = (await self.read()).parts
        kept = backup.manifests
        for manifest in manifests:
            name = manifest["metadata"]["name"]
            if kept.get(name) != manifest:
                raise FailedError(
                    f"the backup of pool {name} differs from what was written",
                    reason="BackupDiffers",
                    remedy="find out who else writes these ConfigMaps, then run this again",
                )

    async def mark(self, backup: Backup, state: str) -> None:
        """Write the state; nothing without a backup."""
        if BACKUP_NAME in backup.parts:
            patch = {"metadata": {"annotations": {_STATE: state}}}
            await self._kube.patch(self._resource, BACKUP_NAME, patch)

    async def _keep_one(self, backup: Backup, manifest: Json) -> None:
        key = manifest["metadata"]["name"] + _SUFFIX
        text = _text(manifest)
        name = part_for(backup, key, text)
        if name is None:
            raise too_large([manifest["metadata"]["name"]])
        if name in backup.parts:
            written = await self._kube.patch(self._resource, name, {"data": {key: text}})
        else:
            written = await self._create(name, {key: text})
        if written is None:
            raise FailedError(
                f"ConfigMap {name} is gone, or namespace {self._namespace}",
                remedy="run this again",
            )
        backup.parts[name] = written
        for other, part in backup.parts.items():
            if other != name and key in (part.get("data") or {}):
                cleared = await self._kube.patch(self._resource, other, {"data": {key: None}})
                backup.parts[other] = cleared or part

    async def _create(self, name: str, data: Mapping[str, str]) -> Json | None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        annotations = {_STATE: "open", _TIME: now} if name == BACKUP_NAME else {}
        metadata = {"name": name, "labels": _LABELS, "annotations": annotations}
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
        return await self._kube.create(self._resource, body)


def part_for(backup: Backup, key: str, text: str) -> str | None:
    """Return the ConfigMap with room for a key; None where no part has any."""
    needed = len(key) + len(text.encode())
    holding = [name for name, part in backup.parts.items() if key in (part.get("data") or {})]
    for name in (*holding, *PART_NAMES):
        data = (backup.parts.get(name) or {}).get("data") or {}
        taken = sum(len(k) + len(v.encode()) for k, v in data.items() if k != key)
        if taken + needed <= PART_BYTES:
            return name
    return None


def manifests_without_room(manifests: Iterable[Json]) -> list[str]:
    """Return the pools for which an empty backup would have no room left."""
    backup, names = Backup(""), []
    for manifest in manifests:
        key, text = manifest["metadata"]["name"] + _SUFFIX, _text(manifest)
        part = part_for(backup, key, text)
        if part is None:
            names.append(manifest["metadata"]["name"])
        else:
            backup.parts.setdefault(part, {"data": {}})["data"][key] = text
    return names


def too_large(names: Iterable[str]) -> BadInputError:
    """Return the error for pools that no ConfigMap can keep."""
    return BadInputError(
        f"pools too large for a backup in ConfigMaps of {PART_BYTES} bytes: {', '.join(names)}",
        reason="BackupTooLarge",
        remedy=f"save them with kubectl get {POOL_PLURAL}.{VERSION}.{GROUP} NAME -o yaml and delete"
        " them yourself, then run this again",
    )


def _text(manifest: Json) -> str:
    return json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"


def _parsed(part: str, key: str, text: str) -> Json:
    try:
        manifest = json.loads(text)
        if manifest["kind"] == POOL_KIND and manifest["metadata"]["name"] + _SUFFIX == key:
            return dict(manifest)
    except (ValueError, KeyError, TypeError):
        pass
    raise FailedError(
        f"key {key} of ConfigMap {part} holds no HostMemoryPool",
        reason="BackupDamaged",
        remedy="mend or remove that key",
    )


@dataclass(slots=True)
class RestoreResult:
    """What was restored, or would be."""

    dry_run: bool
    backup_time: str = ""
    created: list[str] = field(default_factory=list)
    put_back: list[str] = field(default_factory=list)
    """Pools that an interrupted uninstall had prepared for deletion: as they were again."""
    unchanged: list[str] = field(default_factory=list)
    """Exist, as they are in the backup."""
    different: list[str] = field(default_factory=list)
    """Exist, and differ from the backup: left as they are."""
    refused: dict[str, str] = field(default_factory=dict)
    """Pools that the API server does not take, with what it says."""


async def restore(
    kube: KubeClient, namespace: str, names: frozenset[str], *, dry_run: bool
) -> RestoreResult:
    """Put the pools of the backup back, all of them where none is named.

    One that the API server refuses keeps no other from being restored; the backup then counts as
    not restored. Raises BadInputError where there is no such backup, pool or custom resource, and
    ApiError.
    """
    store = BackupStore(kube, namespace)
    backup = await store.read()
    manifests = backup.manifests
    _check(backup, namespace, names, manifests)
    if "create" not in await kube.verbs(POOLS):
        raise BadInputError(
            "the cluster has no HostMemoryPools: their custom resource definition is missing",
            reason="NoDefinitions",
            remedy="install the chart, or apply charts/hostprep/files/crds, then run this again",
        )
    result = RestoreResult(dry_run=dry_run, backup_time=backup.time)
    for name in sorted(names or manifests):
        try:
            await _restore_one(kube, manifests[name], result)
        except (UnauthorizedError, NoSuchResourceError):
            raise  # the others would be refused as well
        except RefusedError as error:
            result.refused[name] = error.answer
    if not (dry_run or names or result.refused):
        await store.mark(backup, "restored")
    return result


def refused_text(name: str, why: str, namespace: str) -> str:
    """Return what is wrong with a pool that was refused, and what to do."""
    key = f"{name}{_SUFFIX}".replace(".", "\\.")
    return (
        f"pool {name} is not restored, the API server refuses it: {why}; mend a copy and apply it: "
        f"kubectl -n {namespace} get configmaps -l {GROUP}/backup=pools "
        f"-o jsonpath='{{.items[*].data.{key}}}' > {name}.json"
    )


def _check(
    backup: Backup, namespace: str, names: frozenset[str], manifests: Mapping[str, Json]
) -> None:
    if not backup.parts:
        raise BadInputError(
            f"namespace {namespace} has no ConfigMap {BACKUP_NAME}",
            reason="NoBackup",
            remedy="give --namespace of the release; without the namespace the backup is gone too",
        )
    if unknown := sorted(names - manifests.keys()):
        raise BadInputError(
            f"the backup has no pool {', '.join(unknown)}",
            reason="NoSuchPool",
            remedy=f"it has {', '.join(sorted(manifests)) or 'none'}",
        )


async def _restore_one(kube: KubeClient, manifest: Json, result: RestoreResult) -> None:
    name = manifest["metadata"]["name"]
    while True:
        found = await kube.get(POOLS, name)
        if found is None:
            if not result.dry_run and not await _created(kube, manifest):
                continue
            result.created.append(name)
            return
        patch = patch_after_all(found)
        if patch is None:
            same = manifest_of(found) == manifest
            (result.unchanged if same else result.different).append(name)
            return
        if result.dry_run or await _patched(kube, name, patch):
            result.put_back.append(name)
            return


async def _created(kube: KubeClient, manifest: Json) -> bool:
    """Create a pool; False when somebody else did meanwhile."""
    try:
        return await kube.create(POOLS, manifest) is not None
    except ConflictError:
        return False


async def _patched(kube: KubeClient, name: str, patch: Json) -> bool:
    """Patch a pool; False when it was changed or deleted meanwhile."""
    try:
        return await kube.patch(POOLS, name, patch) is not None
    except ConflictError:
        return False
