{{- define "kvloop.workerPort" -}}
{{ if eq . "prefill" }}50051{{ else }}50052{{ end }}
{{- end -}}

{{/* Pod of a worker. ray: "" a worker by itself, "head" the one that serves, "member" lends its GPUs to vLLM. */}}
{{- define "kvloop.worker" -}}
{{- $part := ternary (printf "%s-member" .part) .part (eq .ray "member") }}
{{- $values := .root.Values }}
{{- $settings := mergeOverwrite (deepCopy $values.worker.settings) .own.settings }}
{{- $env := mergeOverwrite (deepCopy $values.worker.env) .own.env }}
metadata:
  # Members serve nothing, so that Services and monitoring must not take them for workers.
  labels: {{- include "kvloop.labels" (dict "root" .root "part" $part) | nindent 4 }}
spec:
  automountServiceAccountToken: false
  # Kubernetes would name Services in variables that look like settings.
  enableServiceLinks: false
  {{- include "kvloop.pullSecrets" .root | nindent 2 }}
  terminationGracePeriodSeconds: {{ $values.worker.terminationGracePeriodSeconds }}
  securityContext: {{- include "kvloop.podSecurity" (dict "user" $values.worker.runAsUser) | nindent 4 }}
  {{- with $values.worker.nodeSelector }}
  nodeSelector: {{ toJson . }}
  {{- end }}
  {{- with $values.worker.tolerations }}
  tolerations: {{ toJson . }}
  {{- end }}
  containers:
    - name: worker
      image: {{ include "kvloop.image" (dict "root" .root "image" "worker") }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      {{- if eq .ray "member" }}
      command: [sh, -c, 'until ray health-check --address "$LWS_LEADER_ADDRESS:6379"; do sleep 2; done; exec ray start --block --address="$LWS_LEADER_ADDRESS:6379"']
      {{- else if eq .ray "head" }}
      command: [sh, -c, 'ray start --head --port=6379 && exec kvloop serve {{ .part }}']
      {{- else }}
      args: [serve, {{ .part }}]
      {{- end }}
      env:
        - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        - {name: HOME, value: /home/kvloop}
        - {name: KVLOOP_LISTEN, value: "0.0.0.0:{{ include "kvloop.workerPort" .part }}"}
        - {name: KVLOOP_WORKER_ID, value: $(POD_NAME)}
        - {name: KVLOOP_ADVERTISE, value: "$(POD_IP):{{ include "kvloop.workerPort" .part }}"}
        - {name: KVLOOP_NIXL_SIDE_CHANNEL_HOST, value: $(POD_IP)}
        - {name: KVLOOP_NIXL_SIDE_CHANNEL_PORT, value: {{ $values.worker.sideChannelPort | quote }}}
        - {name: KVLOOP_NIXL_BACKENDS, value: {{ $values.worker.nixlBackends | quote }}}
        - {name: KVLOOP_MODEL, value: {{ $values.model.name | quote }}}
        - {name: KVLOOP_SERVED_MODEL_NAME, value: {{ $values.model.servedName | quote }}}
        - {name: KVLOOP_MAX_MODEL_LEN, value: {{ include "kvloop.text" $values.model.maxModelLen | quote }}}
        {{- include "kvloop.storeUrl" .root | nindent 8 }}
        {{- include "kvloop.metricsEnv" .root | nindent 8 }}
        {{- include "kvloop.tlsEnv" .root | nindent 8 }}
        {{- include "kvloop.settings" $settings | nindent 8 }}
        {{- include "kvloop.env" $env | nindent 8 }}
      {{- if ne .ray "member" }}
      ports:
        - {name: grpc, containerPort: {{ include "kvloop.workerPort" .part }}}
        - {name: metrics, containerPort: {{ $values.metrics.port }}}
        - {name: side-channel, containerPort: {{ $values.worker.sideChannelPort }}}
      {{- include "kvloop.grpcProbes" (dict "root" .root "port" (include "kvloop.workerPort" .part) "startup" $values.worker.startupSeconds) | nindent 6 }}
      {{- end }}
      resources: {{ toJson $values.worker.resources }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL], add: {{ toJson $values.worker.capabilities }}}
      volumeMounts:
        - {name: shm, mountPath: /dev/shm}
        - {name: tmp, mountPath: /tmp}
        - {name: tmp, mountPath: /home/kvloop}
        {{- if $values.model.volumeClaim }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- include "kvloop.tlsMount" .root | nindent 8 }}
  volumes:
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $values.worker.sharedMemory }}}}
    - {name: tmp, emptyDir: {sizeLimit: 8Gi}}
    {{- include "kvloop.tlsVolume" .root | nindent 4 }}
    {{- with $values.model.volumeClaim }}
    - {name: models, persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}}
    {{- end }}
{{- end -}}
