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
imagePullPolicy: IfNotPresent
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop:
      - ALL
{{- end -}}
