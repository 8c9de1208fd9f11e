{{- define "hostprep.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "hostprep.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "hostprep.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "hostprep.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The namespace of all that has one: a chart of charts may put parts of a release elsewhere. */}}
{{- define "hostprep.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride -}}
{{- end -}}

{{/* What never changes in the life of a workload. Takes (dict "root" $ "component" "agent").
The operator finds its agents by name and component: an override must not change them. */}}
{{- define "hostprep.selector" -}}
app.kubernetes.io/name: hostprep
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Fails on a label that the chart sets itself: the operator finds its agents by them. */}}
{{- define "hostprep.checkLabels" -}}
{{- range $name, $_ := . -}}
{{- if or (eq $name "helm.sh/chart") (has $name (list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "app.kubernetes.io/part-of" "app.kubernetes.io/version" "app.kubernetes.io/managed-by")) -}}
{{- fail (printf "the label %s is the chart's own, and commonLabels and podLabels cannot change it" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels of every object. Takes (dict "root" $ "component" "agent"). */}}
{{- define "hostprep.labels" -}}
{{ include "hostprep.selector" . }}
app.kubernetes.io/part-of: hostprep
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- include "hostprep.checkLabels" .root.Values.commonLabels }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of pods: without the version, or every upgrade of the chart would restart agents.
Takes (dict "root" $ "component" "agent" "labels" .Values.agent.podLabels), labels if any. */}}
{{- define "hostprep.podLabels" -}}
{{ include "hostprep.selector" . }}
app.kubernetes.io/part-of: hostprep
{{- include "hostprep.checkLabels" .labels }}
{{- with merge (dict) (default dict .labels) .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of the chart and those that a value adds, each name once: Helm 4 applies server-side, and
that refuses a name that comes twice. Takes (dict "root" $ "component" "metrics" "labels" ...). */}}
{{- define "hostprep.labelsAnd" -}}
{{- toYaml (merge (dict) (default dict .labels) (include "hostprep.labels" . | fromYaml)) -}}
{{- end -}}

{{/* Labels of the nodes a pod may run on. Takes the nodeSelector of a value. */}}
{{- define "hostprep.nodeSelector" -}}
{{- toYaml (merge (dict) (default dict .) (dict "kubernetes.io/os" "linux")) -}}
{{- end -}}

