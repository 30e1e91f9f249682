{{- /* What objects are called: a Service has 63 characters, and the longest name made from this one is 20 longer. */ -}}
{{- define "argosy.name" -}}
{{ .Release.Name | trunc 43 | trimSuffix "-" }}
{{- end -}}
{{- define "argosy.run" -}}
{{ .Values.run.name | default .Release.Name }}
{{- end -}}
{{- define "argosy.spec" -}}
{{ toYaml (merge (dict "name" (include "argosy.run" .)) .Values.run) }}
{{- end -}}
{{- /* `storage: CLAIM` is short for `storage: {claim: CLAIM}`. */ -}}
{{- define "argosy.storage" -}}
{{- $storage := .Values.run.cluster.storage -}}
{{- if kindIs "string" $storage }}{{ $storage = dict "claim" $storage }}{{ end -}}
{{- if not $storage.claim }}{{ fail "run.cluster.storage names no claim: data, runs and checkpoints need a shared volume" }}{{ end -}}
{{ toJson (merge (dict) $storage (dict "mount" "/data" "kind" "existing")) }}
{{- end -}}
{{- define "argosy.labels" -}}
app.kubernetes.io/name: argosy
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}
{{- define "argosy.namespace" -}}
{{ .Values.run.cluster.namespace | default .Release.Namespace }}
{{- end -}}
{{- define "argosy.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.run.cluster.user | default 1000 }}
  runAsGroup: {{ .Values.run.cluster.user | default 1000 }}
  fsGroup: {{ .Values.run.cluster.user | default 1000 }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.run.cluster.pull_secrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}
{{- define "argosy.container" -}}
image: {{ .Values.run.cluster.image | quote }}
imagePullPolicy: {{ .Values.run.cluster.pull_policy | default "auto" | replace "auto" "IfNotPresent" }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop:
      - ALL
{{- end -}}
