{{/* Names are fixed: permissions are granted by name, and one cluster has one groundcrew. */}}

{{- define "groundcrew.labels" -}}
app.kubernetes.io/name: groundcrew
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* The labels of the pods of one component: (list "operator") */}}
{{- define "groundcrew.selector" -}}
app.kubernetes.io/name: groundcrew
app.kubernetes.io/component: {{ first . }}
{{- end }}

{{- define "groundcrew.image" -}}
{{- with .Values.image -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}
{{- else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{/* The Secret of somebody else that the certificate comes from; empty when the operator makes its own. */}}
{{- define "groundcrew.certificateSecret" -}}
{{- if .Values.certificates.certManager.enabled }}groundcrew-webhook-cert
{{- else }}{{ .Values.certificates.secretName }}{{ end }}
{{- end }}

{{/* Where the replicas' lease is. */}}
{{- define "groundcrew.electionNamespace" -}}
{{- .Values.config.controller.leaderElection.namespace | default .Release.Namespace }}
{{- end }}

{{/* The configuration file as the pods read it. */}}
{{- define "groundcrew.config" -}}
{{- $config := deepCopy .Values.config }}
{{- if include "groundcrew.certificateSecret" . }}
{{- $_ := set $config.webhook "certDir" "/certs" }}
{{- end }}
{{- toYaml $config }}
{{- end }}

{{/* What an agent reads of it: changes elsewhere do not restart the agents. */}}
{{- define "groundcrew.agentChecksum" -}}
{{- pick .Values.config "warmup" "logging" "metrics" "health" "tracing" | toYaml | sha256sum }}
{{- end }}

{{/* "true" when every dotted key of the condition has its value in the configuration: (list $when .) */}}
{{- define "groundcrew.holds" -}}
{{- $root := last . }}
{{- $holds := true }}
{{- range $path, $wanted := first . }}
{{- $value := $root.Values.config }}
{{- range splitList "." $path }}{{ $value = get $value . }}{{ end }}
{{- if ne (toString $value) (toString $wanted) }}{{ $holds = false }}{{ end }}
{{- end }}
{{- if $holds }}true{{ end }}
{{- end }}

{{/* The taint of a phase that the operator's pods must tolerate to start at all, also to release nodes that a feature
     now off has held. */}}
{{- define "groundcrew.tolerations" -}}
{{- $startup := .Values.config.nodeStartup }}
{{- range $startup.phases }}
{{- if kindIs "map" . }}
- {key: {{ .taintKey | quote }}, operator: Exists}
{{- else if eq . "preinit" }}
- {key: startup.k8s.io/preinit, operator: Exists}
{{- else }}
- {key: {{ $startup.taintKey | quote }}, operator: Exists}
{{- end }}
{{- end }}
{{- range $startup.operatorTolerates }}
- {key: {{ . | quote }}, operator: Exists}
{{- end }}
{{- with .Values.operator.tolerations }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "groundcrew.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "groundcrew.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "groundcrew.ports" -}}
{{- with .Values.config.metrics }}
{{- if .enabled }}
- {name: metrics, containerPort: {{ .port }}}
{{- end }}
{{- end }}
- {name: health, containerPort: {{ .Values.config.health.port }}}
{{- end }}

{{- define "groundcrew.probes" -}}
livenessProbe: {httpGet: {path: /livez, port: health}, periodSeconds: 5}
readinessProbe: {httpGet: {path: /readyz, port: health}, periodSeconds: 5}
{{- end }}

{{/* Made before the release goes, in the order of their weights, and gone when all of it went well. */}}
{{- define "groundcrew.cleanupHook" -}}
helm.sh/hook: pre-delete
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}