{{/* Environment variables of a value, after those of the chart. Takes (dict "value"
"agent.extraEnv" "env" .Values.agent.extraEnv "own" (list "NODE_NAME")). Fails on a name that comes
twice: which of them counted would depend on who applies, and Helm 4 is refused by the API server. */}}
{{- define "hostprep.extraEnv" -}}
{{- $names := .own -}}
{{- $value := .value -}}
{{- range .env -}}
{{- if has .name $names -}}
{{- fail (printf "%s names %s, which is there already: the chart sets %s itself, and each other name may come once" $value .name (join " and " $.own)) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- with .env -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}

{{/* Of a probe, what a value sets. Takes (dict "path" "/healthz" "timing" .Values.x.probes.y). */}}
{{- define "hostprep.probe" -}}
httpGet: {path: {{ .path }}, port: metrics}
{{ toYaml .timing }}
{{- end -}}

{{- define "hostprep.image" -}}
{{- $image := .Values.image -}}
{{- if not (or $image.registry (contains "/" $image.repository)) -}}
{{- fail "image.registry is not set, so no node could pull the image: push it by `make image REGISTRY=registry.example.org`, with a registry of yours, and add --set image.registry=registry.example.org" -}}
{{- end -}}
{{- $name := join "/" (compact (list $image.registry $image.repository)) -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default .Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* The key that keeps pods off nodes which are not prepared; empty without one. */}}
{{- define "hostprep.taintKey" -}}
{{- if .Values.taintKey -}}
{{- .Values.taintKey -}}
{{- else -}}
{{- get (dict
      "clusterAutoscaler" "startup-taint.cluster-autoscaler.kubernetes.io/hostprep"
      "karpenter" "startup-taint.cluster-autoscaler.kubernetes.io/hostprep"
      "nodeReadinessController" "readiness.k8s.io/hostprep"
      "none" "") .Values.autoscaler.profile -}}
{{- end -}}
{{- end -}}

{{/* A JSON list: the keys of taints that the operator may set and remove. */}}
{{- define "hostprep.allowedTaintKeys" -}}
{{- $usual := "startup-taint.cluster-autoscaler.kubernetes.io/hostprep" -}}
{{- range append .Values.admissionPolicy.taintKeys .Values.taintKey -}}
{{- if and . (not (regexMatch "hostprep|host-memory" .)) -}}
{{- fail (printf "%s is not a taint of Hostprep's, and the operator would take it off every ready node: keys in taintKey and admissionPolicy.taintKeys must contain hostprep or host-memory, such as example.com/host-memory" .) -}}
{{- end -}}
{{- end -}}
{{- concat (list $usual) (compact (list .Values.taintKey)) .Values.admissionPolicy.taintKeys | uniq | toJson -}}
{{- end -}}

{{/* A cluster of one node that registers tainted must open: what opens it has to run there. */}}
{{- define "hostprep.startupTolerations" -}}
{{- with include "hostprep.taintKey" . }}
- key: {{ . }}
  operator: Exists
{{- end }}
- key: node.kubernetes.io/not-ready
  operator: Exists
  effect: NoSchedule
- key: node-role.kubernetes.io/control-plane
  operator: Exists
  effect: NoSchedule
{{- end -}}

{{/* Pod level of the restricted standard, for all pods but the agents'. OpenShift's restricted-v2
gives each namespace ids of its own and refuses others. */}}
{{- define "hostprep.restrictedPod" -}}
{{- $context := .Values.operator.podSecurityContext -}}
{{- if .Values.openshift.enabled -}}
{{- $context = omit $context "runAsUser" "runAsGroup" "fsGroup" -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{/* Container level of the restricted standard, for all pods but the agents'. */}}
{{- define "hostprep.restrictedContainer" -}}
{{- toYaml .Values.operator.securityContext -}}
{{- end -}}

{{/* Same, of the Jobs and pods of hooks: hooks.* goes before the operator's. */}}
{{- define "hostprep.hookPod" -}}
{{- toYaml (merge (deepCopy .Values.hooks.podSecurityContext) (include "hostprep.restrictedPod" . | fromYaml)) -}}
{{- end -}}
{{- define "hostprep.hookContainer" -}}
{{- toYaml (merge (deepCopy .Values.hooks.securityContext) (include "hostprep.restrictedContainer" . | fromYaml)) -}}
{{- end -}}

{{/* Container level of the agents: root, and of root what their mode needs. */}}
{{- define "hostprep.agentContainer" -}}
{{- $context := dict "runAsUser" 0 "runAsGroup" 0 "readOnlyRootFilesystem" true -}}
{{- if eq .Values.agent.mode "privileged" -}}
{{- /* Mounts that the node shall see need Bidirectional, and that needs this. */ -}}
{{- $_ := set $context "privileged" true -}}
{{- else -}}
{{- /* Files get the pool's group (CHOWN, FOWNER), engines' files are looked at whatever their mode
(DAC_OVERRIDE), memory is bound to its NUMA node (SYS_NICE). */ -}}
{{- $_ := set $context "privileged" false -}}
{{- $_ := set $context "allowPrivilegeEscalation" false -}}
{{- $_ := set $context "capabilities" (dict "drop" (list "ALL") "add" (include "hostprep.agentCapabilities" . | fromJsonArray)) -}}
{{- $_ := set $context "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- end -}}
{{- with .Values.agent.seLinuxOptions -}}
{{- $_ := set $context "seLinuxOptions" . -}}
{{- end -}}
{{- toYaml (merge (deepCopy .Values.agent.securityContext) $context) -}}
{{- end -}}

{{/* A JSON list: what an agent in mode adopt may do, besides being root. */}}
{{- define "hostprep.agentCapabilities" -}}
{{- if ne .Values.agent.mode "privileged" -}}
{{- list "CHOWN" "DAC_OVERRIDE" "FOWNER" "SYS_NICE" | toJson -}}
{{- else -}}
[]
{{- end -}}
{{- end -}}

{{/* "true" or "". Takes (dict "root" $ "value" .Values.x.enabled). */}}
{{- define "hostprep.monitoring" -}}
{{- $has := .root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1" -}}
{{- if or (eq (toString .value) "true") (and (eq (toString .value) "auto") $has) -}}true{{- end -}}
{{- end -}}
