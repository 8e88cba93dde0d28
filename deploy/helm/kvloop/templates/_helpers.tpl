{{- define "kvloop.name" -}}
{{- default .Release.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels of a part; call with (dict "root" $ "part" "router"). */}}
{{- define "kvloop.selector" -}}
app.kubernetes.io/name: kvloop
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{/* Selector, as JSON, of the pods of workers' roles, the members of groups among them; call with
     (dict "root" $ "roles" (list "prefill")). */}}
{{- define "kvloop.workerSelector" -}}
{{- $parts := list }}
{{- range .roles }}
{{- $parts = concat $parts (list . (printf "%s-member" .)) }}
{{- end }}
{{- $labels := omit (include "kvloop.selector" (dict "root" .root "part" "") | fromYaml) "app.kubernetes.io/component" }}
{{- $chosen := dict "key" "app.kubernetes.io/component" "operator" "In" "values" $parts }}
{{- dict "matchLabels" $labels "matchExpressions" (list $chosen) | toJson }}
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

{{/* Call with (dict "user" uid). */}}
{{- define "kvloop.podSecurity" -}}
runAsNonRoot: {{ ne (int .user) 0 }}
runAsUser: {{ int .user }}
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "kvloop.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* A value as text. Helm reads numbers as floats, which from a million on would be written with an exponent. */}}
{{- define "kvloop.text" -}}
{{- if or (kindIs "map" .) (kindIs "slice" .) -}}
{{ toJson . }}
{{- else if and (kindIs "float64" .) (eq (floor .) .) -}}
{{ int64 . }}
{{- else -}}
{{ toString . }}
{{- end -}}
{{- end -}}

{{/* Settings as environment: key name -> KVLOOP_NAME; mappings and lists become JSON. */}}
{{- define "kvloop.settings" -}}
{{- range $name, $value := . }}
- name: KVLOOP_{{ upper $name }}
  value: {{ include "kvloop.text" $value | quote }}
{{- end }}
{{- end -}}

{{- define "kvloop.env" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ include "kvloop.text" $value | quote }}
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
     before it lets endpoints and clients' name look-ups forget the pod first. A process listens, and is alive, long
     before it is ready: a worker's model loads, a router waits for workers. Neither is cured by a restart. */}}
{{- define "kvloop.grpcProbes" -}}
{{- $alive := dict "grpc" (dict "port" (int .port) "service" "liveness") }}
{{- $ready := dict "grpc" (dict "port" (int .port)) }}
{{- if .root.Values.tls.secretName }}
{{- /* The kubelet's gRPC probes speak no TLS; the metrics' port tells the same over plain HTTP. */}}
{{- $alive = dict "httpGet" (dict "path" "/livez" "port" "metrics") }}
{{- $ready = dict "httpGet" (dict "path" "/readyz" "port" "metrics") }}
{{- end }}
startupProbe: {{ merge (dict "periodSeconds" 5 "timeoutSeconds" 5 "failureThreshold" (div .startup 5)) $alive | toJson }}
readinessProbe: {{ merge (dict "periodSeconds" 2 "timeoutSeconds" 2 "failureThreshold" 2) $ready | toJson }}
livenessProbe: {{ merge (dict "periodSeconds" 10 "timeoutSeconds" 5 "failureThreshold" 6) $alive | toJson }}
lifecycle: {preStop: {exec: {command: [sleep, "5"]}}}
{{- end -}}

{{/* Certificates, where tls.secretName names a secret that holds them; cert-manager's has these keys. */}}
{{- define "kvloop.tlsEnv" -}}
{{- with .Values.tls }}
{{- if .secretName }}
- {name: KVLOOP_TLS_CERT, value: /run/secrets/kvloop-tls/tls.crt}
- {name: KVLOOP_TLS_KEY, value: /run/secrets/kvloop-tls/tls.key}
- {name: KVLOOP_TLS_CA, value: /run/secrets/kvloop-tls/ca.crt}
- {name: KVLOOP_TLS_SERVER_NAME, value: {{ .serverName | quote }}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvloop.tlsMount" -}}
{{- if .Values.tls.secretName }}
- {name: tls, mountPath: /run/secrets/kvloop-tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "kvloop.tlsVolume" -}}
{{- with .Values.tls.secretName }}
- {name: tls, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- end -}}

{{- define "kvloop.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- end -}}
