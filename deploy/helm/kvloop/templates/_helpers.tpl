{{- define "kvloop.name" -}}
{{- default .Release.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels of a part; call with (dict "root" $ "part" "router"). */}}
{{- define "kvloop.selector" -}}
app.kubernetes.io/name: kvloop
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "kvloop.labels" -}}
{{ include "kvloop.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end -}}

{{- define "kvloop.image" -}}
{{- $image := index .root.Values.image .image -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end -}}
{{ $image }}:{{ default .root.Chart.AppVersion .root.Values.image.tag }}
{{- end -}}

{{- define "kvloop.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "kvloop.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Settings as environment: key name -> KVLOOP_NAME; mappings become JSON. */}}
{{- define "kvloop.settings" -}}
{{- range $name, $value := . }}
- name: KVLOOP_{{ upper $name }}
  value: {{ if kindIs "map" $value }}{{ toJson $value | quote }}{{ else }}{{ $value | toString | quote }}{{ end }}
{{- end }}
{{- end -}}

{{- define "kvloop.env" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end -}}

{{- define "kvloop.storeUrl" -}}
- name: KVLOOP_DIRECTORY_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.store.secretName }}, key: {{ .Values.store.secretKey }}}}
{{- end -}}

{{- define "kvloop.metricsEnv" -}}
- {name: KVLOOP_METRICS_LISTEN, value: "0.0.0.0:{{ .Values.metrics.port }}"}
- {name: KVLOOP_METRICS_OPEN, value: "true"}
{{- end -}}

{{/* Readiness goes off when draining begins, liveness stays on; SIGTERM starts the drain by itself. The pause
     before it lets endpoints and clients' name look-ups forget the pod first. */}}
{{- define "kvloop.grpcProbes" -}}
startupProbe: {grpc: {port: {{ .port }}}, periodSeconds: 5, failureThreshold: {{ div .startup 5 }}}
readinessProbe: {grpc: {port: {{ .port }}}, periodSeconds: 2, timeoutSeconds: 2, failureThreshold: 2}
livenessProbe: {grpc: {port: {{ .port }}, service: liveness}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}
lifecycle: {preStop: {exec: {command: [sleep, "5"]}}}
{{- end -}}

{{- define "kvloop.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- end -}}
