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

{{/* What never changes in the life of a workload. Takes (dict "root" $ "component" "agent").
The operator finds its agents by name and component: an override must not change them. */}}
{{- define "hostprep.selector" -}}
app.kubernetes.io/name: hostprep
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of every object. Takes (dict "root" $ "component" "agent"). */}}
{{- define "hostprep.labels" -}}
{{ include "hostprep.selector" . }}
app.kubernetes.io/part-of: hostprep
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of pods: without the version, or every upgrade of the chart would restart agents. */}}
{{- define "hostprep.podLabels" -}}
{{ include "hostprep.selector" . }}
app.kubernetes.io/part-of: hostprep
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
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

{{/* Pod level of the restricted standard. */}}
{{- define "hostprep.restrictedPod" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Container level of the restricted standard. */}}
{{- define "hostprep.restrictedContainer" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* "true" or "". Takes (dict "root" $ "value" .Values.x.enabled). */}}
{{- define "hostprep.monitoring" -}}
{{- $has := .root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1" -}}
{{- if or (eq (toString .value) "true") (and (eq (toString .value) "auto") $has) -}}true{{- end -}}
{{- end -}}
